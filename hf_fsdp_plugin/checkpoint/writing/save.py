"""One save: from this rank's shards in memory to a committed checkpoint, in the foreground or in the background.

:meth:`CheckpointManager.saving` calls the methods in the order of the steps of a save. All methods are collective
unless stated otherwise. :class:`SaveHooks` are installed while a save is in flight.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, Manifest
from hf_fsdp_plugin.checkpoint.writing.buffers import StagingBuffers, lower_thread_priority
from hf_fsdp_plugin.checkpoint.writing.dcp_files import FolderEntries, RankRecord
from hf_fsdp_plugin.checkpoint.writing.parts import FilePart, PartWriter, on_accelerator, stage
from hf_fsdp_plugin.checkpoint.writing.staging import StagingFolder
from hf_fsdp_plugin.problems import CheckpointError, Problem

POLL_INTERVAL = 0.02
"""Seconds between checks for the records of other ranks."""
_POLL_COST = 1e-4
"""Seconds for each rank between reads of the folder of the records, which has a file for each rank."""
_LOOK_AGAIN = 1.0
"""Seconds between reads of the times of all files."""
_EXIT_TIMEOUT = 60.0
"""A process that exits abandons a save if no rank has written a byte for this many seconds."""
_MANY_RANKS, _STEPS = 16, 8
"""A poll is a collective that waits for the slowest rank. More ranks than ``_MANY_RANKS`` poll every 8 steps."""
_SIGTERM_TIMEOUT = 20.0
"""Seconds that the SIGTERM handler waits for a save. Batch systems send SIGKILL 30 seconds after SIGTERM."""
_WRITING, _DONE, _FAILED = 0, 1, 2


class _OtherRankFailed(CheckpointError):
    """Another rank failed. The error of that rank is reported instead of this one."""


class Save:
    """A checkpoint that is being written. :class:`CheckpointManager` creates, commits and polls it.

    Attributes:
        models: indices of the saved models.
        world_size: number of ranks that write.
    """

    def __init__(
        self, final: Path, *, asynchronous: bool, into: bool, writer: PartWriter, buffers: StagingBuffers
    ) -> None:
        self.staging = StagingFolder(final, into=into)
        self.models: set[int] = set()
        self.started = time.monotonic()
        self._asynchronous = asynchronous
        self._writer, self._buffers = writer, buffers
        # Stored, because a save may outlive the process group.
        self._rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._records: list[FileRecord] = []
        self._entries: list[FolderEntries] = []
        self._staged: list[tuple[list[FilePart], torch.Tensor, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._record_written = False
        self._abandoned = threading.Event()
        self._state = _WRITING
        self._error: Exception | None = None

    @property
    def final(self) -> Path:
        return self.staging.final

    @property
    def folder(self) -> Path:
        """The folder to which Accelerate and Transformers write their files."""
        return self.staging.folder

    def write(self, parts: Sequence[FilePart], entries: Sequence[FolderEntries] = ()) -> None:
        """Write this rank's parts. An asynchronous save copies them now and writes them later."""
        parts = list(parts)
        with on_all_ranks(f"writing {self.final}"), os_errors_as_problems(self.final):
            self._entries += entries
            if self._asynchronous:
                size = sum(part.span for part in parts)
                memory = self._buffers.take(len(self._staged), size, pinned=on_accelerator(parts))
                self._staged.append((parts, memory, stage(parts, memory)))
            else:
                self._records += self._writer.write(self.folder, parts)

    def write_record(self) -> None:
        """Write what this rank has written, for rank 0."""
        with on_all_ranks(f"writing {self.final}"), os_errors_as_problems(self.final):
            self._write_record()

    def commit(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Commit the checkpoint on rank 0, then call ``after`` there."""
        with on_all_ranks(f"committing {self.final}"), os_errors_as_problems(self.final):
            self._commit(manifest, after)

    def start(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Write the copies and commit them in the background."""
        self._thread = threading.Thread(target=self._run, args=(manifest, after), name="hf-fsdp-save", daemon=True)
        self._thread.start()

    def _run(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Body of the background thread. Uses no collectives and no tensors of the model."""
        lower_thread_priority()
        try:
            with os_errors_as_problems(self.final):
                for parts, memory, wait_for_copies in self._staged:
                    wait_for_copies()
                    self._records += self._writer.write_staged(self.folder, parts, memory)
                self._write_record()
                self._commit(manifest, after)
            self._state = _DONE
        except Exception as error:
            with suppress(OSError):
                self.staging.write_failure(self._rank, str(error))
            self._error, self._state = error, _FAILED

    def _write_record(self) -> None:
        self.staging.write_record(self._rank, RankRecord(tuple(self._records), tuple(self._entries)))
        self._record_written = True

    def _commit(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        if self._rank != 0:
            return
        rank = 0
        interval = max(POLL_INTERVAL, self.world_size * _POLL_COST)
        while (rank := self.staging.missing_record(rank, self.world_size)) < self.world_size:
            failures = self.staging.read_failures()
            if failures or self._abandoned.wait(interval):
                raise _OtherRankFailed([_abandoned(self.final, failures)])
        self.staging.commit(self.staging.read_records(self.world_size), manifest)
        if after is not None:
            after()

    def poll(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether all ranks have finished writing. An error of one rank is raised on all ranks.

        Args:
            group: a process group for CPU tensors; ``None`` for the default group.
        """
        state = self._state
        seen = torch.tensor([state == _FAILED, state == _WRITING], dtype=torch.int32, device="cpu")
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        failed, writing = (bool(flag) for flag in seen)
        if failed:
            self._abandoned.set()
            assert self._thread is not None
            self._thread.join()
            try:
                with on_all_ranks(f"writing {self.final} in the background"):
                    if self._error is not None and not isinstance(self._error, _OtherRankFailed):
                        raise self._error
            finally:
                self.discard()
        return failed or not writing

    def discard(self) -> None:
        """Remove the written files. Called when all ranks have raised an error."""
        for _, _, wait_for_copies in self._staged:
            wait_for_copies()  # before the memory is unpinned
        if self._rank == 0:
            self.staging.discard()

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Remove the written files if the block, in which all ranks agree on errors, raises one."""
        try:
            yield
        except Exception:
            self.discard()
            raise

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until this rank has written its part. Not collective."""
        if self._thread is not None:
            self._thread.join(timeout)

    def join_at_exit(self) -> None:
        """Wait while any rank makes progress, then raise this rank's error, if any. Not collective."""
        assert self._thread is not None
        last, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_LOOK_AGAIN)
            # Only rank 0 waits for others, and reads the times of all their files.
            if not self._record_written or (modified := self.staging.last_modified()) != last:
                last, since = modified if self._record_written else -1, time.monotonic()
            elif time.monotonic() - since > _EXIT_TIMEOUT:
                raise _OtherRankFailed([_abandoned(self.final, self.staging.read_failures())])
        if self._error is not None:
            self.discard()
            raise self._error


def _abandoned(final: Path, failures: dict[int, str]) -> Problem:
    who = ", ".join(f"rank {rank}" for rank in failures) or "another rank"
    why = "".join(f" Rank {rank} reported: {text}" for rank, text in failures.items())
    return Problem(
        code="FSDP-E406",
        message=f"the save of {final} was abandoned because {who} could not write its part.{why}",
        fix="Fix the error of that rank, and resume from the previous checkpoint.",
    )


class SaveHooks:
    """Polls a save after optimizer steps, and delays the end of the process until the save is written."""

    def __init__(self, save: Save, poll: Callable[[], object], marker: Path | None = None) -> None:
        """``marker``: a file that exists while the save is in flight, so that the launcher gives it time."""
        interval = 1 if save.world_size <= _MANY_RANKS else _STEPS
        steps = itertools.count(1)

        def poll_after_step(*_: object) -> None:
            if next(steps) % interval == 0:  # at the same step on all ranks
                poll()

        self._save, self._marker = save, marker
        if marker is not None:
            with suppress(OSError):
                marker.touch()
        self._step_hook = register_optimizer_step_post_hook(poll_after_step)
        atexit.register(save.join_at_exit)  # no collective: the other ranks may have exited
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        if self._marker is not None:
            with suppress(OSError):
                self._marker.unlink(missing_ok=True)
        self._step_hook.remove()
        atexit.unregister(self._save.join_at_exit)
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Wait until this rank has written its part or the timeout expires, then call the previous handler."""
        self._save.join(_SIGTERM_TIMEOUT)
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
