"""One save, from the shards in memory to a checkpoint in its place, in the foreground or beside the training.

All ranks enter every function but those that say otherwise. An error on one rank is raised on all of them, what was
staged is removed, and earlier checkpoints are as they were.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, Manifest
from hf_fsdp_plugin.checkpoint.writing.buffers import Arena, give_way
from hf_fsdp_plugin.checkpoint.writing.dcp import DcpPart
from hf_fsdp_plugin.checkpoint.writing.failures import in_words
from hf_fsdp_plugin.checkpoint.writing.images import FileImage, on_accelerator
from hf_fsdp_plugin.checkpoint.writing.staging import RankPart, Staging
from hf_fsdp_plugin.checkpoint.writing.write import stage, write_live, write_staged
from hf_fsdp_plugin.problems import CheckpointError, Problem

_LOOK_AGAIN = 0.02
"""Seconds between two looks for the other ranks' parts."""
_LAST_WAIT = 20.0
"""Seconds that a process which has to end gives a save to finish: batch systems send SIGKILL after 30."""
_LAST_PATIENCE = 60.0
"""Seconds without a byte from other ranks after which a process that ends gives up a save."""
_WRITING, _DONE, _FAILED = 0, 1, 2

_open_saves: dict[Path, Save] = {}
_in_flight: Save | None = None
# One for every call of `write` within a save: a model's state, an optimizer's.
_arenas: list[Arena] = []
_group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What the last finished save of this process was.

    Attributes:
        stall: seconds that the caller was held.
    """

    final: Path
    asynchronous: bool
    stall: float


last_outcome: SaveOutcome | None = None


class _GivenUp(CheckpointError):
    """The consequence of an error on another rank, which is the one to tell."""


class Save:
    """Made by :func:`begin`. What ranks add goes through :meth:`write`; :meth:`finish` puts the checkpoint in place."""

    def __init__(self, final: Path, *, asynchronous: bool, into: bool = False) -> None:
        self.staging = Staging(final, into=into)
        self.asynchronous = asynchronous
        self.models: set[int] = set()  # numbers of those whose state is in it
        # Asked for here: a save may outlive the process group.
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._began = time.monotonic()
        self._records: list[FileRecord] = []
        self._dcp: list[DcpPart] = []
        self._staged: list[tuple[list[FileImage], torch.Tensor]] = []
        self._manifest: Manifest | None = None
        self._after: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._part_done = False
        self._given_up = threading.Event()
        self._state = _WRITING
        self._error: Exception | None = None

    @property
    def folder(self) -> Path:
        """Where the host writes its own files."""
        return self.staging.folder

    def write(self, images: Sequence[FileImage], dcp: Sequence[DcpPart] = ()) -> None:
        """Write this rank's images, or copy them out of the model to be written later."""
        images = list(images)
        with on_all_ranks(f"writing {self.staging.final}"), in_words(self.staging.final):
            self._dcp += dcp
            if self.asynchronous:
                self._staged.append((images, self._copy(images)))
            else:
                self._records += write_live(self.folder, images)

    def _copy(self, images: list[FileImage]) -> torch.Tensor:
        memory = _arena(len(self._staged)).take(sum(image.span for image in images), pinned=on_accelerator(images))
        stage(images, memory)
        return memory

    def finish(self, manifest: Manifest, after: Callable[[], None] | None = None) -> None:
        """Nothing more will be added: put the checkpoint in its place, now or as soon as all is written.

        Args:
            manifest: with everything but the files; rank 0's counts.
            after: called by rank 0 when the checkpoint is in its place.
        """
        global _in_flight
        _open_saves.pop(self.folder, None)
        self._manifest, self._after = manifest, after
        if self.asynchronous:
            _in_flight = self
            _watch_training()
            self._thread = threading.Thread(target=self._run, name="hf-fsdp-save", daemon=True)
            self._thread.start()
        else:
            self._finish_here()
        self._note()

    def _finish_here(self) -> None:
        final = self.staging.final
        try:
            with on_all_ranks(f"writing {final}"), in_words(final):
                self._put_part()
            with on_all_ranks(f"finishing {final}"), in_words(final):
                if self._rank == 0:
                    self._commit()
        except Exception:
            self.abandon()
            raise

    def _put_part(self) -> None:
        self.staging.put_part(self._rank, RankPart(tuple(self._records), tuple(self._dcp)))
        self._part_done = True

    def abandon(self) -> None:
        """An error has been raised on all ranks: leave nothing behind."""
        _open_saves.pop(self.folder, None)
        if self._rank == 0:
            self.staging.discard()

    def _note(self) -> None:
        global last_outcome
        last_outcome = SaveOutcome(self.staging.final, self.asynchronous, time.monotonic() - self._began)

    def _run(self) -> None:
        """In the background: no collective, and no tensor of the model."""
        give_way()
        try:
            with in_words(self.staging.final):
                for images, memory in self._staged:
                    self._records += write_staged(self.folder, images, memory)
                self._put_part()
                if self._rank == 0:
                    self._commit()
            self._state = _DONE
        except Exception as error:
            with suppress(OSError):
                self.staging.put_failure(self._rank, str(error))
            self._error, self._state = error, _FAILED

    def _commit(self) -> None:
        while (parts := self.staging.parts(self._world_size)) is None:
            failures = self.staging.failures()
            if failures or self._given_up.wait(_LOOK_AGAIN):
                raise _GivenUp([_other_rank_failed(self.staging.final, failures)])
        assert self._manifest is not None
        self.staging.commit(parts, self._manifest)
        if self._after is not None:
            self._after()

    def settled(self) -> bool:
        """Whether no rank writes any more. Raises on all ranks what went wrong on one."""
        state = self._state
        seen = torch.tensor([state == _FAILED, state == _WRITING], dtype=torch.int32)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=_cpu_group())
        if seen[0]:
            self._given_up.set()
            assert self._thread is not None
            self._thread.join()
            try:
                with on_all_ranks(f"writing {self.staging.final} in the background"):
                    if self._error is not None and not isinstance(self._error, _GivenUp):
                        raise self._error
            finally:
                self._retire()
                if self._rank == 0:
                    self.staging.discard()
        if not seen[1]:
            self._retire()
            return True
        return False

    def _retire(self) -> None:
        global _in_flight
        _in_flight = None
        self._staged.clear()
        _leave_training()

    def wait_here(self, seconds: float) -> None:
        """This rank alone, when the process has to end: until its part is done, but not longer than that."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait_while_written(self) -> None:
        """This rank alone, when the process ends in its own time: as long as any rank gets on. Raises what it knows."""
        assert self._thread is not None
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOOK_AGAIN)
            if (newest := self.staging.newest()) != seen or not self._part_done:
                seen, since = newest, time.monotonic()
            elif time.monotonic() - since > _LAST_PATIENCE:
                raise _GivenUp([_other_rank_failed(self.staging.final, self.staging.failures())])
        if self._error is not None:
            if self._rank == 0:
                self.staging.discard()
            raise self._error


def begin(final: Path, *, asynchronous: bool, into: bool = False) -> Save:
    """Start a save; one that is still being written in the background is waited for first."""
    wait()
    save = Save(final, asynchronous=asynchronous, into=into)
    save.staging.open()
    _open_saves[save.folder] = save
    return save


def open_save(folder: Path) -> Save | None:
    """The save whose staging folder this is."""
    return _open_saves.get(folder)


def wait() -> None:
    """Until the save in flight is in its place; raises what went wrong with it."""
    while (save := _in_flight) is not None:
        if not save.settled():
            time.sleep(_LOOK_AGAIN)


def prepare(sizes: Sequence[int], *, pinned: bool) -> None:
    """Have memory ready for the calls of ``write`` to come, beside the training. Not collective."""
    for number, size in enumerate(sizes):
        _arena(number).prepare(size, pinned=pinned)


def _arena(number: int) -> Arena:
    while len(_arenas) <= number:
        _arenas.append(Arena())
    return _arenas[number]


def _cpu_group() -> dist.ProcessGroup | None:
    """A group whose collectives take CPU tensors."""
    global _group
    if _group is None and "gloo" not in str(dist.get_backend_config()):
        _group = dist.new_group(backend="gloo")
    return _group


def _other_rank_failed(final: Path, failures: dict[int, str]) -> Problem:
    who = ", ".join(f"rank {rank}" for rank in failures) or "another rank"
    why = "".join(f" rank {rank}: {text}" for rank, text in failures.items())
    return Problem(severity="error", message=f"{final} was given up, as {who} could not write its part.{why}")


# While a save is in flight: a look at every optimizer step, and manners for the end of the process.

_step_hook: Any = None
_handler_before: Any = None


def _watch_training() -> None:
    global _step_hook, _handler_before
    _cpu_group()
    _step_hook = register_optimizer_step_post_hook(lambda *_: _look())
    atexit.register(_at_exit)
    if threading.current_thread() is threading.main_thread():
        _handler_before = signal.signal(signal.SIGTERM, _on_sigterm)


def _leave_training() -> None:
    global _step_hook, _handler_before
    if _step_hook is not None:
        _step_hook.remove()
        _step_hook = None
    atexit.unregister(_at_exit)
    if _handler_before is not None and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, _handler_before)
    _handler_before = None


def _look() -> None:
    if _in_flight is not None:
        _in_flight.settled()


def _at_exit() -> None:
    """Nobody has waited for the last save. Without a collective: the other ranks may be gone, or in another one."""
    if _in_flight is not None:
        _in_flight.wait_while_written()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Let the write finish if it can in time, then end as the process would have without us."""
    if _in_flight is not None:
        _in_flight.wait_here(_LAST_WAIT)
    before = _handler_before
    if callable(before):
        before(number, frame)
    elif before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
