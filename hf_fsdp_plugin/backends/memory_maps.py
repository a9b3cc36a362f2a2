"""The memory mappings of this process, and which memory the parameters of a model are in.

Linux only: read from ``/proc/self`` (``man 5 proc_pid_maps``, ``proc_pid_smaps``). Elsewhere no mappings are known.
"""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

SHARED_NAME = "hf_fsdp"
"""Name of the memory files of :mod:`hf_fsdp_plugin.backends.shared_weights`, which the kernel lists as mappings."""

PAGE_MAP = "/proc/self/pagemap"
_MEMORY_FILE = f"/memfd:{SHARED_NAME}"
_HEADER = r"([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+ *(.*)"
_CHANGED = r"(?:Anonymous|Swap): *(\d+) kB"
"""Of a mapping: its changed pages in memory, and those that were swapped out."""
_LINE = re.compile(rf"^(?:{_HEADER}|{_CHANGED})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One mapping.

    Attributes:
        start, end: addresses; ``end`` is the first address after the mapping.
        path: path of the mapped file; empty for anonymous memory.
        offset: position of ``start`` in the file, in bytes.
        private_bytes: memory that only this process has, among it the changed pages of a file. 0 if it was not read.
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
    def is_shared_memory(self) -> bool:
        """Whether it maps memory that :mod:`hf_fsdp_plugin.backends.shared_weights` shares on this machine."""
        return self.path.startswith(_MEMORY_FILE)


def has_changed_pages(tensor: torch.Tensor, region: Region) -> bool:
    """Return whether a page with the tensor's elements may differ from the mapped file. ``region`` contains it."""
    return bool(region.private_bytes and changed_pages(tensor.data_ptr(), max(tensor.nbytes, 1)))


def changed_pages(address: int, num_bytes: int) -> list[tuple[int, int]]:
    """Return which bytes from ``address`` on may differ from the file that is mapped there, as ranges of whole pages.

    The kernel copies a page of a private mapping when the process writes to it (``man 5 proc_pid_pagemap``).

    Returns:
        start and end of each range, relative to ``address``. The first range may start before it.
    """
    page = mmap.PAGESIZE
    first, last = address // page, (address + num_bytes - 1) // page
    everything = [(first * page - address, (last + 1) * page - address)]
    try:
        with open(PAGE_MAP, "rb", buffering=0) as file:
            entries = np.frombuffer(os.pread(file.fileno(), (last - first + 1) * 8, first * 8), dtype=np.uint64)
    except OSError:
        return everything
    if len(entries) != last - first + 1:
        return everything
    is_present, is_swapped, is_of_file = (entries >> np.uint64(bit) & np.uint64(1) != 0 for bit in (63, 62, 61))
    is_changed = is_swapped | is_present & ~is_of_file
    edges = np.flatnonzero(np.diff(is_changed, prepend=False, append=False)) * page + first * page - address
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class MemoryMaps:
    """All mappings of this process at one moment."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    @classmethod
    def read(cls, *, private_bytes: bool = False) -> MemoryMaps:
        """Read the mappings; with ``private_bytes``, which the kernel counts page by page, from the slower file."""
        try:
            text = Path("/proc/self/smaps" if private_bytes else "/proc/self/maps").read_text(errors="replace")
        except OSError:
            return cls([])
        return cls(_parse(text))

    def find(self, tensor: torch.Tensor) -> Region | None:
        """Return the mapping that contains the whole tensor, or ``None``."""
        storage = tensor.untyped_storage()
        index = bisect_right(self._starts, storage.data_ptr()) - 1
        if index < 0 or storage.data_ptr() + storage.nbytes() > self._regions[index].end:
            return None
        return self._regions[index]


def _parse(text: str) -> list[Region]:
    regions: list[Region] = []
    for start, end, offset, path, kilobytes in _LINE.findall(text):
        if start:
            regions.append(Region(start=int(start, 16), end=int(end, 16), path=path, offset=int(offset, 16)))
        elif kilobytes != "0":
            regions[-1] = replace(regions[-1], private_bytes=regions[-1].private_bytes + int(kilobytes) * 1024)
    return regions


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


def parameter_memory(parameters: Iterable[torch.Tensor], maps: MemoryMaps | None = None) -> ParameterMemory:
    """Read off the addresses of the parameters which memory they are in. No collectives.

    Args:
        maps: the mappings with their private bytes, if they have been read.
    """
    maps = maps or MemoryMaps.read(private_bytes=True)
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
