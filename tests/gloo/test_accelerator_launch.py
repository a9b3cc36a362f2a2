"""Launched runs on the simulated accelerator: whole trainings, a hang that is named, and a profile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.output import HANG
from tests.accelerator.accelerator_build import BACKEND, available
from tests.support.json_schema import assert_valid
from tests.support.launching import LAUNCH, Done, finish, run, start, write
from tests.support.matrices import slow

ROOT = BACKEND.parents[2]
SCRIPT = """
    import os, sys, time, torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if "hang" in sys.argv and os.environ["RANK"] == "1" and index > 8:
                time.sleep(600)
            tokens = (torch.arange(8) + index) % 64
            return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )
    arguments = TrainingArguments(
        "out", max_steps=4, per_device_train_batch_size=2, save_steps=2, save_strategy="steps", logging_steps=1,
        report_to="none", disable_tqdm=True, bf16="bf16" in sys.argv,
        gradient_checkpointing="checkpointing" in sys.argv,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Samples())
    trainer.train(resume_from_checkpoint="out/checkpoint-2" if "resume" in sys.argv else None)
    if trainer.is_world_process_zero():
        print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        print("device", trainer.accelerator.device, torch.distributed.get_backend())
"""


@pytest.fixture(autouse=True)
def device() -> None:
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")


def variables(name: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(BACKEND), str(ROOT)]), "SIM_ACCELERATOR_NAME": name}


def write_run(folder: Path, version: int) -> None:
    (folder / "fsdp.yaml").write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: {version}\n")
    write(folder, SCRIPT)


def launch(folder: Path, *words: str, name: str = "npu", flags: tuple[str, ...] = ()) -> Done:
    return finish(start(folder, "--num_processes", "2", *flags, "train.py", *words, env=variables(name)))


def printed(done: Done, what: str) -> str:
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith(what))


@pytest.mark.parametrize(("name", "version"), [slow("npu", 1), slow("npu", 2), slow("sdaa", 1), slow("sdaa", 2)])
def test_training_and_resume_are_launched_on_devices(tmp_path: Path, name: str, version: int) -> None:
    """``sdaa`` stands for a device type that the plugin has no row for."""
    write_run(tmp_path, version)
    precision = "fp32" if name == "sdaa" else "bf16"  # Transformers refuses bf16 on device types that it does not know
    first = launch(tmp_path, precision, name=name)
    backend = "tccl" if name == "sdaa" else "hccl"
    assert f"{name}:0" in printed(first, "device") and backend in printed(first, "device")
    report = json.loads((tmp_path / "out" / "fsdp_report.json").read_text())
    assert [row for row in report["settings"] if row["status"] == "differs"] == []
    again = launch(tmp_path, "resume", precision, name=name)
    losses: list[Any] = json.loads(printed(first, "losses").removeprefix("losses "))
    assert len(losses) == 4
    assert json.loads(printed(again, "losses").removeprefix("losses "))[-2:] == losses[-2:]


@pytest.mark.parametrize("version", [slow(1), 2])
def test_hang_on_devices_is_named(tmp_path: Path, version: int) -> None:
    write_run(tmp_path, version)
    done = launch(tmp_path, "hang", flags=("--hang_timeout", "4"))
    assert done.returncode == HANG, done.stderr
    assert "rank 1 is late" in done.stderr and "FSDP-E728" in done.stderr
    assert "time.sleep(600)" in done.stderr


@pytest.mark.parametrize("version", [slow(1), slow(2)])
def test_profile_on_devices_has_a_result(tmp_path: Path, version: int) -> None:
    write_run(tmp_path, version)
    profile = [*LAUNCH[:-3], "profile", "--config_file", "fsdp.yaml", "--json", "--active", "1", "--num_processes", "2"]
    done = run(tmp_path, [*profile, "train.py", "checkpointing"], **variables("npu"))
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert_valid("profile", tree)
    assert tree["ok"] and tree["num_ranks"] == 2
    calls = {kind: sums["calls"] for kind, sums in tree["collectives"].items()}
    assert calls["all_gather"] >= calls["reduce_scatter"] > 0
