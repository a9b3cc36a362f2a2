"""What the saving code of Accelerate, Transformers and other libraries shares in this process.

``manager`` writes checkpoints. ``gathered`` has the whole state of models while a library's own saving code, such as
``SentenceTransformer.save``, runs on rank 0. This code reads the weights through ``state_dict`` and ``save_pretrained``
of the modules, which then return them from the whole state. All ranks gather the model first.
"""

from __future__ import annotations

import datetime
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import collective_call, gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import ModuleLocation, locate_module
from hf_fsdp_plugin.checkpoint.checking.completeness import by_number, numbered_checkpoints
from hf_fsdp_plugin.checkpoint.file_io import object_in
from hf_fsdp_plugin.checkpoint.folders import remove_checkpoint
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, MANIFEST_NAME
from hf_fsdp_plugin.checkpoint.saved_state import ModelShards, model_shards, shards_below
from hf_fsdp_plugin.checkpoint.writing.manager import CheckpointManager
from hf_fsdp_plugin.checkpoint.writing.state_files import gathered_state, manifest_of
from hf_fsdp_plugin.integrations.run_metrics import run_metrics
from hf_fsdp_plugin.integrations.session import attributes_in_block, session
from hf_fsdp_plugin.observe.first_step import warn_added
from hf_fsdp_plugin.plan.names import below, unwrapped
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.state import process

_HF_WEIGHTS: Final = re.compile(rf"{HF_MODEL}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")


def _create_manager() -> CheckpointManager:
    return CheckpointManager(
        in_flight_file=lambda: session().in_flight_file, check_model=warn_added, on_saved=run_metrics().saved
    )


manager = process.owns(_create_manager)


@contextmanager
def exporting(model: nn.Module, folder: Path, *, step: int | None = None) -> Iterator[Any]:
    """Add the files that the block writes for a model, for ``from_pretrained``, to a folder. Collective."""
    manifest = partial(manifest_of, model, "full", step=step, batch={})
    with manager().saving(folder, manifest, into=True, after=partial(remove_stale_weights, folder)) as save:
        yield save


def remove_stale_weights(folder: Path) -> None:
    """Remove the weight files of an earlier save that the new one in ``folder`` has not replaced.

    ``from_pretrained`` reads ``model.safetensors`` before an index. Without this, a model that is saved in several
    files to the folder of a model in one file would be loaded with the old weights.
    """
    manifest = read_manifest(folder)
    new = {record.path for record in manifest.files} if manifest is not None else set()
    for path in folder.glob(f"{HF_MODEL}*"):
        if _HF_WEIGHTS.fullmatch(path.name) and path.name not in new:
            path.unlink()


def remove_oldest(newest: Path, prefix: str, limit: int | None, storage: str, best: str | None = None) -> None:
    """Delete the checkpoints of a run that were saved first, each one atomically. Called by rank 0 after a commit.

    An interrupted deletion would leave a partial folder with a new date, and folders with newer dates are kept longer.

    Args:
        newest: path of the checkpoint that was saved; it and ``best`` are kept.
        limit: number of checkpoints that are kept; all of them for ``None`` or 0.
        storage: URL of the storage with the checkpoints; empty for the folder of ``newest``.
    """
    if limit is None or limit <= 0:
        return
    protected = {newest.name} | ({Path(best).name} if best is not None else set())
    stored = manager().use_storage(storage)[0] if storage else None
    with suppress(CheckpointError) if stored is not None else nullcontext():  # the next save removes them
        if stored is not None:
            times = {name: str(marker.get("created")) for name, marker in stored.checkpoints().items()}
        else:
            times = {path.name: _time_of_save(path) for path in numbered_checkpoints(newest.parent, prefix)}
        # Not sorted by number first, because a new run in the folder of an older run has lower numbers.
        names = by_number(times, prefix)[::-1]
        names.sort(key=times.__getitem__)
        num_to_remove = max(len(names) - max(limit, len(protected)), 0)
        for name in [name for name in names if name not in protected][:num_to_remove]:
            remove_checkpoint(newest.with_name(name)) if stored is None else stored.remove(name)


def _time_of_save(checkpoint: Path) -> str:
    """Return when a checkpoint was saved. The times of its files, which a copy changes, are used without a manifest."""
    created = object_in(checkpoint / MANIFEST_NAME).get("created")
    modified = datetime.datetime.fromtimestamp(checkpoint.stat().st_mtime, datetime.UTC)
    return created if isinstance(created, str) else modified.isoformat(timespec="seconds")


class GatheredModels:
    """The gathered state that is in use: in its block only rank 0 runs, so that no other state can be gathered.

    Attributes:
        paused: whether ``save_pretrained`` is not replaced, for calls of this package that write no weights.
    """

    def __init__(self) -> None:
        self._root: nn.Module | None = None
        self._state: Mapping[str, torch.Tensor] = {}
        self.paused = False

    @contextmanager
    def on_rank_0(self, place: ModuleLocation) -> Iterator[bool]:
        """Gather the module at ``place``. On rank 0, :meth:`state_of` returns the state in the block. Collective.

        A forward of the model raises ``RuntimeError`` in the block, because only this rank is in it. For example, a
        SentenceTransformer computes examples for its model card, and continues without them.

        Returns:
            Whether this is rank 0.
        """
        state = state_at(place)
        if dist.get_rank() != 0:
            yield False
            return
        self._root, self._state = place.root, {place.prefix + name: tensor for name, tensor in state.items()}
        with ExitStack() as stack:
            for module in place.root.modules():
                stack.callback(module.register_forward_pre_hook(_refuse_forward, prepend=True).remove)
                stack.enter_context(attributes_in_block(module, state_dict=partial(self._state_dict, module)))
            try:
                yield True
            finally:
                self._root, self._state = None, {}

    def _state_dict(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = None if args or kwargs.get("destination") is not None else self.state_of(module)
        if state is None:
            return type(module).state_dict(module, *args, **kwargs)
        return OrderedDict((kwargs.get("prefix", "") + name, tensor) for name, tensor in state.items())

    def state_of(self, module: nn.Module) -> dict[str, torch.Tensor] | None:
        """Return the gathered state of a module by its own names; ``None`` outside of a block of :meth:`on_rank_0`."""
        place = locate_module(module) if self._root is not None else None
        return below(self._state, place.prefix) if place is not None and place.root is self._root else None


gathered = process.owns(GatheredModels)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise RuntimeError("a sharded model cannot run on one rank, while this rank writes its files.")


def shards_at(place: ModuleLocation) -> ModelShards:
    """Return this rank's shards of the module at ``place``, by the module's names."""
    return shards_below(model_shards(place.root), place.prefix)


def state_at(place: ModuleLocation) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the module at ``place`` on the CPU of rank 0; empty on other ranks. Collective."""
    return gathered_state(shards_at(place))


FIX: Final = (
    "Call it on all ranks, outside of `if accelerator.is_main_process:`; only the main process writes the files if "
    "`is_main_process=accelerator.is_main_process` is passed. Or call `state = accelerator.get_state_dict(model)` on "
    "all ranks, and pass state_dict=state on the main process."
)
"""Remedy for a call that only some ranks make."""


def call_name(method: str, model: Any) -> str:
    """Return the name of a call for messages."""
    return f"{method} of {type(unwrapped(model)).__name__}"


def bind_call(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of ``original`` by name, with its defaults."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    call: dict[str, Any] = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    call.pop("kwargs", None)
    return call


def call_on_rank_0(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a library's own method, which writes or uploads a sharded model, on rank 0. Collective.

    Returns:
        Rank 0's result, on all ranks.
    """
    place = None if gathered().paused or gathered().state_of(model) is not None else locate_module(model)
    if place is None:
        return original(*args, **kwargs)
    name = getattr(original, "func", original).__name__
    with collective_call(call_name(name, model), fix="Call it on all ranks; rank 0 writes or uploads the model."):
        with gathered().on_rank_0(place) as writes, on_all_ranks(f"running {name}"):
            result = original(*args, **kwargs) if writes else None
        return gather_objects(result)[0]
