"""Finds the parameters that need no broadcast, because every rank has mapped the same bytes of the same file.

``from_pretrained`` maps safetensors files, so a parameter is mostly a view of a file. If all ranks have the same view,
each of them can take its own shard from it. For each parameter the ranks compare a hash of what it is a view of: the
file's path, size and modification time, and the position in the file. Machines with file systems of their own may have
copies of the file with other times. Then the ranks with the same copy read it once, together, and all ranks compare
hashes of the content.

A page that this process has written to is not a view of the file any more.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_128_digest

from hf_fsdp_plugin.backends.memory_maps import MemoryMaps, has_changed_pages

_MASK = (1 << 62) - 1
"""Of hashes: positive, so that the smallest of all ranks is the negative of the largest negative."""
_NO_VIEW = 0
_NOT_READ = -(1 << 62)
"""Result of a rank for a parameter that another rank with the same file reads. A reduction with MAX ignores it."""


def find_file_weights(model: nn.Module, device: torch.device) -> frozenset[int]:
    """Return the ids of the parameters that all ranks have mapped from equal files.

    Collective: one reduction of four numbers for each parameter; if ranks have copies of a file, two more collectives.

    Args:
        device: where the numbers are reduced.
    """
    parameters = list(model.parameters())
    if not parameters:
        return frozenset()
    views = _views(parameters)
    files = [_hash(*view) if view else _NO_VIEW for view in views]
    copies = [_hash(os.path.basename(view[0]), view[1], *view[3:]) if view else _NO_VIEW for view in views]
    equal = _equal_on_all_ranks([*files, *copies], device)
    is_equal, is_copied = equal[: len(views)], equal[len(views) :]
    compared = [index for index, copied in enumerate(is_copied) if copied and not is_equal[index]]
    if compared:
        contents = _hashes_of_content([parameters[index] for index in compared], files, device)
        for index, equal_content in zip(compared, _equal_on_all_ranks(contents, device), strict=True):
            is_equal[index] = equal_content
    return frozenset(id(parameter) for parameter, found in zip(parameters, is_equal, strict=True) if found)


def _views(parameters: Iterable[torch.Tensor]) -> list[tuple[str, int, int, int, str, str] | None]:
    """Return path, size and time of the file, and offset, dtype and shape, for each view of an unchanged file."""
    maps = MemoryMaps.read(private_bytes=True)
    return [_view(parameter, maps) for parameter in parameters]


def _view(parameter: torch.Tensor, maps: MemoryMaps) -> tuple[str, int, int, int, str, str] | None:
    is_plain = type(parameter.data) is torch.Tensor and parameter.device.type == "cpu"
    region = maps.find(parameter) if is_plain and parameter.is_contiguous() else None
    if region is None or not region.is_file or has_changed_pages(parameter, region):
        return None
    size = modified = 0
    if not region.is_shared_memory:  # whose name is a hash of everything that its content depends on
        try:
            status = os.stat(region.path)
        except OSError:  # the file has been removed
            return None
        size, modified = status.st_size, status.st_mtime_ns
    offset = parameter.data_ptr() - region.start + region.offset
    return region.path, size, modified, offset, str(parameter.dtype), str(list(parameter.shape))


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
