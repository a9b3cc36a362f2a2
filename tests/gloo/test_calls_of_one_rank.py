"""Calls on the main process only, under every launcher: the error names the calls and the places of all ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.output import HANG
from tests.support.launching import LAUNCH, Done, run, write

SCRIPT = """
    import sys, time, torch
    import hf_fsdp_plugin
    from accelerate import Accelerator
    hf_fsdp_plugin.install("fsdp.yaml")
    what = sys.argv[1]
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(5):
        accelerator.backward(model(torch.randn(2, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if what == "slow" and step == 2:
            time.sleep(9 if accelerator.is_main_process else 0)
        if what in ("in loop", "save_state") and step == 2 and accelerator.is_main_process:
            if what == "save_state":
                accelerator.save_state("saved")
            with torch.no_grad():
                model(torch.randn(2, 8))
    if what == "at end" and accelerator.is_main_process:
        model(torch.randn(2, 8))
    if what == "get_state_dict" and accelerator.is_main_process:
        accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
"""
UNITS = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
mixed_precision: "no"
use_cpu: true
fsdp_config:
  fsdp_version: VERSION
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 50
  fsdp_cpu_ram_efficient_loading: false
"""
ACCELERATE = ["--config_file", "fsdp.yaml", "--main_process_port", "0"]
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", *ACCELERATE],
    "hf-fsdp": LAUNCH,
}


def done_with(
    folder: Path, what: str, launcher: str = "torchrun", *, version: int = 2, limit: str = "5", arrivals: str = "45"
) -> Done:
    (folder / "fsdp.yaml").write_text(UNITS.replace("VERSION", str(version)))
    write(folder, SCRIPT)
    limits = {"HF_FSDP_ARRIVAL_TIMEOUT": arrivals, "HF_FSDP_HANG_TIMEOUT": limit}
    return run(folder, [*LAUNCHERS[launcher], "train.py", what], **limits)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("launcher", "version"),
    [
        ("torchrun", 2),
        slow("torchrun", 1),
        slow("accelerate", 1),
        slow("accelerate", 2),
        slow("hf-fsdp", 1),
        slow("hf-fsdp", 2),
    ],
)
def test_forward_on_the_main_process_is_named(tmp_path: Path, launcher: str, version: int) -> None:
    done = done_with(tmp_path, "at end", launcher, version=version)
    assert done.returncode not in (0, 2), done.stderr
    assert "FSDP-E7" in done.stderr and re.search(r"at train.py:\d+ `model\(torch", done.stderr), done.stderr
    if launcher == "hf-fsdp":
        assert done.returncode == HANG


@pytest.mark.parametrize("version", [2, slow(1)])
def test_forward_of_one_rank_in_the_loop_is_named(tmp_path: Path, version: int) -> None:
    """The gathers of the forward meet those of another rank's training, until the ranks wait in different ones."""
    done = done_with(tmp_path, "in loop", version=version)
    assert done.returncode not in (0, 2), done.stderr
    assert re.search(r"rank 0: all-gather( \(list\))? of", done.stderr) and "FSDP-E7" in done.stderr, done.stderr


@pytest.mark.slow
def test_save_of_one_rank_names_both_places(tmp_path: Path) -> None:
    error = done_with(tmp_path, "save_state").stderr
    assert "save_state" in error and "FSDP-E730" in error, error
    assert re.search(r"rank 1 was in (forward|backward)[^;]*at train.py:\d+", error), error


@pytest.mark.slow
def test_get_state_dict_of_one_rank_names_the_barrier(tmp_path: Path) -> None:
    error = done_with(tmp_path, "get_state_dict", limit="60", arrivals="6").stderr
    assert "Accelerator.get_state_dict" in error and "[FSDP-E670]" in error, error
    assert re.search(r"rank 1 was in wait_for_everyone \(barrier\) at train.py:\d+", error), error


@pytest.mark.slow
def test_slow_rank_is_not_ended(tmp_path: Path) -> None:
    done = done_with(tmp_path, "slow", limit="30")
    assert done.returncode == 0 and "hang:" not in done.stderr, done.stderr
