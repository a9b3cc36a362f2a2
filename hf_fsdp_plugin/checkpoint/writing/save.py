"""One save: its staging folder, from this rank's shards in memory to a committed checkpoint, also in the background.

A checkpoint is written to a hidden folder, which the commit renames::

    run/.checkpoint-20.saving/checkpoint-20/      files of the ranks, of Accelerate and of Transformers
    run/.checkpoint-20.saving/parts/rank0.record  record of what rank 0 has written, once all of it is synced
    run/.checkpoint-20.saving/parts/rank0.failed  the error of rank 0, if it could not write its part
    run/checkpoint-20/                            after the rename
    run/.checkpoint-20.replaced/                  during the commit, the folder that had this name before
    run/.checkpoint-10.removed.saving/            a checkpoint during its removal

Ranks communicate through files, because collectives of a background save would interleave with collectives of training.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint import folders
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, Manifest, joined_ranges, record_file, write_manifest
from hf_fsdp_plugin.checkpoint.io import sync, write_bytes, write_text
from hf_fsdp_plugin.checkpoint.names import SAVING, accelerate_rng_file, hidden_path, trainer_rng_file
from hf_fsdp_plugin.checkpoint.writing.buffers import StagingBuffers, lower_thread_priority
from hf_fsdp_plugin.checkpoint.writing.dcp_files import (
    FolderEntries,
    RankRecord,
    final_files,
    read_records,
    record_bytes,
)
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, PartWriter, copy_parts, on_accelerator
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


class StagingFolder:
    """The folder in which one checkpoint is written until its commit.

    Attributes:
        final: path of the checkpoint after the commit.
        folder: path of the checkpoint until then.
        root: path of the staging folder itself.
    """

    def __init__(self, final: Path, *, into: bool = False) -> None:
        """``into``: add the files to the folder ``final`` instead of replacing it."""
        # The target of a link is replaced, not the link.
        self.final = final = final.resolve() if final.is_symlink() else final
        self._into = into
        # With ``into``, the folder exists, and its parent may not be writable.
        self.root = final / SAVING if into else hidden_path(final, SAVING)
        self.folder = self.root / final.name
        self._records = self.root / "parts"

    def create(self) -> None:
        """Create the folder, empty, and check that all ranks see it. Collective."""
        try:
            with on_all_ranks(f"preparing {self.root}"), os_errors_as_problems(self.final):
                if dist.get_rank() == 0:
                    self._create()
            with on_all_ranks(f"preparing {self.root}"):
                folders.check_visible(self.folder, "created")
        except CheckpointError:
            if dist.get_rank() == 0:
                self.discard()
            raise

    def _create(self) -> None:
        if self.final.exists() and not self.final.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file of that name exists")
        folders.recover_interrupted_commit(self.final)
        shutil.rmtree(self.root, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._records.mkdir()

    def discard(self) -> None:
        """Remove the folder. Called by rank 0 after all ranks have stopped writing."""
        shutil.rmtree(self.root, ignore_errors=True)

    def last_modified(self) -> int:
        """Return the time of the last write in the folder, in nanoseconds since the epoch; 0 if there is no file."""
        times = [0]
        with suppress(OSError):  # the commit may rename the folder during the loop
            times += [path.stat().st_mtime_ns for path in self.root.rglob("*")]
        return max(times)

    def write_record(self, rank: int, record: RankRecord) -> None:
        """Write the record of a rank, with the files that only this rank has written for the Trainer or Accelerate."""
        own = [name for name in (trainer_rng_file(rank), accelerate_rng_file(rank)) if (self.folder / name).is_file()]
        record = replace(record, files=(*record.files, *(self._synced(name) for name in own)))
        write_bytes(self._record_path(rank), record_bytes(record))

    def _synced(self, relative: str) -> FileRecord:
        sync(self.folder / relative)
        return record_file(self.folder, relative)

    def _record_path(self, rank: int) -> Path:
        return self._records / f"rank{rank}.record"

    def write_failure(self, rank: int, text: str) -> None:
        """Write the error of a rank instead of its record. If this fails too, rank 0 stops waiting at the next poll."""
        write_text(self._records / f"rank{rank}.failed", text)

    def read_failures(self) -> dict[int, str]:
        """Return the errors that ranks have written, by rank.

        Reads the whole folder: then clients of NFS also see records that did not exist when they asked for them.
        """
        return {
            int(path.stem.removeprefix("rank")): path.read_text(encoding="utf-8")
            for path in sorted(self._records.glob("*.failed"))
        }

    def missing_record(self, first: int, world_size: int) -> int:
        """Return the first rank from ``first`` on that has not written its record; ``world_size`` if all have."""
        return next((rank for rank in range(first, world_size) if not self._record_path(rank).exists()), world_size)

    def read_records(self, world_size: int) -> list[RankRecord]:
        """Return the records of all ranks, in rank order."""
        return read_records(self._record_path(rank).read_bytes() for rank in range(world_size))

    def commit(self, ranks: Sequence[RankRecord], manifest: Manifest) -> None:
        """Complete the checkpoint, sync it and rename it. Called by rank 0 when all ranks have written their records.

        Args:
            manifest: the manifest, complete except for ``files``.
        """
        written = [file for record in ranks for file in record.files]
        writer = PartWriter()  # not the manager's writer: a background commit must not share its memory
        for parts in final_files([record.entries for record in ranks]):
            written += writer.write(self.folder, parts)
        records = _joined_records(written)
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder).as_posix()
            if relative not in records and path.is_file():
                records[relative] = self._synced(relative)
        manifest = replace(manifest, files=tuple(records[path] for path in sorted(records)))
        write_manifest(self.folder, manifest)
        for inner in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            sync(inner)
        if self._into:
            folders.move_files(self.folder, self.final)
        elif (replaced := folders.put_in_place(self.folder, self.final)) is not None:
            folders.remove_replaced(replaced, self.final)
        sync(self.final.parent)
        self.discard()


def _joined_records(written: Sequence[FileRecord]) -> dict[str, FileRecord]:
    """Return one record for each file, of which several ranks may have written parts."""
    parts: dict[str, list[FileRecord]] = {}
    for record in written:
        parts.setdefault(record.path, []).append(record)
    return {
        path: replace(found[0], ranges=joined_ranges([record.ranges for record in found]))
        for path, found in parts.items()
    }


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
                self._staged.append((parts, memory, copy_parts(parts, memory)))
            else:
                self._records += self._writer.write(self.folder, parts)

    def finish(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Write the record of this rank. Rank 0 then commits the checkpoint and calls ``after``."""
        with on_all_ranks(f"writing {self.final}"), os_errors_as_problems(self.final):
            self._write_record()
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
        except Exception as error:
            with suppress(OSError):
                self.staging.write_failure(self._rank, str(error))
            self._error = error

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
        assert self._thread is not None
        writing = self._thread.is_alive()  # read first: a thread that ends has set its error before
        seen = torch.tensor([self._error is not None, writing], dtype=torch.int32, device="cpu")
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        failed, writing = (bool(flag) for flag in seen)
        if failed:
            self._abandoned.set()
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


def hooks_of(save: Save, poll: Callable[[], object], marker: Path | None) -> ExitStack:
    """Poll a save after optimizer steps, and delay the end of the process until the save is written.

    Args:
        marker: a file that exists while the save is in flight, so that the launcher gives it time.

    Returns:
        The hooks, which ``close`` removes.
    """
    interval = 1 if save.world_size <= _MANY_RANKS else _STEPS
    steps = itertools.count(1)

    def poll_after_step(*_: object) -> None:
        if next(steps) % interval == 0:  # at the same step on all ranks
            poll()

    hooks = ExitStack()
    if marker is not None:
        with suppress(OSError):
            marker.touch()
            hooks.callback(marker.unlink, missing_ok=True)
    hooks.callback(register_optimizer_step_post_hook(poll_after_step).remove)
    atexit.register(save.join_at_exit)  # no collective: the other ranks may have exited
    hooks.callback(atexit.unregister, save.join_at_exit)
    if threading.current_thread() is threading.main_thread():
        hooks.callback(_delay_sigterm(save))
    return hooks


def _delay_sigterm(save: Save) -> Callable[[], None]:
    """Wait at SIGTERM until this rank has written its part, or for 20 seconds. Return the function that undoes this."""

    def wait(number: int, frame: FrameType | None) -> None:
        save.join(_SIGTERM_TIMEOUT)
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def undo() -> None:
        if previous is not None and signal.getsignal(signal.SIGTERM) == wait:
            signal.signal(signal.SIGTERM, previous)

    previous = signal.signal(signal.SIGTERM, wait)
    return undo
