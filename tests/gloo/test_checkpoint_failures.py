"""Saves that fail and processes that end during a save: earlier checkpoints stay, and all ranks raise the error."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.checking.inspection import why_incomplete
from hf_fsdp_plugin.checkpoint.checking.verify import verify
from tests.gloo import cases_checkpoint_failures as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
# Both versions fail in the same way, so FSDP1 is a slow test.
BOTH_VERSIONS = [slow(1), 2]
IN_BOTH_WAYS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def settings(*, asynchronous: bool, version: int = 2, kind: str = "SHARDED") -> dict[str, Any]:
    config = {"fsdp_version": version, "state_dict_type": kind, "async_save": asynchronous}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(scope="module")
def rank_forker() -> Iterator[Pool]:
    """A process that forks ranks, which may end in any way."""
    with multiprocessing.get_context("spawn").Pool(1, initializer=cases.forked_ranks.preload) as pool:
        yield pool


def run_forked(rank_forker: Pool, case: Any, *args: Any) -> Any:
    return rank_forker.apply_async(case, args).get(timeout=120)


def assert_only(run: Path, *names: str) -> None:
    """The run contains these complete checkpoints, and nothing else of a save."""
    left = {path.name for path in run.iterdir() if path.name != "fsdp_report.json"}
    assert left == set(names)
    for name in names:
        assert verify(run / name).problems == ()


def assert_refused(outcomes: list[dict[str, Any]], run: Path, *words: str) -> None:
    """All ranks raised the same error with these words, and only the earlier checkpoint exists."""
    errors = {outcome["error"] for outcome in outcomes}
    assert len(errors) == 1
    for word in (str(run / "checkpoint-4"), *words):
        assert word in next(iter(errors))
    assert all(outcome["left"] == ["checkpoint-2"] for outcome in outcomes)
    assert_only(run, "checkpoint-2")


@pytest.mark.slow
def test_killed_ranks_and_full_disks_lose_no_checkpoint(tmp_path: Path) -> None:
    result = tmp_path / "survival.json"
    command = [sys.executable, "-m", "scripts.bench", "survival", "--trials", "2", "--seed", "11", "--out", str(result)]
    command += ["--folder", str(tmp_path)] + ([] if os.geteuid() == 0 else ["--no-disk-full"])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(result.read_text())
    assert found["lost"] == []
    assert found["kills"] == 2
    assert all(flips["found"] == flips["files"] > 10 for flips in found["flipped_bytes"])


@pytest.mark.parametrize("kind", ["SHARDED", "FULL", "LOCAL"])
@IN_BOTH_WAYS
def test_full_disk_is_an_error_on_all_ranks(two_ranks: Ranks, small_disk: Path, asynchronous: bool, kind: str) -> None:
    run = small_disk / "run"
    arguments = settings(asynchronous=asynchronous, kind=kind)
    outcomes = two_ranks.run(cases.full_disk, str(run), **arguments)
    assert_refused(outcomes, run, "CheckpointError", "FSDP-E401")
    # In the background it fails during the fifth step, in which all ranks raise the error.
    assert [outcome["step"] for outcome in outcomes] == [4, 4]


def test_failed_last_save_in_the_background_fails_training(two_ranks: Ranks, small_disk: Path) -> None:
    run = small_disk / "run"
    outcomes = two_ranks.run(cases.full_disk, str(run), max_steps=4, **settings(asynchronous=True))
    assert_refused(outcomes, run, "FSDP-E401")


@IN_BOTH_WAYS
def test_read_only_disk_is_an_error_on_all_ranks(two_ranks: Ranks, small_disk: Path, asynchronous: bool) -> None:
    run = small_disk / "run"
    outcomes = two_ranks.run(cases.read_only, str(run), **settings(asynchronous=asynchronous))
    assert_refused(outcomes, run, "rank 0: ", "FSDP-E402")


@pytest.mark.parametrize("path", ["file", "file/checkpoint"])
@IN_BOTH_WAYS
def test_file_in_path_is_an_error_and_is_kept(two_ranks: Ranks, tmp_path: Path, asynchronous: bool, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    errors = two_ranks.run(cases.save_state, str(tmp_path / path), asynchronous)
    assert errors[0] == errors[1]
    assert "FSDP-E403" in errors[0] and str(tmp_path / path) in errors[0]
    assert (tmp_path / "file").read_text() == "mine"
    assert cases.listing(tmp_path) == ["file"]


@IN_BOTH_WAYS
def test_link_with_name_of_checkpoint_is_kept(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    disk, link = tmp_path / "other disk" / "data", tmp_path / "checkpoint"
    disk.mkdir(parents=True)
    (disk / "notes.txt").write_text("mine")
    link.symlink_to(disk)
    assert two_ranks.run(cases.save_state, str(link), asynchronous) == ["", ""]
    assert link.readlink() == disk
    assert why_incomplete(disk) is None
    assert (disk / "notes.txt").read_text() == "mine"
    assert cases.listing(tmp_path) == ["checkpoint", "other disk"]
    assert cases.listing(disk.parent) == ["data"]


@pytest.mark.parametrize("version", BOTH_VERSIONS)
@IN_BOTH_WAYS
def test_write_error_of_one_rank_is_raised_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool, version: int
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=asynchronous, version=version)
    outcomes = two_ranks.run(cases.one_rank_cannot_write, str(run), **arguments)
    assert_refused(outcomes, run, "rank 1: ", "FSDP-E404", "__1_0.distcp")
    assert "rank 0" not in outcomes[0]["error"]


@pytest.mark.parametrize(("owner", "rank"), [("scheduler", 0), ("random state", 1)])
@IN_BOTH_WAYS
def test_state_error_of_one_rank_is_raised_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool, owner: str, rank: int
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=asynchronous)
    outcomes = two_ranks.run(cases.small_file_fails, str(run), owner, rank, **arguments)
    assert_refused(outcomes, run, f"rank {rank}: ", "no state")


@pytest.mark.parametrize("version", BOTH_VERSIONS)
@IN_BOTH_WAYS
def test_failed_save_is_raised_once(two_ranks: Ranks, tmp_path: Path, asynchronous: bool, version: int) -> None:
    """A synchronous save raises the error itself. The error of a background save is raised by the next save."""
    errors = two_ranks.run(cases.accelerate_saves, str(tmp_path), asynchronous, version)
    assert errors[0] == errors[1]
    assert len(errors[0]) == 1
    assert errors[0][0].startswith("second: " if asynchronous else "first: ")
    assert str(tmp_path / "first") in errors[0][0]
    assert_only(tmp_path, *([] if asynchronous else ["second"]))


@IN_BOTH_WAYS
def test_old_checkpoint_is_removed_after_the_commit(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    seen = two_ranks.run(cases.watch_removals, str(tmp_path), **settings(asynchronous=asynchronous))[0]
    two, four, six = (f"checkpoint-{step}" for step in (2, 4, 6))
    assert seen == [([two, four], [four]), ([four, six], [six])]
    assert_only(tmp_path, six)


@IN_BOTH_WAYS
def test_old_accelerate_checkpoint_is_removed_after_commit(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool
) -> None:
    seen = two_ranks.run(cases.watch_accelerates_removals, str(tmp_path), asynchronous)[0]
    zero, one, two = (f"checkpoint_{number}" for number in (0, 1, 2))
    assert seen == [([zero, one], [one]), ([one, two], [two])]
    assert_only(tmp_path / "checkpoints", two)


def test_interrupted_commit_is_recovered_before_resuming(two_ranks: Ranks, tmp_path: Path) -> None:
    arguments = settings(asynchronous=False)
    two_ranks.run(cases.train, str(tmp_path), **arguments)
    (tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.replaced")
    (tmp_path / ".checkpoint-6.saving" / "checkpoint-6").mkdir(parents=True)
    assert two_ranks.run(cases.start_of_resume, str(tmp_path), **arguments) == [4, 4]
    assert cases.listing(tmp_path) == ["checkpoint-2", "checkpoint-4", "fsdp_report.json"]


@pytest.mark.parametrize(("version", "user_handler"), [slow(1, False), (2, False), (2, True)])
def test_sigterm_waits_for_the_save_in_flight(
    rank_forker: Pool, tmp_path: Path, version: int, user_handler: bool
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=True, version=version)
    end = run_forked(rank_forker, cases.terminated_while_saving, str(run), user_handler, arguments)
    assert "checkpoint-4" not in end["before"]
    assert end["in time"]
    assert end["codes"] == [cases.USER_EXIT_CODE if user_handler else -signal.SIGTERM] * 2
    assert not user_handler or (end["handler"][0] == ["checkpoint-4"] and end["handler"][1] is not None)
    assert_only(run, "checkpoint-4")


@pytest.mark.parametrize(
    ("end", "code"),
    [("end_training", 0), ("no call at the end", 0), ("process group destroyed", 0), ("exception", 1)],
)
@pytest.mark.parametrize("version", BOTH_VERSIONS)
def test_exit_waits_for_the_save_in_flight(
    rank_forker: Pool, tmp_path: Path, end: str, code: int, version: int
) -> None:
    found = run_forked(rank_forker, cases.loop_ends_after_saving, str(tmp_path), end, version)
    assert found["early"] == [False, False], found["log"]
    assert found["in time"]
    assert found["codes"] == [code, code], found["log"]
    assert verify(tmp_path / "last").problems == ()


def test_failed_save_is_reported_at_exit(rank_forker: Pool, tmp_path: Path) -> None:
    found = run_forked(rank_forker, cases.loop_ends_after_saving, str(tmp_path), "error in the save", 2)
    assert found["in time"]
    abandoned, failed = (
        next(line for line in found["log"].splitlines() if code in line) for code in ("FSDP-E406", "FSDP-E404")
    )
    assert str(tmp_path / "last") in abandoned and "rank 1" in abandoned
    assert str(tmp_path / "last") in failed
    assert not (tmp_path / "last").exists()
    assert not list(tmp_path.glob(".*"))
