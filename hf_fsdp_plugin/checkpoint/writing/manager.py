"""Saves of a process, from the call to the commit: in the foreground, or in the background during training.

:meth:`CheckpointManager.saving` is the whole story: its lines are the steps of a save, in their order. All methods are
collective unless stated otherwise. An error on one rank is raised on all of them; the staging folder is removed, and
earlier checkpoints are unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.optimizers.parameters import JointModels
from hf_fsdp_plugin.backends.ranks.agreement import on_all_ranks
from hf_fsdp_plugin.backends.sharding.forward_hooks import send_buffers
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.shards import ModelShards, model_shards, optimizer_shards, trainable_shards
from hf_fsdp_plugin.checkpoint.writing.buffers import StagingBuffers
from hf_fsdp_plugin.checkpoint.writing.dcp_files import FolderEntries, final_files
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter, on_accelerator
from hf_fsdp_plugin.checkpoint.writing.save import POLL_INTERVAL, Save, hooks_of
from hf_fsdp_plugin.checkpoint.writing.state_files import (
    MAX_SHARD_SIZE,
    StateFiles,
    model_files,
    optimizer_files,
    whole_files,
)
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind


class CheckpointManager:
    """Writes the checkpoints of one process. At most one save is in flight: the next one waits for it.

    Attributes:
        writer: writes this rank's part of each file.
        save_in_flight: the save that is being written in the background.
        last_asynchronous: whether the last save was asynchronous; ``None`` if none was committed or started.
    """

    def __init__(self, in_flight_file: Callable[[], Path | None] = lambda: None) -> None:
        """``in_flight_file`` returns the path of a file that exists while a save is in flight; ``None`` for none."""
        self._in_flight_file = in_flight_file
        self.writer = PartWriter()
        self.save_in_flight: Save | None = None
        self.last_asynchronous: bool | None = None
        self._kinds: WeakKeyDictionary[nn.Module, set[StateDictKind]] = WeakKeyDictionary()
        self._open: Save | None = None
        self._buffers = StagingBuffers()  # reused by all saves
        self._hooks = ExitStack()  # of the save in flight
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def saving(
        self,
        final: Path,
        manifest: Callable[[], Manifest],
        *,
        asynchronous: bool = False,
        into: bool = False,
        after: Callable[[], None] | None = None,
    ) -> Iterator[Save]:
        """Save a checkpoint. The block adds files to the folder of the save; then the save is committed.

        Args:
            manifest: returns the manifest, complete except for ``files``; called after the block.
            asynchronous: write and commit in the background.
            into: add the files to the folder ``final`` instead of replacing it.
            after: rank 0 calls it after the commit.
        """
        self.wait()  # for the save in flight
        save = Save(final.absolute(), asynchronous=asynchronous, into=into, writer=self.writer, buffers=self._buffers)
        save.staging.create()  # rank 0 creates an empty folder beside the checkpoint, and all ranks see it
        try:
            with self._opened(save), on_all_ranks(f"writing {final}"), os_errors_as_problems(save.final):
                # Accelerate and the Trainer write their files. Their calls that save a model or an optimizer come to
                # save_model and save_optimizer, in which each rank writes its shards, or copies them to memory.
                yield save
            contents = manifest()
            if not asynchronous:
                save.finish(contents, after)  # each rank: its record; rank 0: the manifest, syncs, and the rename
        except Exception:
            save.discard()
            raise
        if asynchronous:
            self._watch(save)  # after each optimizer step, at exit and at SIGTERM
            save.start(contents, after)  # in a thread: write the copies, then the steps of finish
        self.last_asynchronous = asynchronous

    def open_save(self, folder: Path) -> Save | None:
        """Return the save whose block is running, if ``folder`` is its folder. Not collective."""
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
            self._buffers.close()
            self.writer.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def save_model(
        self,
        model: nn.Module,
        folder: Path,
        kind: StateDictKind,
        index: int = 0,
        *,
        adapter_only: bool = False,
        max_shard_size: int = MAX_SHARD_SIZE,
    ) -> None:
        """Write a model's state to ``folder`` as a part of its open save, or immediately if there is none."""
        send_buffers(model)  # a resumed run has rank 0's buffers on all ranks, and so has the run that continues
        with on_all_ranks("reading the layout of the model"):
            shards = model_shards(model)
            if adapter_only:
                shards = trainable_shards(shards)
            files = model_files(shards, kind, index, max_shard_size=max_shard_size)
        self._write(folder, files)
        if (save := self.open_save(folder)) is not None:
            save.models.add(index)

    def save_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: StateDictKind, index: int = 0
    ) -> None:
        """Write an optimizer's state, keyed by parameter names, to ``folder`` in the same way as :meth:`save_model`."""
        with on_all_ranks("reading the layout of the optimizer"):
            files = optimizer_files(optimizer_shards(model, optimizer), index)
        self._write(folder, files)
        for owner in model.values() if isinstance(model, JointModels) else (model,):
            self._kinds.setdefault(owner, set()).add(kind)

    def save_tensors(self, shards: ModelShards, folder: Path, stem: str) -> None:
        """Write other tensors of a model to safetensors files ``STEM`` in the same way as :meth:`save_model`."""
        self._write(folder, whole_files(shards, stem))

    def saved_kinds(self, model: nn.Module) -> set[StateDictKind]:
        """Return the state dict types of all checkpoints with an optimizer of this model."""
        return set(self._kinds.get(model, ()))

    def prepare_buffers(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[tuple[nn.Module, torch.optim.Optimizer]],
        kind: StateDictKind,
    ) -> None:
        """Allocate the memory of an asynchronous save in the background. Not collective.

        Args:
            optimizers: pairs of model and optimizer, after the optimizer's first step, which creates its state.
        """
        files = [model_files(model_shards(model), kind) for model in models]
        files += [optimizer_files(optimizer_shards(model, optimizer)) for model, optimizer in optimizers]
        pinned = any(on_accelerator(state.parts) for state in files)
        self._buffers.prepare([sum(part.span for part in state.parts) for state in files], pinned=pinned)

    def _write(self, folder: Path, files: StateFiles) -> None:
        save = self.open_save(folder)
        with on_all_ranks(f"writing {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            if save is None:
                self.writer.write(folder, files.parts)
        if save is not None:
            save.write(files.parts, files.entries)
        elif files.entries:
            self._complete(folder, files.entries)

    def _complete(self, folder: Path, mine: Sequence[FolderEntries]) -> None:
        ranks: list[Sequence[FolderEntries]] = [()] * dist.get_world_size()
        dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
        with on_all_ranks(f"writing {folder}"):
            if dist.get_rank() == 0:
                for parts in final_files(ranks):
                    self.writer.write(folder, parts)

    @contextmanager
    def _opened(self, save: Save) -> Iterator[None]:
        """Make ``save`` the open save during the block, in which another one may be opened and finished."""
        outer, self._open = self._open, save
        try:
            yield
        finally:
            self._open = outer

    def _watch(self, save: Save) -> None:
        self._cpu_group()  # created here, because that is collective
        self.save_in_flight = save
        self._hooks = hooks_of(save, self._poll, self._in_flight_file())

    def _poll(self) -> bool:
        if self.save_in_flight is None:
            return True
        done = True
        try:
            done = self.save_in_flight.poll(self._cpu_group())
        finally:
            if done:
                self._retire()
        return done

    def _retire(self) -> None:
        self.save_in_flight = None
        self._hooks.close()

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """Return a process group for CPU tensors; ``None`` for the default group."""
        if self._group is None and "gloo" not in str(dist.get_backend_config()):
            self._group = dist.new_group(backend="gloo")
        return self._group
