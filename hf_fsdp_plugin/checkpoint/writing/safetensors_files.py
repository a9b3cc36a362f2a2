"""Safetensors files with whole tensors, which all ranks write together.

A safetensors file is a header and the tensors' bytes in row-major order. So the offsets of every shard are known before
anything is written: each rank writes its own byte ranges, and no rank gathers the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import index_text, plan_files
from hf_fsdp_plugin.checkpoint.names import HF_MODEL
from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard
from hf_fsdp_plugin.checkpoint.shards import shards_to_write
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, shared_file

MAX_SHARD_SIZE = 50 * 10**9
"""Maximum number of bytes of tensors in one safetensors file; the default of Transformers 5."""


def full_files(
    tensors: Sequence[LocalShard], rank: int, *, stem: str = HF_MODEL, max_shard_size: int = MAX_SHARD_SIZE
) -> tuple[list[FilePart], str | None]:
    """Return this rank's parts of the Hugging Face files of ``tensors``, and the text of the index for several files.

    All ranks pass the same tensors in the same order. Rank 0 adds the headers.
    """
    files = plan_files([(shard.name, shard.dtype_name, shard.shape) for shard in tensors], max_shard_size, stem)
    mine = shards_to_write(tensors)
    parts = []
    for file in files:
        items = [Item(0, (file.header,))] if rank == 0 else []
        for shard in mine:
            if shard.name in file.offsets:
                items += _runs(shard, file.offsets[shard.name])
        parts.append(shared_file(file.name, file.size, items))
    return parts, index_text(files)


def _runs(shard: LocalShard, begin: int) -> Iterator[Item]:
    """Yield the contiguous byte ranges of the shard in the file. The whole tensor begins at ``begin`` in the file."""
    strides = row_major(shard.shape)
    for piece in shard.pieces:
        dim = _first_contiguous_dim(piece.box, shard.shape)
        for index in itertools.product(*(range(size) for size in piece.box.sizes[:dim])):
            place = [*piece.box.offsets]
            for number, offset in enumerate(index):
                place[number] += offset
            element = sum(offset * stride for offset, stride in zip(place, strides, strict=True))
            yield Item(begin + element * shard.dtype.itemsize, (piece.tensor[index],), name=shard.name)


def _first_contiguous_dim(box: Box, shape: tuple[int, ...]) -> int:
    """Return the first dim from which the box is contiguous in the whole tensor, at fixed indices of earlier dims."""
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)
