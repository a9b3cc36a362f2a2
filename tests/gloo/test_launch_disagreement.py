"""Ranks that make different calls: the run ends soon, and the message names each rank and where it was.

A rank that sleeps in a forward ends only with the time-out of the process group.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import launch, write

ACCELERATE = """
    import sys, torch
    from accelerate import Accelerator
    what = sys.argv[1]
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if what == "clip before steps" and accelerator.is_main_process:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for step in range(5 + (accelerator.process_index if what == "steps" else 0)):
        accelerator.backward(model(torch.randn(2, 8)).sum())
        if what == "clip" and accelerator.is_main_process:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and accelerator.is_main_process:
            if what == "save_state":
                accelerator.save_state("saved")
            if what == "load_state":
                accelerator.load_state("saved")
            if what == "save_model":
                accelerator.save_model(model, "saved")
            if what == "get_state_dict":
                accelerator.get_state_dict(model)
            if what == "leave":
                break
"""
TRAINER = """
    import os, sys, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    what, is_main = sys.argv[1], os.environ["RANK"] == "0"
    class Once(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2 and is_main:
                control.should_save, control.should_evaluate = what == "should_save", what == "should_evaluate"
            return control
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=1, save_strategy="no", report_to=[])
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**small)), arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[Once()]
    )
    trainer.train()
    if is_main and what in ("evaluate", "predict"):
        getattr(trainer, what)(data[:2])
    trainer.accelerator.wait_for_everyone()
"""
IN_STEP = re.compile(r"rank 1 was in (forward|backward) at train.py:12 `accelerator.backward")
SHORT = {"HF_FSDP_ARRIVAL_TIMEOUT": "3"}


def error_of(folder: Path, script: str, what: str) -> str:
    """Run a script in which ranks disagree, and return what the launcher says."""
    write(folder, script)
    done = launch(folder, "--num_processes", "2", "--quiet", "train.py", what, env=SHORT)
    assert done.returncode not in (0, 2), done.stderr
    return done.stderr


slow = pytest.mark.slow


@pytest.mark.parametrize("what", ["steps", pytest.param("leave", marks=slow)])
def test_different_numbers_of_steps_name_both_places(tmp_path: Path, what: str) -> None:
    error = error_of(tmp_path, ACCELERATE, what)
    assert "FSDP-E743" in error
    num_steps = 5 if what == "steps" else 3
    assert f"rank 0 had ended the script and was in the report at the end of the script after {num_steps}" in error
    assert IN_STEP.search(error)


@pytest.mark.parametrize(
    ("what", "num_steps"),
    [
        ("save_state", 3),
        *(
            pytest.param(what, num_steps, marks=slow)
            for what, num_steps in (
                ("load_state", 3),
                ("save_model", 3),
                ("get_state_dict", 3),
                ("clip", 1),
                ("clip before steps", 0),
            )
        ),
    ],
)
def test_call_of_one_rank_names_the_others(tmp_path: Path, what: str, num_steps: int) -> None:
    error = error_of(tmp_path, ACCELERATE, what)
    call = "clip_grad_norm_" if what.startswith("clip") else what
    assert f"Accelerator.{call}" in error and "rank 1 did not call it" in error and "[FSDP-E670]" in error
    assert IN_STEP.search(error)
    assert f"after {num_steps} optimizer step" in error


@slow
@pytest.mark.parametrize("what", ["should_save", "should_evaluate", "evaluate", "predict"])
def test_trainer_call_of_one_rank_names_the_others(tmp_path: Path, what: str) -> None:
    error = error_of(tmp_path, TRAINER, what)
    assert "rank 1 did not call it" in error and "[FSDP-E670]" in error
    assert "hf-fsdp: rank 1 was in " in error
