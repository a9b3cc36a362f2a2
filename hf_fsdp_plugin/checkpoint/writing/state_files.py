"""Maps model and optimizer state to the files that Accelerate and the Trainer read.

The file names are those of Accelerate and Transformers, so that their tools can read these checkpoints:

===========  ==============================================  ==========================================
state dict   model                                           optimizer
===========  ==============================================  ==========================================
``sharded``  ``pytorch_model_fsdp_0/``, DCP format           ``optimizer_0/``, DCP format
``full``     ``model.safetensors`` (and its index), as       ``optimizer_0/``, DCP format: no reader
             ``from_pretrained`` reads it                    needs it in one file
``local``    as ``sharded``                                  as ``sharded``
===========  ==============================================  ==========================================

Each rank writes its own shards. No communication.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.formats.boxes import relative_slices, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.formats.safetensors import index_text, plan_files
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StatePath
from hf_fsdp_plugin.checkpoint.saved_state import (
    LocalShard,
    ModelShards,
    OptimizerShards,
    model_shards,
    shards_to_write,
)
from hf_fsdp_plugin.checkpoint.writing.dcp_files import StateFiles, rank_file
from hf_fsdp_plugin.checkpoint.writing.file_parts import Item, shared_file, whole_file
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind
from hf_fsdp_plugin.version import __version__

MAX_SHARD_SIZE = 50 * 10**9
"""Maximum number of bytes of tensors in one safetensors file; the default of Transformers 5."""


def model_files(
    shards: ModelShards, kind: StateDictKind, index: int = 0, *, max_shard_size: int = MAX_SHARD_SIZE
) -> StateFiles:
    """Return this rank's part of the files of model ``index``. To whole files, rank 0 adds headers and index."""
    if kind != "full":
        return sharded_model_files(shards, index, dist.get_rank())
    stem = file_names.numbered_from_one(file_names.HF_MODEL, index)
    tensors, is_first = shards.tensors, dist.get_rank() == 0
    files = plan_files([(shard.name, shard.dtype_name, shard.shape) for shard in tensors], max_shard_size, stem)
    mine = shards_to_write(tensors)
    parts = []
    for file in files:
        items = [Item(0, (file.header,))] if is_first else []
        for shard in mine:
            if shard.name in file.offsets:
                items += _runs(shard, file.offsets[shard.name])
        parts.append(shared_file(file.name, file.size, items))
    if is_first and (text := index_text(files)) is not None:
        name = file_names.index_file(file_names.safetensors_file(stem))
        parts.append(whole_file(name, [Item(0, (text.encode(),))]))
    return StateFiles(parts)


def _runs(shard: LocalShard, begin: int) -> Iterator[Item]:
    """Yield the contiguous byte ranges of the shard in the file. The whole tensor begins at ``begin`` in the file."""
    strides = row_major(shard.shape)
    for piece in shard.pieces:
        offsets, sizes = piece.box.offsets, piece.box.sizes
        # From the last dim that is not whole, the box is contiguous in the tensor, at fixed indices of earlier dims.
        dim = max((dim for dim, size in enumerate(sizes) if size != shard.shape[dim]), default=0)
        for index in itertools.product(*(range(size) for size in sizes[:dim])):
            place = itertools.zip_longest(offsets, index, strides, fillvalue=0)
            element = sum((offset + number) * stride for offset, number, stride in place)
            yield Item(begin + element * shard.dtype.itemsize, (piece.tensor[index],), name=shard.name)


def sharded_model_files(shards: ModelShards, index: int, rank: int) -> StateFiles:
    """Return the part of a rank of the folder with the shards of model ``index``."""
    tensors = [(("model", shard.name), shard) for shard in shards.tensors]
    aliases = [(("model", alias), ("model", name)) for alias, name in shards.aliases.items()]
    return rank_file(file_names.numbered_name(file_names.FSDP_MODEL, index), tensors, {}, aliases, rank)


def optimizer_files(shards: OptimizerShards, index: int = 0, rank: int | None = None) -> StateFiles:
    """Return the part of a rank of the files of optimizer ``index``; by default, of this rank."""
    rank = dist.get_rank() if rank is None else rank
    tensors: list[tuple[StatePath, LocalShard]] = []
    values: dict[StatePath, Any] = {}
    for name, state in shards.state.items():
        for key, value in state.items():
            path: StatePath = ("optimizer", "state", name, key)
            if isinstance(value, LocalShard):
                tensors.append((path, value))
            else:
                values[path] = value
    if rank == 0:  # one entry per hyperparameter, because torch flattens a state dict to its leaves
        for number, group in enumerate(shards.groups):
            values |= {("optimizer", "param_groups", number, key): value for key, value in group.items()}
    return rank_file(file_names.numbered_name(file_names.OPTIMIZER, index), tensors, values, [], rank)


def manifest_of(
    model: nn.Module,
    kind: StateDictKind,
    *,
    adapter_only: bool = False,
    parameters: ModelShards | None = None,
    **facts: Any,
) -> Manifest:
    """Return the manifest for ``model``, which must have a plan. ``files`` is empty. No communication.

    Args:
        facts: the fields of the manifest that the training decides: ``step``, ``batch``, ``run``.
        parameters: the result of ``parameter_shards``, if there is one already.
        adapter_only: the checkpoint contains the parameters that are trained, and not those of the base model.
    """
    plan = plan_of(model)
    assert plan is not None, "models without a plan are saved by Accelerate"
    shards = model_shards(model, parameters, only_trained=adapter_only)
    listed = {shard.name: (shard.dtype_name, shard.shape) for shard in shards.tensors}
    listed |= {alias: listed[name] for alias, name in shards.aliases.items()}
    return Manifest(
        kind=kind,
        backend=plan.backend,
        world_size=dist.get_world_size(),
        mesh=plan.mesh.axes(),
        strategy=plan.strategy,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        settings={name: value for name, value in plan.settings() if not name.startswith("launch.")},
        parameters=listed,
        ties=tuple(tuple(group) for group in shards.names().values() if len(group) > 1),
        files=(),
        **facts,
    )


@functools.cache
def _versions() -> dict[str, str]:
    return {"hf_fsdp_plugin": __version__, **{name: version(name) for name in ("torch", "transformers", "accelerate")}}


_BATCH_BYTES: Final = 1 << 30
"""Size of the whole tensors that are gathered at once."""
_LARGE: Final = 32 << 30
"""Bytes from which the ranks wait for about a minute or longer: gloo sends 1 to 3 GB per second to one rank."""


def gathered_state(shards: ModelShards) -> dict[str, torch.Tensor]:
    """Return whole tensors by name, on the CPU of rank 0; empty on other ranks. Collective.

    Each byte is sent once, to rank 0, in batches of ``_BATCH_BYTES``. Names of a tied weight share one tensor.
    """
    state: dict[str, torch.Tensor] = {}
    mine = {shard.name for shard in shards_to_write(shards.tensors)}
    _note_size(sum(_whole_bytes(shard) for shard in shards.tensors))
    is_first = dist.get_rank() == 0
    for batch in _batches(shards.tensors):
        pieces = [
            (shard.name, piece.box, piece.tensor.detach().cpu().contiguous())
            for shard in batch
            if shard.name in mine
            for piece in shard.pieces
        ]
        gathered: list[Any] = [[]] * dist.get_world_size()
        dist.gather_object(pieces, gathered if is_first else None)
        if is_first:
            state |= {shard.name: torch.empty(shard.shape, dtype=shard.dtype, device="cpu") for shard in batch}
            all_pieces = [*itertools.chain.from_iterable(gathered)]
            for name, box, tensor in all_pieces:
                state[name][relative_slices(box, whole_box(state[name].shape))] = tensor
            num_elements = sum(math.prod(shard.shape) for shard in batch)
            assert sum(box.numel for _, box, _ in all_pieces) == num_elements, "every element is on one rank"
    return state | {alias: state[name] for alias, name in shards.aliases.items() if name in state}


def _note_size(num_bytes: int) -> None:
    """Print that whole tensors of this size are slow to gather, and the faster way to get them, on rank 0."""
    if num_bytes >= _LARGE and dist.get_world_size() > 1:
        message = f"{num_bytes / 1e9:.0f} GB are gathered in the memory of rank 0, while all other ranks wait."
        fix = "Save a checkpoint of the type sharded instead, and run `hf-fsdp merge` on it, or `hf-fsdp export`."
        print_once(Problem(code="FSDP-N407", message=message, fix=fix))


def _whole_bytes(shard: LocalShard) -> int:
    return math.prod(shard.shape) * shard.dtype.itemsize


def _batches(shards: Sequence[LocalShard]) -> Iterator[list[LocalShard]]:
    """Divide tensors into batches of about ``_BATCH_BYTES`` of whole tensors, with the same result on every rank."""
    ends = itertools.accumulate(map(_whole_bytes, shards))
    numbered = zip((end // _BATCH_BYTES for end in ends), shards, strict=True)
    for _, batch in itertools.groupby(numbered, key=lambda pair: pair[0]):
        yield [shard for _, shard in batch]
