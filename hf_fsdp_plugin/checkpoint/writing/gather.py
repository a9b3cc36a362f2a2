"""Gathers whole state dicts in the memory of rank 0, for callers that need tensors instead of files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, slices, whole
from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard
from hf_fsdp_plugin.checkpoint.shards import ModelShards, shards_to_write
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names

_BATCH_BYTES: Final = 1 << 30
"""Size of the whole tensors that are gathered at once."""
_LARGE: Final = 32 << 30
"""Bytes from which the ranks wait for about a minute or longer: gloo sends 1 to 3 GB per second to one rank."""
_Piece = tuple[str, Box, torch.Tensor]


def gathered_state(shards: ModelShards) -> dict[str, torch.Tensor]:
    """Return whole tensors by name, on the CPU of rank 0; empty on other ranks. Collective.

    Each byte is sent once, to rank 0, in batches of ``_BATCH_BYTES``. Names of a tied weight share one tensor.
    """
    state: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    mine = {shard.name for shard in shards_to_write(shards.tensors)}
    _note_size(sum(_whole_bytes(shard) for shard in shards.tensors))
    for batch in _batches(shards.tensors):
        pieces = [
            (shard.name, piece.box, piece.tensor.detach().cpu().contiguous())
            for shard in batch
            if shard.name in mine
            for piece in shard.pieces
        ]
        if (gathered := _on_rank_0(pieces)) is not None:
            _place(state, batch, gathered, missing)
    incomplete = [name for name, count in missing.items() if count]
    assert not incomplete, f"elements of {format_names(incomplete)} are missing"
    state.update({alias: state[name] for alias, name in shards.aliases.items() if name in state})
    return state


def _note_size(num_bytes: int) -> None:
    """Name the faster way to whole tensors if these are many. Printed by rank 0."""
    if num_bytes >= _LARGE and dist.get_world_size() > 1:
        message = f"{num_bytes / 1e9:.0f} GB are gathered in the memory of rank 0, while all other ranks wait."
        fix = "Save a checkpoint of the type sharded instead, and run `hf-fsdp merge` on it, or `hf-fsdp export`."
        print_once(Problem(code="FSDP-N407", message=message, fix=fix))


def _whole_bytes(shard: LocalShard) -> int:
    return math.prod(shard.shape) * shard.dtype.itemsize


def _batches(shards: Sequence[LocalShard]) -> Iterator[list[LocalShard]]:
    """Divide tensors into batches of about ``_BATCH_BYTES`` of whole tensors, with the same result on every rank."""
    batch: list[LocalShard] = []
    size = 0
    for shard in shards:
        batch.append(shard)
        size += _whole_bytes(shard)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _on_rank_0(pieces: list[_Piece]) -> list[_Piece] | None:
    """Return the pieces of all ranks on rank 0, ``None`` on the others. Collective."""
    rank = dist.get_rank()
    gathered: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(pieces, gathered)
    return None if gathered is None else [piece for theirs in gathered for piece in theirs]


def _place(
    state: dict[str, torch.Tensor], batch: Sequence[LocalShard], pieces: Sequence[_Piece], missing: dict[str, int]
) -> None:
    """Copy the pieces of one batch to whole tensors in ``state``, and subtract them from the ``missing`` elements."""
    for shard in batch:
        state[shard.name] = torch.empty(shard.shape, dtype=shard.dtype, device="cpu")
        missing[shard.name] = math.prod(shard.shape)
    for name, box, tensor in pieces:
        state[name][slices(box, whole(state[name].shape))] = tensor
        missing[name] -= box.numel
