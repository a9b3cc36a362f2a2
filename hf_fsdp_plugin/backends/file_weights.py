"""Finds the parameters that need no broadcast, because every rank has mapped the same bytes of the same file.

``from_pretrained`` maps safetensors files, so a parameter is mostly a view of a file. If all ranks have the same view,
each of them can take its own shard from it. For each parameter the ranks compare a hash of what it is a view of: the
file's path, size and modification time, and the position in the file. Machines with file systems of their own may have
copies of the file with other times. Then the ranks with the same copy read it once, together, and all ranks compare
hashes of the content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_128_digest

from hf_fsdp_plugin.backends.file_views import FileView, file_views
from hf_fsdp_plugin.backends.memory_maps import MemoryMaps

_MASK = (1 << 62) - 1
"""Of hashes: positive, so that the smallest of all ranks is the negative of the largest negative."""
_NO_VIEW = 0
_NOT_READ = -(1 << 62)
"""Result of a rank for a parameter that another rank with the same file reads. A reduction with MAX ignores it."""


def find_file_weights(model: nn.Module, device: torch.device, maps: MemoryMaps) -> dict[int, FileView]:
    """Return the ids of the parameters that all ranks have mapped from equal files, and their views.

    Collective: one reduction of four numbers for each parameter; if ranks have copies of a file, two more collectives.

    Args:
        device: where the numbers are reduced.
        maps: the mappings of this process with their private bytes.
    """
    parameters = list(model.parameters())
    if not parameters:
        return {}
    views = file_views(parameters, maps)
    files = [
        _hash(view.path, view.size, view.modified, view.offset, *view.form) if view else _NO_VIEW for view in views
    ]
    copies = [
        _hash(os.path.basename(view.path), view.size, view.offset, *view.form) if view else _NO_VIEW for view in views
    ]
    equal = _equal_on_all_ranks([*files, *copies], device)
    is_equal, is_copied = equal[: len(views)], equal[len(views) :]
    compared = [index for index, copied in enumerate(is_copied) if copied and not is_equal[index]]
    if compared:
        contents = _hashes_of_content([parameters[index] for index in compared], files, device)
        for index, equal_content in zip(compared, _equal_on_all_ranks(contents, device), strict=True):
            is_equal[index] = equal_content
    return {
        id(parameter): view
        for parameter, view, found in zip(parameters, views, is_equal, strict=True)
        if found and view is not None
    }


def _hash(*content: object) -> int:
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return max(int.from_bytes(digest, "little") & _MASK, _NO_VIEW + 1)


def _hashes_of_content(parameters: Sequence[torch.Tensor], files: Sequence[int], device: torch.device) -> list[int]:
    """Return a hash of each parameter that this rank has to read. Collective.

    Args:
        files: what all parameters of this rank are views of. Ranks with the same files share the work.
    """
    own = torch.tensor([_hash(*files)], dtype=torch.int64, device=device)
    of_ranks = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(of_ranks, own)
    readers = torch.nonzero(of_ranks == own).view(-1).tolist()
    index, count = readers.index(dist.get_rank()), len(readers)
    return [
        _hash(xxh3_128_digest(_bytes_of(parameter))) if number % count == index else _NOT_READ
        for number, parameter in enumerate(parameters)
    ]


def _bytes_of(parameter: torch.Tensor) -> Any:
    return parameter.detach().reshape(-1).view(torch.uint8).numpy().data


def _equal_on_all_ranks(values: Sequence[int], device: torch.device) -> list[bool]:
    """Return for each value whether all ranks that have read it have the same. Collective."""
    negatives = [value if value == _NOT_READ else -value for value in values]
    extremes = torch.tensor([values, negatives], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return [highest == -lowest != _NO_VIEW for highest, lowest in zip(*extremes.tolist(), strict=True)]
