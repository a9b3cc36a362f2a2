"""Cases that ranks run: saves that fail, and, on forked ranks, processes that end during a save."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from transformers import TrainerCallback

from hf_fsdp_plugin.checkpoint.checking.inspection import why_incomplete
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.integrations.accelerate import checkpoints as accelerate_checkpoints
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers import checkpoints as trainer_checkpoints
from scripts.bench.ranks import forked as forked_ranks
from tests.gloo.cases_checkpoint_accelerate import trained_loop
from tests.gloo.cases_resume import StopAt
from tests.gloo.cases_trainer import make_trainer

USER_EXIT_CODE = 7
LEFT_FREE = 40 << 10
"""Bytes left free on a full disk; a checkpoint of the tiny model needs ten times as many."""


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class InjectFault(TrainerCallback):
    """Calls a function on every rank after step 3, when the save of step 2 is committed."""

    def __init__(self, inject: Callable[[], None]) -> None:
        self.inject = inject

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the background writer run as far as it can without a poll."""
        if manager.save_in_flight is not None:
            manager.save_in_flight.join(0.5)
        dist.barrier()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            manager.wait()
            self.inject()
            dist.barrier()


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


def read_only(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The disk of ``output_dir`` is remounted read-only."""

    def remount(trainer: Any) -> None:
        if dist.get_rank() == 0:
            assert os.system(f"mount -o remount,ro {Path(output_dir).parent}") == 0

    return train_with_fault(output_dir, remount, **arguments)


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """Limit the files of this process to the size of a page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class RefusedWriter(PartWriter):
    """Fails for files larger than a page."""

    def write(self, *args: Any) -> Any:
        with small_files_only():
            return super().write(*args)

    def write_staged(self, *args: Any) -> Any:
        with small_files_only():
            return super().write_staged(*args)


def one_rank_cannot_write(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Rank 1 cannot write the tensors of its second checkpoint."""

    def refuse(trainer: Any) -> None:
        if dist.get_rank() == 1:
            manager.writer = RefusedWriter()

    try:
        return train_with_fault(output_dir, refuse, **arguments)
    finally:
        manager.writer = PartWriter()


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


def watch_removals(output_dir: str, **arguments: Any) -> list[tuple[list[str], list[str]]]:
    """Return the complete checkpoints before and after each removal of an old one, on rank 0."""
    with _watched(trainer_checkpoints, Path(output_dir)) as seen:
        make_trainer(
            output_dir, save_strategy="steps", save_steps=2, max_steps=6, save_total_limit=1, **arguments
        ).train()
    return seen


def watch_accelerates_removals(folder: str, asynchronous: bool) -> list[tuple[list[str], list[str]]]:
    """The same for checkpoints that Accelerate names."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    loop = trained_loop(2, project=project, async_save=asynchronous)
    with _watched(accelerate_checkpoints, Path(folder) / "checkpoints") as seen:
        for _ in range(3):
            loop.accelerator.save_state()
        manager.wait()
    return seen


@contextlib.contextmanager
def _watched(module: Any, run: Path) -> Iterator[list[tuple[list[str], list[str]]]]:
    original, seen = module.remove_checkpoint, []

    def complete() -> list[str]:
        return [path.name for path in sorted(run.glob("checkpoint*")) if why_incomplete(path) is None]

    def remove(path: Path) -> None:
        before = complete()
        original(path)
        seen.append((before, complete()))

    module.remove_checkpoint = remove
    try:
        yield seen
    finally:
        module.remove_checkpoint = original


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


def accelerate_saves(folder: str, asynchronous: bool, version: int) -> list[str]:
    """Call ``save_state`` twice without a step between; rank 1 cannot write for the first one."""
    loop = trained_loop(version, async_save=asynchronous)
    errors = []
    for name in ("first", "second"):
        if name == "first" and dist.get_rank() == 1:
            manager.writer = RefusedWriter()
        try:
            loop.accelerator.save_state(f"{folder}/{name}")
        except ValueError as error:
            errors.append(f"{name}: {error}")
        if manager.save_in_flight is not None:
            manager.save_in_flight.join(1)
        manager.writer = PartWriter()
    dist.barrier()
    return errors


def save_state(path: str, asynchronous: bool) -> str:
    """Return the error of a plain loop that saves to ``path``."""
    loop = trained_loop(2, async_save=asynchronous)
    try:
        loop.accelerator.save_state(path)
        manager.wait()
        dist.barrier()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Cases of ranks that are forked for one case, and end in it.


class SlowWriter(PartWriter):
    """Takes at least half a second in the background."""

    def write_staged(self, *args: Any) -> Any:
        time.sleep(0.5)
        return super().write_staged(*args)


class SlowRefusedWriter(SlowWriter, RefusedWriter):
    """Takes half a second, and then fails."""


def train_slowly_written(rank: int, report: Callable[..., None], output_dir: str, handler: bool, settings: Any) -> None:
    """Report when the first save was handed to the background, and continue training."""
    manager.writer = SlowWriter()
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


def save_and_end(rank: int, report: Callable[..., None], folder: str, end: str, version: int) -> None:
    manager.writer = SlowWriter()
    os.chdir(folder)  # the folder of the report
    accelerator = trained_loop(version, async_save=True).accelerator
    if end == "error in the save" and rank == 1:
        manager.writer = SlowRefusedWriter()
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
