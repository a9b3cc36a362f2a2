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

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.names import (
    FSDP_MODEL,
    HF_MODEL,
    OPTIMIZER,
    index_file,
    numbered,
    numbered_from_one,
    safetensors_file,
)
from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard
from hf_fsdp_plugin.checkpoint.shards import ModelShards, OptimizerShards, shards_to_write
from hf_fsdp_plugin.checkpoint.writing.chunk_tables import FolderEntries, StatePath
from hf_fsdp_plugin.checkpoint.writing.dcp import plain_value, rank_file, scalars
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart
from hf_fsdp_plugin.checkpoint.writing.safetensors_files import MAX_SHARD_SIZE, full_files
from hf_fsdp_plugin.spec.model import StateDictKind


@dataclass(frozen=True, slots=True)
class StateFiles:
    """This rank's part of a model's or an optimizer's files.

    Attributes:
        texts: (name, contents) of the small files that rank 0 adds.
    """

    parts: list[FilePart]
    entries: tuple[FolderEntries, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


def model_files(
    shards: ModelShards, kind: StateDictKind, index: int = 0, *, max_shard_size: int = MAX_SHARD_SIZE
) -> StateFiles:
    """Return this rank's part of the files of model ``index``."""
    rank = dist.get_rank()
    if kind == "full":
        return whole_files(shards, numbered_from_one(HF_MODEL, index), max_shard_size=max_shard_size)
    tensors: list[tuple[StatePath, LocalShard]] = [
        (("model", shard.name), shard) for shard in shards_to_write(shards.tensors) if shard.shape
    ]
    smalls = scalars({("model", shard.name): shard.pieces[0].tensor for shard in shards.tensors if not shard.shape})
    aliases: list[tuple[StatePath, StatePath]] = [
        (("model", alias), ("model", name)) for alias, name in shards.aliases.items()
    ]
    part, entries = rank_file(numbered(FSDP_MODEL, index), rank, tensors, smalls, aliases)
    return StateFiles([part], (entries,))


def whole_files(shards: ModelShards, stem: str, *, max_shard_size: int = MAX_SHARD_SIZE) -> StateFiles:
    """Return this rank's part of the safetensors files ``STEM`` with whole tensors."""
    parts, index_text = full_files(shards.tensors, dist.get_rank(), stem=stem, max_shard_size=max_shard_size)
    return StateFiles(parts, texts=((index_file(safetensors_file(stem)), index_text),) if index_text else ())


def optimizer_files(shards: OptimizerShards, index: int = 0) -> StateFiles:
    """Return this rank's part of the files of optimizer ``index``."""
    rank = dist.get_rank()
    tensors: dict[str, tuple[StatePath, LocalShard]] = {}
    smalls = []
    numbers: dict[StatePath, torch.Tensor] = {}
    for name, state in shards.state.items():
        for key, value in state.items():
            path_in_state: StatePath = ("optimizer", "state", name, key)
            if not isinstance(value, LocalShard):
                smalls.append(plain_value(path_in_state, value))
            elif not value.shape:
                numbers[path_in_state] = value.pieces[0].tensor
            else:
                tensors[value.name] = (path_in_state, value)
    smalls += scalars(numbers)
    mine = shards_to_write(shard for _, shard in tensors.values())
    if rank == 0:  # one entry per hyperparameter, because torch flattens a state dict to its leaves
        smalls += [
            plain_value(("optimizer", "param_groups", number, key), value)
            for number, group in enumerate(shards.groups)
            for key, value in group.items()
        ]
    part, entries = rank_file(numbered(OPTIMIZER, index), rank, [tensors[shard.name] for shard in mine], smalls)
    return StateFiles([part], (entries,))
