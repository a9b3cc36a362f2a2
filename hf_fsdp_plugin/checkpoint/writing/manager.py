"""Saves of a process, from the call to the commit: in the foreground, or in the background during training.

:meth:`CheckpointManager.saving` is the whole story: its lines are the steps of a save, in their order. All methods are
collective unless stated otherwise. An error on one rank is raised on all of them; the staging folder is removed, and
earlier checkpoints are unchanged.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.optimizers.parameters import JointModels, after_each_step, before_each_step
from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.backends.ranks.cluster import ranks_per_machine
from hf_fsdp_plugin.backends.sharding.buffers import send_buffers
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, Manifest
from hf_fsdp_plugin.checkpoint.saved_state import ModelShards, model_shards, optimizer_shards, parameter_shards
from hf_fsdp_plugin.checkpoint.storage import Storage
from hf_fsdp_plugin.checkpoint.writing import state_files
from hf_fsdp_plugin.checkpoint.writing.async_copies import ShardCopies
from hf_fsdp_plugin.checkpoint.writing.dcp_files import FolderEntries, StateFiles, complete_folders
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import StagingBuffers
from hf_fsdp_plugin.checkpoint.writing.staging_folder import RankRecord, StagingFolder, StoredStaging
from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.host_memory import available_memory
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind
from hf_fsdp_plugin.text import format_memory

_USABLE = 0.9
"""Part of the available memory of a machine for copies of asynchronous saves. Training needs memory, too."""
POLL_INTERVAL = 0.02
"""Seconds between polls of a save that the caller waits for. ``StagingFolder.poll_interval`` is the one of records."""
_POLL_COST = 1e-4
"""Seconds for each rank between reads of the folder of the records, which has a file for each rank."""
_EXIT_TIMEOUT = 600.0
"""Seconds that rank 0 waits at the exit for other ranks to write their parts."""
_MANY_RANKS, _STEPS = 16, 8
"""A poll is a collective that waits for the slowest rank. More ranks than ``_MANY_RANKS`` poll every 8 steps."""
_SIGTERM_TIMEOUT = 20.0
"""Seconds that the SIGTERM handler waits for a save. Batch systems send SIGKILL 30 seconds after SIGTERM."""


class CheckpointManager:
    """Writes the checkpoints of one process. At most one save is in flight: the next one waits for it.

    Attributes:
        writer: writes this rank's part of each file.
        buffers: the memory of asynchronous saves, which all of them use again.
        save_in_flight: the save that is being written in the background.
        saved_kinds: model -> state dict types of all checkpoints with an optimizer of it.
        saved_asynchronously: model -> whether its last checkpoint was written in the background.
        storage_url: URL of the storage to which the last checkpoint was saved; ``None`` for a folder.
        copies_at_once: whether asynchronous saves copy before they return, because a script has changed weights early.
        has_lost_save: whether the last save in the background ended without a checkpoint (FSDP-W428).
    """

    def __init__(
        self,
        in_flight_file: Callable[[], Path | None] = lambda: None,
        check_model: Callable[[nn.Module], None] = lambda _: None,
        on_saved: Callable[[Save], None] = lambda _: None,
    ) -> None:
        """Create a manager.

        Args:
            in_flight_file: returns the path of a file that exists while a save is in flight; ``None`` for none.
            check_model: called with each model before it is saved.
            on_saved: called with each checkpoint that is complete, in the thread that trains.
        """
        self._in_flight_file, self._check_model, self._on_saved = in_flight_file, check_model, on_saved
        self.writer = PartWriter()
        self.save_in_flight: Save | None = None
        self.saved_kinds: WeakKeyDictionary[nn.Module, set[StateDictKind]] = WeakKeyDictionary()
        self.saved_asynchronously: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self.storage_url: str | None = None
        self.has_lost_save = self.copies_at_once = False
        self._open: Save | None = None
        self.buffers = StagingBuffers()
        self._has_warned = False
        self._hooks = ExitStack()  # of the save in flight
        self._group: dist.ProcessGroup | None = None
        self._storage: tuple[Storage, str] | None = None  # and the token of this run

    @contextmanager
    def saving(
        self,
        final: Path,
        manifest: Callable[[], Manifest],
        *,
        asynchronous: bool = False,
        into: bool = False,
        linked: bool = False,
        storage: str = "",
        after: Callable[[], None] | None = None,
    ) -> Iterator[Save]:
        """Save a checkpoint. The block adds files to the folder of the save; then the save is committed.

        Args:
            manifest: returns the manifest, complete except for ``files``; called after the block.
            asynchronous: write and commit in the background.
            into: add the files to the folder ``final`` instead of replacing it.
            linked: the block writes to ``final``, a link until the commit. If it writes nothing, nothing is saved.
            storage: URL of the storage in which the checkpoint is committed, in the background; empty for ``final``.
            after: rank 0 calls it after the commit.
        """
        begun = time.monotonic()
        self.wait()  # for the save in flight
        staging = StagingFolder(final.absolute(), into=into, linked=linked)
        if storage:
            staging, self.storage_url = StoredStaging(final.absolute(), *self.use_storage(storage)), storage
        save = Save(staging, self, asynchronous=asynchronous, begun=begun)
        staging.create()  # rank 0 creates an empty folder beside the checkpoint, and all ranks see it
        outer, self._open = self._open, save  # another save may be opened and finished in the block
        try:
            with on_all_ranks(f"writing {final}"), os_errors_as_problems(save.final):
                # Accelerate and the Trainer write their files. Their calls that save a model or an optimizer come to
                # save_model and save_optimizer, in which each rank writes its shards, or copies them to memory.
                yield save
            if linked and not broadcast_object(any(save.folder.iterdir()) or save.models):
                save.discard()
                return
            contents = replace(manifest(), asynchronous=save.asynchronous)
            save.step = contents.step
            if not (asynchronous or storage):
                save.finish(contents, after)  # each rank: its record; rank 0: the manifest, syncs, and the rename
        except Exception:
            save.discard()
            raise
        finally:
            self._open = outer
        if asynchronous or storage:
            self._cpu_group()  # created here, because that is collective
            self.save_in_flight = save
            self._hooks = hooks_of(save, self._poll, self._in_flight_file())  # optimizer steps, exit and SIGTERM
            save.start(contents, after)  # in a thread: copy, write the copies, then the steps of finish
            if self.copies_at_once or not save.has_optimizers or save.changes_weights_between_steps:
                save.copies.wait_in_stream()
        save.stall = time.monotonic() - begun
        if not (asynchronous or storage or into):
            self._on_saved(save)

    def use_storage(self, url: str) -> tuple[Storage, str]:
        """Return the storage of a URL, which only this run writes from now on, and the token of the run.

        Collective at the first call. Raises ``CheckpointError`` if the storage cannot be used.
        """
        if self._storage is None or self._storage[0].url != url.rstrip("/"):
            with on_all_ranks(f"opening {url}"):
                storage = Storage(url)
            token = broadcast_object(secrets.token_hex(8))
            with on_all_ranks(f"opening {url}"):
                if dist.get_rank() == 0:
                    storage.claim(token)
            with on_all_ranks(f"opening {url}"):
                storage.check_owner(token)  # each machine has its own credentials
            self._storage = storage, token
        return self._storage

    def open_save(self, folder: Path) -> Save | None:
        """Return the save whose block is running, if ``folder`` is its folder. Not collective.

        Only for the methods of other libraries, which pass on the folder that they were called with.
        """
        save = self._open
        return save if save is not None and folder.exists() and folder.samefile(save.folder) else None

    def wait(self) -> None:
        """Wait until the save in flight is committed. An error of one rank is raised on all ranks."""
        while self.save_in_flight is not None:
            if not self._poll():
                time.sleep(POLL_INTERVAL)

    def close(self) -> None:
        """Wait for the save in flight, and release memory, hooks and process group. The manager can be used again."""
        try:
            if dist.is_initialized():
                self.wait()
            elif self.save_in_flight is not None:
                self.save_in_flight.join_at_exit()
        finally:
            self._retire()
            self.buffers.close()
            self.writer.close()
            self._storage = None
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def save_model(
        self,
        model: nn.Module,
        into: Save | Path,
        kind: StateDictKind,
        index: int = 0,
        *,
        adapter_only: bool = False,
        max_shard_size: int = state_files.MAX_SHARD_SIZE,
    ) -> None:
        """Write a model's state as a part of an open save, or immediately to a folder."""
        self._check_model(model)
        send_buffers(model)  # a resumed run has rank 0's buffers on all ranks, and so has the run that continues
        with on_all_ranks("reading the layout of the model"):
            parameters = into.parameters(model) if isinstance(into, Save) else None
            is_later = isinstance(into, Save) and into.asynchronous
            shards = model_shards(model, parameters, only_trained=adapter_only, copy_buffers=is_later)
            files = state_files.model_files(shards, kind, index, max_shard_size=max_shard_size)
        self._write(into, files)
        if isinstance(into, Save):
            into.models.add(index)
            self.saved_asynchronously[model] = into.asynchronous

    def save_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, into: Save | Path, kind: StateDictKind, index: int = 0
    ) -> None:
        """Write an optimizer's state, keyed by parameter names, in the same way as :meth:`save_model`."""
        with on_all_ranks("reading the layout of the optimizer"):
            parameters = into.parameters(model) if isinstance(into, Save) else None
            files = state_files.optimizer_files(optimizer_shards(model, optimizer, parameters), index)
        self._write(into, files)
        if isinstance(into, Save):
            into.has_optimizers = True
            # Such as the optimizers of schedule-free, whose train() and eval() exchange the weights.
            into.changes_weights_between_steps |= hasattr(optimizer, "train")
        for owner in model.values() if isinstance(model, JointModels) else (model,):
            self.saved_kinds.setdefault(owner, set()).add(kind)
            if isinstance(into, Save):
                self.saved_asynchronously[owner] = into.asynchronous

    def fits_on_all_ranks(self, size: int) -> bool:
        """Return whether all ranks have memory for the copies of an asynchronous save. Warns once if not. Collective.

        Each machine is asked before any of its ranks allocates. All ranks get the same result.

        Args:
            size: bytes of the copies of this rank.
        """
        ranks = ranks_per_machine(os.environ, dist.get_world_size(), available_device().count())
        usable = int(available_memory() * _USABLE) // ranks
        figures = torch.tensor([self.buffers.missing(0, size), -usable], device="cpu")
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=self._cpu_group())
        missing, available = int(figures[0]), -int(figures[1])
        if missing > available and not self._has_warned:
            self._has_warned = True
            message = f"an asynchronous save needs {format_memory(missing)} of CPU memory per rank for copies, and "
            message += f"each rank may use {format_memory(available)} of its machine ({_USABLE:.0%} of MemAvailable, "
            message += "or of what the limit of its control group leaves): it is written synchronously."
            fix = "Use more machines or machines with more memory, raise the limit of the container or job, or set "
            print_once(Problem(code="FSDP-W284", message=message, fix=f"{fix}fsdp_async_save: false."))
        return missing <= available

    def _write(self, folder: Save | Path, files: StateFiles) -> None:
        if isinstance(folder, Save):
            folder.write(files)
            return
        with on_all_ranks(f"writing {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            self.writer.write(folder, files.parts)
        if files.entries:
            ranks: list[Sequence[FolderEntries]] = [()] * dist.get_world_size()
            dist.gather_object(files.entries, ranks if dist.get_rank() == 0 else None)
            with on_all_ranks(f"writing {folder}"):
                if dist.get_rank() == 0:
                    complete_folders(folder, ranks)

    def _poll(self) -> bool:
        """Return whether no save is in flight any more."""
        done = True
        try:
            done = self.save_in_flight is None or self.save_in_flight.poll(self._cpu_group())
        finally:
            if done:
                save = self.save_in_flight
                self.has_lost_save = save is not None and save.has_failed
                self._retire()
                if save is not None and not save.has_failed:
                    self._on_saved(save)
        return done

    def _retire(self) -> None:
        self.save_in_flight = None
        self._hooks.close()

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """Return a process group for CPU tensors; ``None`` for the default group."""
        if self._group is None and "gloo" not in str(dist.get_backend_config()):
            self._group = dist.new_group(backend="gloo")
        return self._group


class _OtherRankFailed(CheckpointError):
    """A save was abandoned because another rank failed. The error of that rank is reported instead of this one.

    Args:
        failures: the errors that ranks have written, by rank.
    """

    def __init__(self, final: Path, failures: dict[int, str]) -> None:
        who = ", ".join(f"rank {rank}" for rank in failures) or "another rank"
        why = "".join(f" Rank {rank} reported: {text}" for rank, text in failures.items())
        message = f"the save of {final} was abandoned because {who} could not write its part.{why}"
        fix = "Fix the error of that rank, and resume from the previous checkpoint."
        super().__init__([Problem(code="FSDP-E406", message=message, fix=fix)])


class Save:
    """A checkpoint that is being written. The manager creates, commits and polls it.

    Attributes:
        final: path of the checkpoint after the commit.
        folder: the folder to which Accelerate and Transformers write their files.
        models: indices of the saved models.
        has_optimizers: whether optimizers were saved, which otherwise may change weights at any time.
        changes_weights_between_steps: whether one of them also changes weights outside of its step.
        copies: the copies of an asynchronous save.
        asynchronous: whether it is written in the background. If not all ranks have the memory for a copy, the rest of
            an asynchronous save is written at once, and only the commit is in the background.
        world_size: number of ranks that write.
        has_failed: whether :meth:`poll` has found that a rank could not write its part.
        begun: when the save was called, in seconds of the monotonic clock.
        stall: seconds until the call has returned.
        step: optimizer steps before it; ``None`` if they are unknown.
    """

    def __init__(
        self, staging: StagingFolder, manager: CheckpointManager, *, asynchronous: bool, begun: float = 0.0
    ) -> None:
        self.staging, self.begun, self.stall = staging, begun, 0.0
        self.step: int | None = None
        self.final, self.folder = self.staging.final, self.staging.folder
        self.models: set[int] = set()
        self.has_optimizers = self.changes_weights_between_steps = False
        self.asynchronous = asynchronous
        self._manager = manager
        self._parameters: dict[int, ModelShards] = {}
        # Stored, because a save may outlive the process group.
        self._rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._records: list[FileRecord] = []
        self._entries: list[FolderEntries] = []
        self.copies = ShardCopies(manager.buffers)
        self._thread: threading.Thread | None = None
        self._record_written = self.has_failed = False
        self._error: Exception | None = None

    def parameters(self, model: nn.Module) -> ModelShards:
        """Return this rank's shards of the parameters of a model, which several parts of the save need."""
        if id(model) not in self._parameters:
            self._parameters[id(model)] = parameter_shards(model)
        return self._parameters[id(model)]

    def write(self, files: StateFiles) -> None:
        """Write this rank's parts. An asynchronous save copies and writes them later, if there is memory."""
        size = sum(part.span for part in (*self.copies.parts, *files.parts))
        self.asynchronous = self.asynchronous and self._manager.fits_on_all_ranks(size)
        self._entries += files.entries
        if self.asynchronous:
            self.copies.parts += files.parts
            return
        with on_all_ranks(f"writing {self.final}"), os_errors_as_problems(self.final):
            self._records += self._manager.writer.write(self.folder, files.parts)

    def finish(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Write the record of this rank. Rank 0 then commits the checkpoint and calls ``after``."""
        with on_all_ranks(f"writing {self.final}"), os_errors_as_problems(self.final):
            self._write_record()
        with on_all_ranks(f"committing {self.final}"), os_errors_as_problems(self.final):
            self._commit(manifest, after)

    def start(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Copy this rank's shards, write the copies and commit them, in the background."""
        self._parameters.clear()
        self.copies.begin()
        self._thread = threading.Thread(target=self._run, args=(manifest, after), name="hf-fsdp-save", daemon=True)
        self._thread.start()

    def _run(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        """Body of the background thread. Uses no collectives."""
        try:
            with os_errors_as_problems(self.final):
                self.copies.take()  # the next optimizer step waits for it
                with suppress(OSError):  # only this thread gets the lowest priority, so that it uses only idle cores
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
                copies = self.copies
                self._records += self._manager.writer.write_staged(self.folder, copies.parts, copies.memory)
                self._write_record()
                self._commit(manifest, after)
        except Exception as error:
            with suppress(OSError, CheckpointError):
                self.staging.write_failure(self._rank, str(error))
            self._error = error

    def _write_record(self) -> None:
        self.staging.write_record(self._rank, RankRecord(tuple(self._records), tuple(self._entries)))
        self._record_written = True

    def _commit(self, manifest: Manifest, after: Callable[[], None] | None) -> None:
        if self._rank != 0:
            return
        rank = 0
        interval = max(self.staging.poll_interval, self.world_size * _POLL_COST)
        while (rank := self.staging.missing_record(rank, self.world_size)) < self.world_size:
            failures = self.staging.read_failures()
            if failures or self.staging.abandoned.wait(interval):
                raise _OtherRankFailed(self.final, failures)
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
            self.has_failed = True
            self.staging.abandoned.set()
            self._thread.join()
            try:
                with on_all_ranks(f"writing {self.final} in the background"):
                    if self._error is not None and not isinstance(self._error, _OtherRankFailed):
                        raise self._error
            except CheckpointError as error:
                problem = error.problems[0]
                if problem.code == "FSDP-W435":  # a WeightsChangedError of any rank
                    self._manager.copies_at_once = True
                    print_once(replace(problem, message=f"{self.final.name}: {problem.message}"))
                else:
                    self.staging.report(error)
            finally:
                self.discard()
        return failed or not writing

    def discard(self) -> None:
        """Remove the written files. Called when all ranks have raised an error."""
        if self._rank == 0 or not self.staging.is_shared:
            self.staging.discard()

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until this rank has written its part. Not collective."""
        if self._thread is not None:
            self._thread.join(timeout)

    def join_at_exit(self) -> None:
        """Wait for the save, then raise this rank's error, if any. Not collective.

        Rank 0 waits for the other ranks at most ``_EXIT_TIMEOUT`` seconds after it has written its own part.
        """
        assert self._thread is not None
        while self._thread.is_alive() and not self._record_written:
            self._thread.join(1.0)
        self._thread.join(_EXIT_TIMEOUT)
        if self._thread.is_alive():
            raise _OtherRankFailed(self.final, self.staging.read_failures())
        if self._error is not None:
            self.discard()
            raise self._error


def _remove_marker(marker: Path) -> None:
    with suppress(OSError):
        marker.unlink(missing_ok=True)


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
        hooks.callback(_remove_marker, marker)
        with suppress(OSError):
            marker.touch()
    hooks.callback(before_each_step(lambda *_: save.copies.wait_in_stream()))
    hooks.callback(after_each_step(poll_after_step))
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
