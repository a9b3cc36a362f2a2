"""The part of tests/unit/integrations/test_untouched.py that starts processes or computes for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.matrices import slow

PROGRAM = """
import json, os, sys
if sys.argv[1] == "installed":
    import hf_fsdp_plugin
    hf_fsdp_plugin.install()
before = dict(os.environ)
import torch, transformers
from accelerate import Accelerator, PartialState
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
state = PartialState()
facts = {"partial state": str(state.device), "backend": str(state.backend)}
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
    ["--output_dir", sys.argv[2], "--max_steps", "2", "--report_to", "none", "--save_steps", "1", "--seed", "3"])
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2))
model.save_pretrained(sys.argv[2] + "/model")
model = LlamaForCausalLM.from_pretrained(sys.argv[2] + "/model")
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
trainer.train()
trainer.evaluate()
trainer.train(resume_from_checkpoint=sys.argv[2] + "/checkpoint-1")
accelerator = Accelerator()
prepared, optimizer = accelerator.prepare(LlamaForCausalLM(model.config), torch.optim.SGD(model.parameters()))
accelerator.save_state(sys.argv[2] + "/state")
accelerator.load_state(sys.argv[2] + "/state")
accelerator.end_training()
facts |= {
    "arguments": {k: str(v) for k, v in arguments.to_dict().items() if k not in ("output_dir", "logging_dir")},
    "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    "device": str(accelerator.device), "type": str(accelerator.distributed_type), "model": type(prepared).__name__,
    "weights": float(sum(p.double().abs().sum() for p in trainer.model.parameters())),
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
    "files": sorted(os.path.relpath(os.path.join(d, f), sys.argv[2]) for d, _, fs in os.walk(sys.argv[2]) for f in fs),
}
print(json.dumps(facts))
"""


@pytest.mark.parametrize("variables", [slow({}), {"ACCELERATE_TORCH_DEVICE": "cpu:64"}], ids=["default", "index"])
def test_training_is_the_same_with_and_without_install(tmp_path: Path, variables: dict[str, str]) -> None:
    found = []
    for how in ("without", "installed"):
        folder = tmp_path / how
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, how, str(folder)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
            cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1].replace(how, "")))
    assert found[0] == found[1]
