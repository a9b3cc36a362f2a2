"""A training on real ranks imports no tool, under the Trainer and in a loop with an ``Accelerator``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import launch_script

LOADED = """
import atexit, os, sys

def loaded():
    names = sorted(name for name in sys.modules if name.startswith("hf_fsdp_plugin"))
    open(f"modules_{os.environ['RANK']}", "w").write(" ".join(names))

atexit.register(loaded)
"""
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=64,
))
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
arguments = TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=2, save_steps=1, save_strategy="steps", report_to=[],
    max_grad_norm=1.0, eval_strategy="steps", eval_steps=2,
)
Trainer(model, arguments, train_dataset=data, eval_dataset=data).train()
Trainer(LlamaForCausalLM(model.config), arguments, train_dataset=data, eval_dataset=data).train(
    resume_from_checkpoint="out/checkpoint-1"
)
"""
LOOP = """
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    tokens = torch.arange(16).reshape(2, 8)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("state")
accelerator.load_state("state")
accelerator.end_training()
"""


@pytest.mark.parametrize("script", [TRAINER, LOOP], ids=["trainer", "loop"])
def test_training_imports_no_tool(script: str, tmp_path: Path) -> None:
    done = launch_script(tmp_path, f"{LOADED}{MODEL}{script}", "--cpu", "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = (tmp_path / f"modules_{rank}").read_text().split()
        assert "hf_fsdp_plugin.integrations.accelerate.prepare" in names
        assert not [name for name in names if name.startswith("hf_fsdp_plugin.tools")]
