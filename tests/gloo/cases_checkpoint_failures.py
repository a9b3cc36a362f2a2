"""Run on ranks: saves that go wrong. And, on ranks of their own, processes that end while they save."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases_trainer import make_trainer
from tiny import global_batch, my_part, parallel_config, tiny_llama
from transformers import TrainerCallback

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.writing.part_writer import PartWriter
from hf_fsdp_plugin.integrations.accelerate import checkpoints as accelerate_checkpoints
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers import checkpoints as trainer_checkpoints

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

from forked_ranks import WORLD_SIZE, World, preload

LEFT_FREE = 40 << 10
"""Bytes on a disk that is said to be full; a checkpoint of the tiny model needs ten times as many."""


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class At(TrainerCallback):
    """Calls a function at the end of one step, on every rank."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self.step, self.function = step, function

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.function()


class WriterFirst(TrainerCallback):
    """Before each step, the writer in the background gets as far as it can without the other ranks' agreement."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if manager.save_in_flight is not None:
            manager.save_in_flight.join(0.5)
        dist.barrier()


def train_into_trouble(output_dir: str, trouble: Callable[[Any], None], **arguments: Any) -> dict[str, Any]:
    """A checkpoint after step 2, then trouble, then one after step 4; training would end with step 5.

    Returns what this rank was told, in which step, and what the folder held then.
    """
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "save_total_limit": 1}
    trainer = make_trainer(output_dir, callbacks=[WriterFirst()], **{**defaults, **arguments})
    trainer.add_callback(At(3, lambda: trouble(trainer)))
    error = ""
    try:
        trainer.train()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    dist.barrier()
    return {"error": error, "step": trainer.state.global_step, "left": listing(Path(output_dir))}


def full_disk(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """``output_dir`` lies on a small disk of its own."""
    filler = Path(output_dir).parent / "filler"

    def fill(trainer: Any) -> None:
        manager.wait()
        if dist.get_rank() == 0:
            free = os.statvfs(filler.parent).f_bavail * os.statvfs(filler.parent).f_frsize
            filler.write_bytes(bytes(free - LEFT_FREE))
        dist.barrier()

    return train_into_trouble(output_dir, fill, **arguments)


def read_only(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The disk of ``output_dir`` is remounted without leave to write."""

    def remount(trainer: Any) -> None:
        manager.wait()
        if dist.get_rank() == 0:
            assert os.system(f"mount -o remount,ro {Path(output_dir).parent}") == 0
        dist.barrier()

    return train_into_trouble(output_dir, remount, **arguments)


@contextlib.contextmanager
def small_files_only() -> Iterator[None]:
    """The system refuses this process files of more than a page."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class RefusedWriter(PartWriter):
    """The system refuses its files."""

    def write(self, *args: Any) -> Any:
        with small_files_only():
            return super().write(*args)

    def write_staged(self, *args: Any) -> Any:
        with small_files_only():
            return super().write_staged(*args)


def one_rank_cannot_write(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The system refuses rank 1 its second checkpoint's tensors."""

    def refuse(trainer: Any) -> None:
        manager.wait()
        if dist.get_rank() == 1:
            manager.writer = RefusedWriter()

    try:
        return train_into_trouble(output_dir, refuse, **arguments)
    finally:
        manager.writer = PartWriter()


def small_file_fails(output_dir: str, owner: str, rank: int, **arguments: Any) -> dict[str, Any]:
    """What a rank says of its own state cannot be had."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no state today")

    def break_it(trainer: Any) -> None:
        if dist.get_rank() == rank:
            if owner == "scheduler":
                trainer.lr_scheduler.state_dict = fail
            else:
                trainer._save_rng_state = fail

    return train_into_trouble(output_dir, break_it, **arguments)


def fails_and_goes_on(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """The save after step 2 fails on one rank; the user catches that, and trains on to the next save."""
    trainer = make_trainer(output_dir, save_strategy="steps", save_steps=2, max_steps=4, **arguments)
    original = trainer._save_checkpoint
    errors = []

    def save(*args: Any, **kwargs: Any) -> None:
        try:
            if trainer.state.global_step == 2 and dist.get_rank() == 1:
                with small_files_only():
                    original(*args, **kwargs)
            else:
                original(*args, **kwargs)
        except ValueError as error:
            errors.append(str(error))

    trainer._save_checkpoint = save
    trainer.train()
    dist.barrier()
    return {"errors": errors, "left": listing(Path(output_dir))}


def watch_removals(output_dir: str, **arguments: Any) -> list[tuple[list[str], list[str]]]:
    """The checkpoints that are complete before and after each removal of an old one, as rank 0 sees them."""
    with _watched(trainer_checkpoints, Path(output_dir)) as seen:
        make_trainer(
            output_dir, save_strategy="steps", save_steps=2, max_steps=6, save_total_limit=1, **arguments
        ).train()
    return seen


def watch_accelerates_removals(folder: str, asynchronous: bool) -> list[tuple[list[str], list[str]]]:
    """The same of the checkpoints that Accelerate names and counts."""
    accelerator = accelerate_loop(asynchronous, 2)
    project = accelerator.project_configuration
    project.project_dir, project.automatic_checkpoint_naming, project.total_limit = folder, True, 1
    with _watched(accelerate_checkpoints, Path(folder) / "checkpoints") as seen:
        for _ in range(3):
            accelerator.save_state()
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
    """The step that ``resume_from_checkpoint=True`` goes on from."""
    found = []

    class Stop(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    make_trainer(output_dir, callbacks=[Stop()], **arguments).train(resume_from_checkpoint=True)
    return found[0]


def second_rename_fails(output_dir: str, **arguments: Any) -> str:
    """Saving over a checkpoint, of which the old one can be renamed away and the new one cannot be put in its place."""
    rename = Path.rename

    def failing(self: Path, target: Any) -> Path:
        if self.parent.name.endswith(".saving"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    Path.rename = failing  # type: ignore[method-assign]
    try:
        train(output_dir, max_steps=2, **arguments)
    except ValueError as error:
        return str(error)
    finally:
        Path.rename = rename  # type: ignore[method-assign]
    return ""


def accelerate_saves(folder: str, asynchronous: bool, version: int) -> list[str]:
    """Two ``save_state`` one after the other without a step between them; rank 1 cannot write for the first."""
    accelerator = accelerate_loop(asynchronous, version)
    errors = []
    for name in ("first", "second"):
        if name == "first" and dist.get_rank() == 1:
            manager.writer = RefusedWriter()
        try:
            accelerator.save_state(f"{folder}/{name}")
        except ValueError as error:
            errors.append(f"{name}: {error}")
        if manager.save_in_flight is not None:
            manager.save_in_flight.join(1)
        manager.writer = PartWriter()
    dist.barrier()
    return errors


def save_state(path: str, asynchronous: bool) -> str:
    """What a plain loop is told when it saves to ``path``."""
    accelerator = accelerate_loop(asynchronous, 2)
    try:
        accelerator.save_state(path)
        manager.wait()
        dist.barrier()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def accelerate_loop(asynchronous: bool, version: int, num_steps: int = 2) -> Any:
    """A plain loop of a few steps. Returns its Accelerator, which holds the rest."""
    config = parallel_config("full_shard", version, 2, async_save=asynchronous)
    accelerator = hfp.accelerator(hfp.load_spec(config))
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(num_steps):
        batch = my_part(global_batch(step), dist.get_rank(), dist.get_world_size())
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator


# On ranks that are forked for one case, and end in it.


def serve(pipe: Connection) -> None:
    """In a process that has imported everything and started nothing: run cases, which fork ranks."""
    preload()
    while True:
        name, args = pipe.recv()
        try:
            pipe.send((True, globals()[name](*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class SlowWriter(PartWriter):
    """Takes at least half a second in the background."""

    def write_staged(self, *args: Any) -> Any:
        time.sleep(0.5)
        return super().write_staged(*args)


class SlowRefusedWriter(SlowWriter, RefusedWriter):
    """Takes half a second, and is then refused."""


def train_slowly_written(rank: int, say: Callable[..., None], output_dir: str, handler: bool, settings: Any) -> None:
    """Says when its first save is on its way, and trains on."""
    manager.writer = SlowWriter()
    if handler:

        def user_handler(number: int, frame: Any) -> None:
            say("handler", listing(Path(output_dir)))
            sys.exit(7)

        signal.signal(signal.SIGTERM, user_handler)

    class Tell(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say("handed over", state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(0.05)

    make_trainer(output_dir, callbacks=[Tell()], save_strategy="steps", save_steps=4, max_steps=400, **settings).train()


def terminated_while_saving(output_dir: str, handler: bool, settings: dict[str, Any]) -> dict[str, Any]:
    """SIGTERM to all ranks while all write in the background."""
    log = Path(output_dir).parent / "log"
    world = World.fork(train_slowly_written, log, output_dir, handler, settings)
    try:
        world.until(lambda: all(world.last("handed over", rank) for rank in range(WORLD_SIZE)))
        before = listing(Path(output_dir))
        world.signal(signal.SIGTERM, [0, 1])
        ended = world.wait(25)
        world.listen(0)
        seen = [world.last("handler", rank) for rank in range(WORLD_SIZE)]
    finally:
        world.close()
    return {"before": before, "in time": ended, "codes": [world.ended[rank] for rank in (0, 1)], "handler": seen}


def save_and_end(rank: int, say: Callable[..., None], folder: str, end: str, version: int) -> None:
    manager.writer = SlowWriter()
    os.chdir(folder)  # where the report goes
    accelerator = accelerate_loop(True, version)
    if end == "with an error in the save" and rank == 1:
        manager.writer = SlowRefusedWriter()
    accelerator.save_state(f"{folder}/last")
    say("saved", (Path(folder) / "last").exists())
    if end == "end_training":
        accelerator.end_training()
    elif end == "without the group":
        dist.destroy_process_group()
    elif end == "after an exception":
        raise KeyError("the user's own mistake")


def loop_ends_after_saving(folder: str, end: str, version: int) -> dict[str, Any]:
    """A loop whose last save is still being written when its script is through."""
    log = Path(folder) / "log"
    world = World.fork(save_and_end, log, folder, end, version)
    try:
        ended = world.wait(40)
        world.listen(0)
        early = [world.last("saved", rank) for rank in range(WORLD_SIZE)]
    finally:
        world.close()
    return {"early": early, "in time": ended, "codes": [world.ended[rank] for rank in (0, 1)], "log": log.read_text()}
