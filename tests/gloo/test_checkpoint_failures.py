"""Saves that fail and processes that end during a save: earlier checkpoints stay, and all ranks raise the error."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from transformers import TrainerCallback

from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.names import REPORT_NAME
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.integrations import saving
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.metrics.run_file import RUN_FILE
from hf_fsdp_plugin.tools.verify.verification import verify
from scripts.bench.ranks import forked as forked_ranks
from tests.support.checkpoint_accelerate_runs import trained_loop
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.resume_runs import StopAt
from tests.support.trainer_runs import make_trainer

USER_EXIT_CODE = 7

OF_RUN = (REPORT_NAME, RUN_FILE)
"""Files of a run beside its checkpoints."""

LEFT_FREE = 40 << 10
"""Bytes left free on a full disk; a checkpoint of the tiny model needs ten times as many."""


class InjectFault(TrainerCallback):
    """Calls a function on every rank after step 3, when the save of step 2 is committed."""

    def __init__(self, inject: Callable[[], None]) -> None:
        self.inject = inject

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the background writer run as far as it can without a poll."""
        if manager().save_in_flight is not None:
            manager().save_in_flight.join(0.5)
        dist.barrier()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            manager().wait()
            self.inject()
            dist.barrier()


class RefusedWriter(PartWriter):
    """Fails for files larger than a page."""

    def write(self, *args: Any) -> Any:
        with small_files_only():
            return super().write(*args)

    def write_staged(self, *args: Any) -> Any:
        with small_files_only():
            return super().write_staged(*args)


# Cases of ranks that are forked for one case, and end in it.


class SlowWriter(PartWriter):
    """Takes at least half a second in the background."""

    def write_staged(self, *args: Any) -> Any:
        time.sleep(0.5)
        return super().write_staged(*args)


class SlowRefusedWriter(SlowWriter, RefusedWriter):
    """Takes half a second, and then fails."""


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """Limit the files of this process to the size of a page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    with multiprocessing.get_context("spawn").Pool(1, initializer=forked_ranks.preload) as pool:
        yield pool


def run_forked(rank_forker: Pool, case: Any, *args: Any) -> Any:
    return rank_forker.apply_async(case, args).get(timeout=120)


def assert_only(run: Path, *names: str) -> None:
    """The run contains these complete checkpoints, and nothing else of a save."""
    left = {path.name for path in run.iterdir() if path.name not in OF_RUN}
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


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in OF_RUN)


def train_with_fault(output_dir: str, inject: Callable[[Any], None], **arguments: Any) -> dict[str, Any]:
    """Save after step 2, inject a fault after step 3, and save after step 4; the last step is 5.

    Return the error of this rank, its step, and the names in the folder.
    """
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "save_total_limit": 1}
    trainer = make_trainer(output_dir, **{**defaults, **arguments})
    trainer.add_callback(InjectFault(lambda: inject(trainer)))
    error = ""
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    dist.barrier()
    return {"error": error, "step": trainer.state.global_step, "left": listing(Path(output_dir))}


def full_disk(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """``output_dir`` is on a separate small disk."""
    filler = Path(output_dir).parent / "filler"

    def fill(trainer: Any) -> None:
        if dist.get_rank() == 0:
            free = os.statvfs(filler.parent).f_bavail * os.statvfs(filler.parent).f_frsize
            filler.write_bytes(bytes(free - LEFT_FREE))

    return train_with_fault(output_dir, fill, **arguments)


@pytest.mark.parametrize("kind", ["SHARDED", "FULL", "LOCAL"])
@IN_BOTH_WAYS
def test_full_disk_is_an_error_on_all_ranks(two_ranks: Ranks, small_disk: Path, asynchronous: bool, kind: str) -> None:
    run = small_disk / "run"
    arguments = settings(asynchronous=asynchronous, kind=kind)
    outcomes = two_ranks.run(full_disk, str(run), **arguments)
    assert_refused(outcomes, run, "CheckpointError", "FSDP-E401")
    # In the background it fails during the fifth step, in which all ranks raise the error.
    assert [outcome["step"] for outcome in outcomes] == [4, 4]


def test_failed_last_save_in_the_background_fails_training(two_ranks: Ranks, small_disk: Path) -> None:
    run = small_disk / "run"
    outcomes = two_ranks.run(full_disk, str(run), max_steps=4, **settings(asynchronous=True))
    assert_refused(outcomes, run, "FSDP-E401")


def read_only(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The disk of ``output_dir`` is remounted read-only."""

    def remount(trainer: Any) -> None:
        if dist.get_rank() == 0:
            assert os.system(f"mount -o remount,ro {Path(output_dir).parent}") == 0

    return train_with_fault(output_dir, remount, **arguments)


@IN_BOTH_WAYS
def test_read_only_disk_is_an_error_on_all_ranks(two_ranks: Ranks, small_disk: Path, asynchronous: bool) -> None:
    run = small_disk / "run"
    outcomes = two_ranks.run(read_only, str(run), **settings(asynchronous=asynchronous))
    assert_refused(outcomes, run, "rank 0: ", "FSDP-E402")


def save_state(path: str, asynchronous: bool) -> str:
    """Return the error of a plain loop that saves to ``path``."""
    loop = trained_loop(2, async_save=asynchronous)
    try:
        loop.accelerator.save_state(path)
        manager().wait()
        dist.barrier()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("path", ["file", "file/checkpoint"])
@IN_BOTH_WAYS
def test_file_in_path_is_an_error_and_is_kept(two_ranks: Ranks, tmp_path: Path, asynchronous: bool, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    errors = two_ranks.run(save_state, str(tmp_path / path), asynchronous)
    assert errors[0] == errors[1]
    assert "FSDP-E403" in errors[0] and str(tmp_path / path) in errors[0]
    assert (tmp_path / "file").read_text() == "mine"
    assert listing(tmp_path) == ["file"]


@IN_BOTH_WAYS
def test_link_with_name_of_checkpoint_is_kept(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    disk, link = tmp_path / "other disk" / "data", tmp_path / "checkpoint"
    disk.mkdir(parents=True)
    (disk / "notes.txt").write_text("mine")
    link.symlink_to(disk)
    assert two_ranks.run(save_state, str(link), asynchronous) == ["", ""]
    assert link.readlink() == disk
    assert why_incomplete(disk) is None
    assert (disk / "notes.txt").read_text() == "mine"
    assert listing(tmp_path) == ["checkpoint", "other disk"]
    assert listing(disk.parent) == ["data"]


def one_rank_cannot_write(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Rank 1 cannot write the tensors of its second checkpoint."""

    def refuse(trainer: Any) -> None:
        if dist.get_rank() == 1:
            manager().writer = RefusedWriter()

    try:
        return train_with_fault(output_dir, refuse, **arguments)
    finally:
        manager().writer = PartWriter()


@pytest.mark.parametrize("version", BOTH_VERSIONS)
@IN_BOTH_WAYS
def test_write_error_of_one_rank_is_raised_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool, version: int
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=asynchronous, version=version)
    outcomes = two_ranks.run(one_rank_cannot_write, str(run), **arguments)
    assert_refused(outcomes, run, "rank 1: ", "FSDP-E404", "__1_0.distcp")
    assert "rank 0" not in outcomes[0]["error"]


def small_file_fails(output_dir: str, owner: str, rank: int, **arguments: Any) -> dict[str, Any]:
    """A rank cannot read its own state."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no state")

    def break_it(trainer: Any) -> None:
        if dist.get_rank() == rank:
            if owner == "scheduler":
                trainer.lr_scheduler.state_dict = fail
            else:
                trainer._save_rng_state = fail

    return train_with_fault(output_dir, break_it, **arguments)


@pytest.mark.parametrize(("owner", "rank"), [("scheduler", 0), ("random state", 1)])
@IN_BOTH_WAYS
def test_state_error_of_one_rank_is_raised_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool, owner: str, rank: int
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=asynchronous)
    outcomes = two_ranks.run(small_file_fails, str(run), owner, rank, **arguments)
    assert_refused(outcomes, run, f"rank {rank}: ", "no state")


def accelerate_saves(folder: str, asynchronous: bool, version: int) -> list[str]:
    """Call ``save_state`` twice without a step between; rank 1 cannot write for the first one."""
    loop = trained_loop(version, async_save=asynchronous)
    errors = []
    for name in ("first", "second"):
        if name == "first" and dist.get_rank() == 1:
            manager().writer = RefusedWriter()
        try:
            loop.accelerator.save_state(f"{folder}/{name}")
        except ValueError as error:
            errors.append(f"{name}: {error}")
        if manager().save_in_flight is not None:
            manager().save_in_flight.join(1)
        manager().writer = PartWriter()
    dist.barrier()
    return errors


@pytest.mark.parametrize("version", BOTH_VERSIONS)
@IN_BOTH_WAYS
def test_failed_save_is_raised_once(two_ranks: Ranks, tmp_path: Path, asynchronous: bool, version: int) -> None:
    """A synchronous save raises the error itself. The error of a background save is raised by the next save."""
    errors = two_ranks.run(accelerate_saves, str(tmp_path), asynchronous, version)
    assert errors[0] == errors[1]
    assert len(errors[0]) == 1
    assert errors[0][0].startswith("second: " if asynchronous else "first: ")
    assert str(tmp_path / "first") in errors[0][0]
    assert_only(tmp_path, *([] if asynchronous else ["second"]))


@contextlib.contextmanager
def _watched(run: Path) -> Iterator[list[tuple[list[str], list[str]]]]:
    original, seen = saving.remove_checkpoint, []

    def complete() -> list[str]:
        return [path.name for path in sorted(run.glob("checkpoint*")) if why_incomplete(path) is None]

    def remove(path: Path) -> None:
        before = complete()
        original(path)
        seen.append((before, complete()))

    saving.remove_checkpoint = remove
    try:
        yield seen
    finally:
        saving.remove_checkpoint = original


def watch_removals(output_dir: str, **arguments: Any) -> list[tuple[list[str], list[str]]]:
    """Return the complete checkpoints before and after each removal of an old one, on rank 0."""
    with _watched(Path(output_dir)) as seen:
        make_trainer(
            output_dir, save_strategy="steps", save_steps=2, max_steps=6, save_total_limit=1, **arguments
        ).train()
    return seen


@IN_BOTH_WAYS
def test_old_checkpoint_is_removed_after_the_commit(two_ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    seen = two_ranks.run(watch_removals, str(tmp_path), **settings(asynchronous=asynchronous))[0]
    two, four, six = (f"checkpoint-{step}" for step in (2, 4, 6))
    assert seen == [([two, four], [four]), ([four, six], [six])]
    assert_only(tmp_path, six)


def watch_accelerates_removals(folder: str, asynchronous: bool) -> list[tuple[list[str], list[str]]]:
    """The same for checkpoints that Accelerate names."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    loop = trained_loop(2, project=project, async_save=asynchronous)
    with _watched(Path(folder) / "checkpoints") as seen:
        for _ in range(3):
            loop.accelerator.save_state()
        manager().wait()
    return seen


@IN_BOTH_WAYS
def test_old_accelerate_checkpoint_is_removed_after_commit(
    two_ranks: Ranks, tmp_path: Path, asynchronous: bool
) -> None:
    seen = two_ranks.run(watch_accelerates_removals, str(tmp_path), asynchronous)[0]
    zero, one, two = (f"checkpoint_{number}" for number in (0, 1, 2))
    assert seen == [([zero, one], [one]), ([one, two], [two])]
    assert_only(tmp_path / "checkpoints", two)


def train(output_dir: str, **arguments: Any) -> list[str]:
    """Four steps, saved after every second."""
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(output_dir, **{**defaults, **arguments}).train()
    dist.barrier()
    return listing(Path(output_dir))


def start_of_resume(output_dir: str, **arguments: Any) -> int:
    """Return the step from which ``resume_from_checkpoint=True`` resumes."""
    trainer = make_trainer(output_dir, callbacks=[StopAt(0)], **arguments)
    trainer.train(resume_from_checkpoint=True)
    return trainer.state.global_step - 1


def test_interrupted_commit_is_recovered_before_resuming(two_ranks: Ranks, tmp_path: Path) -> None:
    arguments = settings(asynchronous=False)
    two_ranks.run(train, str(tmp_path), **arguments)
    (tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.replaced")
    (tmp_path / ".checkpoint-6.saving" / "checkpoint-6").mkdir(parents=True)
    assert two_ranks.run(start_of_resume, str(tmp_path), **arguments) == [4, 4]
    assert listing(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def train_slowly_written(rank: int, report: Callable[..., None], output_dir: str, handler: bool, settings: Any) -> None:
    """Report when the first save was handed to the background, and continue training."""
    manager().writer = SlowWriter()
    if handler:

        def user_handler(number: int, frame: Any) -> None:
            report("handler", listing(Path(output_dir)))
            sys.exit(USER_EXIT_CODE)

        signal.signal(signal.SIGTERM, user_handler)

    class Report(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("handed over", state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(0.05)

    make_trainer(
        output_dir, callbacks=[Report()], save_strategy="steps", save_steps=4, max_steps=400, **settings
    ).train()


def terminated_while_saving(output_dir: str, handler: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """Send SIGTERM to all ranks while all of them write in the background."""
    log = Path(output_dir).parent / "log"
    world = forked_ranks.World.fork(train_slowly_written, log, output_dir, handler, settings)
    try:
        world.until(lambda: all(world.last("handed over", rank) for rank in range(forked_ranks.WORLD_SIZE)))
        before = listing(Path(output_dir))
        world.signal(signal.SIGTERM, [0, 1])
        ended = world.wait(25)
        world.listen(0)
        seen = [world.last("handler", rank) for rank in range(forked_ranks.WORLD_SIZE)]
    finally:
        world.close()
    return {"before": before, "in time": ended, "codes": [world.ended[rank] for rank in (0, 1)], "handler": seen}


@pytest.mark.parametrize(("version", "user_handler"), [slow(1, False), (2, False), (2, True)])
def test_sigterm_waits_for_the_save_in_flight(
    rank_forker: Pool, tmp_path: Path, version: int, user_handler: bool
) -> None:
    run = tmp_path / "run"
    arguments = settings(asynchronous=True, version=version)
    end = run_forked(rank_forker, terminated_while_saving, str(run), user_handler, arguments)
    assert "checkpoint-4" not in end["before"]
    assert end["in time"]
    assert end["codes"] == [USER_EXIT_CODE if user_handler else -signal.SIGTERM] * 2
    assert not user_handler or (end["handler"][0] == ["checkpoint-4"] and end["handler"][1] is not None)
    assert_only(run, "checkpoint-4")


def save_and_end(rank: int, report: Callable[..., None], folder: str, end: str, version: int) -> None:
    manager().writer = SlowWriter()
    os.chdir(folder)  # the folder of the report
    accelerator = trained_loop(version, async_save=True).accelerator
    if end == "error in the save" and rank == 1:
        manager().writer = SlowRefusedWriter()
    accelerator.save_state(f"{folder}/last")
    report("saved", (Path(folder) / "last").exists())
    if end == "end_training":
        accelerator.end_training()
    elif end == "process group destroyed":
        dist.destroy_process_group()
    elif end == "exception":
        raise KeyError("an error of the user")


def loop_ends_after_saving(folder: str, end: str, version: int) -> dict[str, Any]:
    """A loop whose last save is being written when its script ends."""
    log = Path(folder) / "log"
    world = forked_ranks.World.fork(save_and_end, log, folder, end, version)
    try:
        ended = world.wait(40)
        world.listen(0)
        early = [world.last("saved", rank) for rank in range(forked_ranks.WORLD_SIZE)]
    finally:
        world.close()
    return {"early": early, "in time": ended, "codes": [world.ended[rank] for rank in (0, 1)], "log": log.read_text()}


@pytest.mark.parametrize(
    ("end", "code"),
    [("end_training", 0), ("no call at the end", 0), ("process group destroyed", 0), ("exception", 1)],
)
@pytest.mark.parametrize("version", BOTH_VERSIONS)
def test_exit_waits_for_the_save_in_flight(
    rank_forker: Pool, tmp_path: Path, end: str, code: int, version: int
) -> None:
    found = run_forked(rank_forker, loop_ends_after_saving, str(tmp_path), end, version)
    assert found["early"] == [False, False], found["log"]
    assert found["in time"]
    assert found["codes"] == [code, code], found["log"]
    assert verify(tmp_path / "last").problems == ()


def test_failed_save_is_reported_at_exit(rank_forker: Pool, tmp_path: Path) -> None:
    found = run_forked(rank_forker, loop_ends_after_saving, str(tmp_path), "error in the save", 2)
    assert found["in time"]
    abandoned, failed = (
        next(line for line in found["log"].splitlines() if code in line) for code in ("FSDP-E406", "FSDP-E404")
    )
    assert str(tmp_path / "last") in abandoned and "rank 1" in abandoned
    assert str(tmp_path / "last") in failed
    assert not (tmp_path / "last").exists()
    assert not list(tmp_path.glob(".*"))
