"""Ranks that make different calls or wait: the message at the end of the run names each rank and where it was."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import finish, launch, start, wait_for, write

ACCELERATE = """
    import sys, torch
    from accelerate import Accelerator, DataLoaderConfiguration
    what = sys.argv[1]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=what != "uneven batches"))
    if what == "prepare" and accelerator.is_main_process:
        accelerator.prepare(torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if what == "clip before steps" and accelerator.is_main_process:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(11, 8), batch_size=1))
    batches = list(loader) if "batches" in what else [torch.randn(2, 8)] * 5
    for step, batch in enumerate(batches + batches[:1] * (what == "steps" and accelerator.process_index)):
        accelerator.backward(model(batch).sum())
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
        def on_step_begin(self, args, state, control, **_):
            if what == "sleep" and state.global_step == 2 and not is_main:
                __import__("time").sleep(60)
        def on_step_end(self, args, state, control, model, **_):
            if state.global_step == 2 and is_main:
                control.should_save, control.should_evaluate = what == "should_save", what == "should_evaluate"
                if what == "generate":
                    model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
            return control
    small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    arguments = TrainingArguments("out", max_steps=4, per_device_train_batch_size=1, save_strategy="no", report_to=[],
                                  ddp_timeout=15)
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**small)), arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[Once()]
    )
    if is_main and what.startswith("early"):
        getattr(trainer, what.removeprefix("early "))(data[:2])
    trainer.train()
    if is_main and what in ("evaluate", "predict"):
        getattr(trainer, what)(data[:2])
    trainer.accelerator.wait_for_everyone()
"""
IN_STEP = re.compile(r"rank 1 was in (forward|backward)( \(\w+\))? at train.py:16 `accelerator.backward")
ENDED = r"rank {rank} had ended the script and was in the report at the end of the script (\(\w+\) )?"
SHORT = {"HF_FSDP_ARRIVAL_TIMEOUT": "3"}


def error_of(folder: Path, script: str, what: str, *, quiet: bool = True, flags: Sequence[str] = ()) -> str:
    """Run a script in which ranks disagree, and return what the launcher says."""
    write(folder, script)
    done = launch(folder, "--num_processes", "2", *["--quiet"] * quiet, *flags, "train.py", what, env=SHORT)
    assert done.returncode not in (0, 2), done.stderr
    return done.stderr


slow = pytest.mark.slow


def slow_case(*values: str) -> Any:
    return pytest.param(*values, marks=slow)


@pytest.mark.parametrize("what", ["steps", pytest.param("leave", marks=slow)])
def test_different_numbers_of_steps_name_both_places(tmp_path: Path, what: str) -> None:
    error = error_of(tmp_path, ACCELERATE, what)
    assert "FSDP-E743" in error
    num_steps = 5 if what == "steps" else 3
    assert re.search(ENDED.format(rank=0) + f"after {num_steps}", error)
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
def test_ranks_with_uneven_batches_are_named(tmp_path: Path) -> None:
    error = error_of(tmp_path, ACCELERATE, "uneven batches", quiet=False)
    assert "FSDP-E743" in error
    assert re.search(ENDED.format(rank=1) + "after 5 optimizer steps", error)
    assert re.search(IN_STEP.pattern.replace("rank 1", "rank 0") + ".* after 5 optimizer steps", error)


@slow
def test_preparing_on_one_rank_names_both_places(tmp_path: Path) -> None:
    error = error_of(tmp_path, ACCELERATE, "prepare")
    assert (
        "Accelerator.prepare of Linear is a collective call" in error or "of Sequential is a collective call" in error
    )
    assert "[FSDP-E670]" in error
    assert "hf-fsdp: rank 0 was in prepare at train.py:7 `accelerator.prepare(torch" in error
    assert "hf-fsdp: rank 1 was in prepare at train.py:10 `model, optimizer = accelerator" in error


@pytest.mark.parametrize("call", [slow_case("evaluate"), slow_case("predict")])
def test_evaluation_of_one_rank_before_training(tmp_path: Path, call: str) -> None:
    error = error_of(tmp_path, TRAINER, f"early {call}")
    assert "[FSDP-E670]" in error and "an evaluation or prediction of Trainer after step 0" in error
    assert f"hf-fsdp: rank 0 was in {call} at train.py:23 `getattr" in error
    # The ranks agree on requested saves before the Trainer prepares its model.
    assert re.search(r"hf-fsdp: rank 1 was in (prepare|all_reduce) at train\.py:24 `trainer\.train\(\)`", error), error
    assert "FSDP-E743" not in error


@slow
@pytest.mark.parametrize("what", ["should_save", "should_evaluate", "evaluate", "predict", "generate"])
def test_trainer_call_of_one_rank_names_the_others(tmp_path: Path, what: str) -> None:
    error = error_of(tmp_path, TRAINER, what)
    assert "rank 1 did not call it" in error and "[FSDP-E670]" in error
    assert "hf-fsdp: rank 1 was in " in error


WAITS = """
    import os, signal, sys, time, torch
    from datetime import timedelta
    from accelerate import Accelerator, InitProcessGroupKwargs
    what, seconds = sys.argv[1], float(sys.argv[2])
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        if step == 2 and what == "forward" and accelerator.is_main_process:
            model(torch.randn(2, 8))
        if step == 2 and what != "forward" and not accelerator.is_main_process:
            open("ready", "w").write("ready")
            time.sleep(60)
        accelerator.backward(model(torch.randn(2, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
"""
OTHER_IN_STEP = r"rank 0 was in (forward|backward)( \(\w+\))? at train.py:16 `.*` after 2 optimizer steps"


@slow
@pytest.mark.parametrize("what", ["sleep", "forward"])
def test_rank_that_does_not_come_is_named_at_the_time_out(tmp_path: Path, what: str) -> None:
    """Without the diagnosis of hangs (see test_hangs.py), which is earlier than the time-out."""
    write(tmp_path, WAITS)
    units = ("--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "--fsdp_min_num_params", "50", "--hang_timeout", "0")
    done = launch(tmp_path, "--num_processes", "2", "--quiet", *units, "train.py", what, "10")
    assert done.returncode not in (0, 2), done.stderr
    assert "FSDP-E743" in done.stderr and re.search(OTHER_IN_STEP, done.stderr), done.stderr
    where = {  # a forward of one rank: its gathers meet those of the others, until one waits for a gradient
        "sleep": "rank 1 was at train.py:15 `time.sleep(60)` after 2 optimizer steps",
        "forward": "after 2 optimizer steps (3 forwards)",
    }
    assert where[what] in done.stderr


@slow
def test_time_out_of_training_arguments_ends_the_wait(tmp_path: Path) -> None:
    error = error_of(tmp_path, TRAINER, "sleep", flags=("--hang_timeout", "0"))
    assert "FSDP-E743" in error
    assert re.search(r"rank 0 was in (forward|backward)( \(\w+\))? at train.py:24 .* after 2 optimizer steps", error), (
        error
    )
    assert re.search("rank 1 was at train.py:8 .* after 2 optimizer steps", error), error


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=slow)])
def test_stopped_run_says_where_each_rank_was(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path, WAITS)
    process = start(tmp_path, "--num_processes", "2", "--quiet", "--grace", "3", "train.py", "sleep", "600")
    wait_for(tmp_path / "ready")
    time.sleep(1)  # rank 0 enters the forward that rank 1 does not
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number, done.stderr
    assert re.search(OTHER_IN_STEP, done.stderr), done.stderr
    assert "rank 1 was at train.py:15 `time.sleep(60)` after 2 optimizer steps" in done.stderr
