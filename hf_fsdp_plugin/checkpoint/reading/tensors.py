"""Loads a second set of a model's tensors, such as its moving average, from the safetensors files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.formats.boxes import slices, whole
from hf_fsdp_plugin.checkpoint.formats.full import read_model
from hf_fsdp_plugin.checkpoint.names import index_file, safetensors_file
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import fill, transfers
from hf_fsdp_plugin.checkpoint.shards import ModelShards
from hf_fsdp_plugin.checkpoint.visibility import check_visible
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.text import format_names


def load_tensors(shards: ModelShards, checkpoint: Path, stem: str, *, verify: bool = True) -> bool:
    """Fill ``shards`` from ``STEM.safetensors``, or from the files that its index lists. Collective.

    Returns:
        Whether the checkpoint has these files. If not, nothing was loaded.

    Raises:
        CheckpointError: the tensors are not those of the shards, and nothing was loaded; or bytes are damaged.
    """
    name = safetensors_file(stem)
    if not broadcast_object((checkpoint / name).exists() or (checkpoint / index_file(name)).exists()):
        return False
    with on_all_ranks(f"reading {checkpoint}"):
        check_visible(checkpoint, "reads")
        stored = read_model(checkpoint, name)
        assert stored is not None, "rank 0 has found the file, and all ranks see the same folder"
        files = files_of_checkpoint(checkpoint, stored, verify=verify)
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())
        names = shards.names()
        found = {own: next((n for n in known if n in stored.tensors), None) for own, known in names.items()}
        pairs = [(shard, stored.tensors[at]) for shard in shards.tensors if (at := found[shard.name]) is not None]
        known = {name for each in names.values() for name in each}
        shapes = {held.name: (held.shape, tensor.shape) for held, tensor in pairs if held.shape != tensor.shape}
        problems = [
            *mismatch.missing_tensors(checkpoint / name, [own for own, at in found.items() if at is None]),
            *mismatch.unexpected_tensors(checkpoint / name, [at for at in stored.tensors if at not in known]),
            *mismatch.different_shapes(checkpoint / name, shapes),
        ]
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"), files:
        fill(files, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return True


@torch.no_grad()
def copy_whole_tensors(state: Mapping[str, Any], shards: ModelShards) -> None:
    """Copy this rank's parts of whole tensors to its shards. No communication.

    Raises:
        ValueError: a tensor is missing or has another shape. Nothing was copied.
    """
    found: dict[str, Any] = {
        own: next((state[name] for name in known if name in state), None) for own, known in shards.names().items()
    }
    shapes = {own: getattr(tensor, "shape", None) for own, tensor in found.items()}
    wrong = [shard.name for shard in shards.tensors if shapes[shard.name] != shard.shape]
    if wrong:
        raise ValueError(f"the state_dict has no tensors with the names and shapes of {format_names(wrong, 3)}.")
    for shard in shards.tensors:
        for piece in shard.pieces:
            piece.tensor.copy_(found[shard.name][slices(piece.box, whole(shard.shape))])
