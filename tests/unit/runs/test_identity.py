"""Run and attempt of a rank, from the variables of each launcher."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from hf_fsdp_plugin.runs.identity import RunIdentity, attempt_folder, identify_run

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


def torch_agent(logs: Path, attempt: int, **more: str) -> dict[str, str]:
    """The variables of a rank of torch's agent, which makes the folder of an attempt's logs for each start."""
    folder = logs / f"attempt_{attempt}"
    folder.joinpath("0").mkdir(parents=True, exist_ok=True)
    own = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(folder / "0" / "error.json")}
    counts = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": "3"}
    return own | counts | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"} | more


def test_two_torchruns_with_the_same_id_are_two_runs(tmp_path: Path) -> None:
    first, second = (identify_run(torch_agent(tmp_path / name, 0)) for name in ("none_a", "none_b"))
    again = identify_run(torch_agent(tmp_path / "none_a", 1))
    assert first.id != second.id and first.id == again.id
    assert (first.attempt, again.attempt, again.max_restarts, again.given) == (0, 1, 3, False)


def test_attempts_with_one_number_have_different_folders(tmp_path: Path) -> None:
    """Torch starts the ranks again for machines that join, and does not count that."""
    before = torch_agent(tmp_path / "none_a", 0)
    folders = [attempt_folder(identify_run(before), before)]
    logs = tmp_path / "none_a" / "attempt_0"
    os.utime(logs, ns=(1, logs.stat().st_mtime_ns + 1))  # made again
    folders.append(attempt_folder(identify_run(before), before))
    joined = before | {"WORLD_SIZE": "4"}
    folders.append(attempt_folder(identify_run(joined), joined))
    assert len(set(folders)) == 3 and len({folder.parent for folder in folders}) == 1


def test_srun_task_is_named_by_job_step_and_command_line() -> None:
    first = identify_run(SRUN, ("train.py", "--lr", "1"))
    assert first == RunIdentity(id=first.id, job=first.id, start=first.start) and first.id.startswith("slurm-7-0-")
    assert identify_run(SRUN, ("train.py", "--lr", "2")).id != first.id
    assert identify_run(SRUN | {"SLURM_STEP_ID": "1"}, ("train.py", "--lr", "1")).id != first.id
    again = identify_run(SRUN | {"SLURM_RESTART_COUNT": "1"}, ("train.py", "--lr", "1"))
    assert (again.id, again.attempt, again.requeued) == (first.id, 1, first.id) and again.may_have_checkpoints


def test_requeued_job_with_a_new_agent_keeps_its_job(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "7"}
    first = identify_run(torch_agent(tmp_path / "none_a", 0, **slurm), ("train.py",))
    again = identify_run(torch_agent(tmp_path / "none_b", 1, SLURM_RESTART_COUNT="2", **slurm), ("train.py",))
    assert again.id != first.id and again.requeued == first.job != "" and first.requeued == ""
    assert again.attempt == 3 and not first.may_have_checkpoints


@pytest.mark.parametrize("name", ["HF_FSDP_RUN_ID", "PET_RDZV_ID"])
def test_given_id_is_the_same_in_all_starts(tmp_path: Path, name: str) -> None:
    more = {name: "llama", "TORCHELASTIC_RUN_ID": "llama"}
    starts = [identify_run(torch_agent(tmp_path / agent, 0, **more)) for agent in ("none_a", "none_b")]
    assert [(each.id, each.given) for each in starts] == [("llama", True)] * 2
    assert all(each.may_have_checkpoints for each in starts)
    assert identify_run({"HF_FSDP_RUN_ID": "mine", "PET_RDZV_ID": "job"}).id == "mine"


def test_id_of_a_pod_is_that_of_its_torchrun_only(tmp_path: Path) -> None:
    """A pod can start several runs with `--rdzv_id` or `--standalone`, which override the variable."""
    other = identify_run(torch_agent(tmp_path / "none_a", 0, PET_RDZV_ID="job"))
    assert not other.given and other.id.startswith("none-")


def test_worker_of_ray_train_has_the_name_of_its_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray.train")
    monkeypatch.setitem(sys.modules, "ray.train", ray)
    assert identify_run({}).id == "", "a version of Ray without get_context"
    ray.get_context = lambda: types.SimpleNamespace(get_experiment_name=lambda: "tune-llama")  # type: ignore[attr-defined]
    assert (identify_run({}).id, identify_run({}).given) == ("ray-tune-llama", True)


def test_process_without_a_launcher_has_no_run() -> None:
    alone = identify_run({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert (alone.id, alone.attempt, alone.may_have_checkpoints) == ("", 0, False)
    assert identify_run({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "x"}).attempt == 0
