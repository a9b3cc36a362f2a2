"""Which memory the parameters of a model are in, and which of them all ranks have mapped from equal files.

``from_pretrained`` maps safetensors files, so a parameter is mostly a view of a file. If all ranks have the same view,
each of them can take its own shard from it, and no broadcast is needed. For each parameter the ranks compare a hash of
what it is a view of: the file's path, size and modification time, and the position in the file. Machines with file
systems of their own may have copies of the file with other times. Then the ranks with the same copy read it once,
together, and all ranks compare hashes of the content. A mapping that this process has written to counts as changed.

Linux only: the mappings are read from ``/proc/self/smaps`` (``man 5 proc_pid_smaps``). Elsewhere none are known.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_128_digest

SHARED_NAME = "hf_fsdp"
"""Name of the memory files of :mod:`hf_fsdp_plugin.backends.loading.shared_weights`, which the kernel lists."""
_MEMORY_FILE = f"/memfd:{SHARED_NAME}"
_HEADER = r"([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+ *(.*)"
_CHANGED = r"(?:Anonymous|Swap): *(\d+) kB"
"""Of a mapping: its changed pages in memory, and those that were swapped out."""
_LINE = re.compile(rf"^(?:{_HEADER}|{_CHANGED})$", re.MULTILINE)
_MASK = (1 << 62) - 1
"""Of hashes: positive, so that the smallest of all ranks is the negative of the largest negative."""
_NO_VIEW = 0
_NOT_READ = -(1 << 62)
"""Result of a rank for a parameter that another rank with the same file reads. A reduction with MAX ignores it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One mapping.

    Attributes:
        start, end: addresses; ``end`` is the first address after the mapping.
        path: path of the mapped file; empty for anonymous memory.
        offset: position of ``start`` in the file, in bytes.
        private_bytes: memory that only this process has, among it the changed pages of a file.
    """

    start: int
    end: int
    path: str
    offset: int
    private_bytes: int = 0

    @property
    def is_file(self) -> bool:
        return self.path.startswith("/")

    @property
    def is_unchanged_file(self) -> bool:
        return self.is_file and not self.private_bytes

    @property
    def is_shared_memory(self) -> bool:
        """Whether it maps memory that :mod:`hf_fsdp_plugin.backends.loading.shared_weights` shares on this machine."""
        return self.path.startswith(_MEMORY_FILE)


class MemoryMaps:
    """All mappings of this process at one moment."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    @classmethod
    def read(cls) -> MemoryMaps:
        try:
            text = Path("/proc/self/smaps").read_text(errors="replace")
        except OSError:
            return cls([])
        regions: list[Region] = []
        for start, end, offset, path, kilobytes in _LINE.findall(text):
            if start:
                regions.append(Region(start=int(start, 16), end=int(end, 16), path=path, offset=int(offset, 16)))
            elif kilobytes != "0":
                regions[-1] = replace(regions[-1], private_bytes=regions[-1].private_bytes + int(kilobytes) * 1024)
        return cls(regions)

    def find(self, tensor: torch.Tensor) -> Region | None:
        """Return the mapping that contains the whole tensor, or ``None``."""
        storage = tensor.untyped_storage()
        index = bisect_right(self._starts, storage.data_ptr()) - 1
        if index < 0 or storage.data_ptr() + storage.nbytes() > self._regions[index].end:
            return None
        return self._regions[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterMemory:
    """Which memory the parameters of a model are in on one rank. Tied parameters count once.

    Attributes:
        num_mapped: number of parameters that are views of a mapped file.
        num_shared: number of parameters in memory that the ranks of a machine share.
        num_private: number of parameters in memory of this process alone.
        num_on_meta: number of parameters on the meta device.
        num_on_device: number of parameters on an accelerator.
        private_bytes: host memory of this process alone, among it the changed pages of mapped files.
        total_bytes: bytes of all parameters.
    """

    num_mapped: int = 0
    num_shared: int = 0
    num_private: int = 0
    num_on_meta: int = 0
    num_on_device: int = 0
    private_bytes: int = 0
    total_bytes: int = 0

    @property
    def num_not_private(self) -> int:
        """Number of parameters that need no host memory of this process alone."""
        return self.num_mapped + self.num_shared + self.num_on_meta


def parameter_memory(parameters: Iterable[torch.Tensor]) -> ParameterMemory:
    """Read off the addresses of the parameters which memory they are in. No collectives."""
    maps = MemoryMaps.read()
    counts = dict.fromkeys(("mapped", "shared", "private", "on_meta", "on_device"), 0)
    touched: dict[int, Region] = {}
    private_bytes = total_bytes = 0
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        num_bytes = parameter.numel() * parameter.element_size()
        total_bytes += num_bytes
        if parameter.device.type != "cpu":
            counts["on_meta" if parameter.is_meta else "on_device"] += 1
            continue
        region = maps.find(parameter)
        if region is None or not region.is_file:
            counts["private"] += 1
            private_bytes += num_bytes
            continue
        counts["shared" if region.is_shared_memory else "mapped"] += 1
        touched[region.start] = region
    private_bytes += sum(region.private_bytes for region in touched.values())
    return ParameterMemory(
        **{f"num_{kind}": count for kind, count in counts.items()},
        private_bytes=min(private_bytes, total_bytes),
        total_bytes=total_bytes,
    )


def find_mapped_parameters(model: nn.Module, device: torch.device) -> set[int]:
    """Return the ids of the parameters that all ranks have mapped from equal files.

    Collective: one reduction of four numbers for each parameter; if ranks have copies of a file, two more collectives.

    Args:
        device: where the numbers are reduced.
    """
    parameters = list(model.parameters())
    if not parameters:
        return set()
    maps = MemoryMaps.read()
    file_status = cache(_status)
    files, copies = [], []
    for parameter in parameters:
        is_plain = type(parameter.data) is torch.Tensor and parameter.device.type == "cpu"
        region = maps.find(parameter) if is_plain and parameter.is_contiguous() else None
        status = None
        if region is not None and region.is_unchanged_file:
            # The name of shared memory depends on its content.
            status = (0, 0) if region.is_shared_memory else file_status(region.path)
        if region is None or status is None:
            files.append(_NO_VIEW)
            copies.append(_NO_VIEW)
            continue
        (size, modified), offset = status, parameter.data_ptr() - region.start + region.offset
        form = str(parameter.dtype), str(list(parameter.shape))
        files.append(_hash(region.path, size, modified, offset, *form))
        copies.append(_hash(os.path.basename(region.path), size, offset, *form))
    equal = _equal_on_all_ranks([*files, *copies], device)
    is_equal, is_copied = equal[: len(files)], equal[len(files) :]
    compared = [index for index, copied in enumerate(is_copied) if copied and not is_equal[index]]
    if compared:
        contents = _hashes_of_content([parameters[index] for index in compared], files, device)
        for index, equal_content in zip(compared, _equal_on_all_ranks(contents, device), strict=True):
            is_equal[index] = equal_content
    return {id(parameter) for parameter, found in zip(parameters, is_equal, strict=True) if found}


def _status(path: str) -> tuple[int, int] | None:
    """Return size and modification time of a file; ``None`` if it has been removed or replaced.

    The kernel adds "(deleted)" to the path of such a file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


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
        _hash(xxh3_128_digest(parameter.detach().reshape(-1).view(torch.uint8).numpy().data))
        if number % count == index
        else _NOT_READ
        for number, parameter in enumerate(parameters)
    ]


def _equal_on_all_ranks(values: Sequence[int], device: torch.device) -> list[bool]:
    """Return for each value whether all ranks that have read it have the same. Collective."""
    negatives = [value if value == _NOT_READ else -value for value in values]
    extremes = torch.tensor([values, negatives], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return [highest == -lowest != _NO_VIEW for highest, lowest in zip(*extremes.tolist(), strict=True)]
