"""Which parameters are unchanged views of mapped files, and which file that is.

The identity of a file is what all ranks with the same file have in common: its path, size and modification time. Of a
file of the Hugging Face cache, whose name is the hash of its content, it is name and size, because each machine may
have downloaded it. A view that this process has written to counts as changed.

Linux only: the kernel lists the mapped files in ``/proc/self/maps``, and in ``/proc/self/pagemap`` which of their pages
this process has copied to write to them (``man 5 proc_pid_pagemap``). Elsewhere no views are known.
"""

from __future__ import annotations

import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from hf_fsdp_plugin.torch_private.modules import local_tensor

_MAPPED_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)
_HASH_OF_CONTENT = re.compile("[0-9a-f]{64}")
_PAGE_OF_FILE, _PAGE_IN_USE = 61, 62
"""Bits of a page in ``/proc/self/pagemap``: whether it belongs to a file, and (62 and 63) whether it is in memory or
swapped out. A page of a mapped file that is in use without belonging to the file is a changed copy."""


class MappedFiles:
    """The files that this process has mapped at one moment."""

    def __init__(self) -> None:
        try:
            with open("/proc/self/maps", errors="replace") as file:
                found = _MAPPED_FILE.findall(file.read())
        except OSError:
            found = []
        self._regions = [(int(start, 16), int(end, 16), int(offset, 16), path) for start, end, offset, path in found]

    def view(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the path and the position in bytes of what a tensor is an unchanged, contiguous view of, if any."""
        if not is_plain_on_cpu(tensor) or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._regions, address, key=lambda region: region[0]) - 1
        if index < 0 or address + tensor.nbytes > self._regions[index][1] or _is_changed(address, tensor.nbytes):
            return None
        start, _, offset, path = self._regions[index]
        return path, address - start + offset


def _is_changed(address: int, num_bytes: int) -> bool:
    """Return whether this process has written to a part of a mapped file."""
    first, last = address // mmap.PAGESIZE, (address + max(num_bytes, 1) - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(first * 8)
            pages = numpy.frombuffer(file.read((last - first + 1) * 8), dtype=numpy.uint64)
    except OSError:
        return True
    of_file = (pages >> numpy.uint64(_PAGE_OF_FILE)) & numpy.uint64(1)
    return len(pages) == 0 or bool(((pages >> numpy.uint64(_PAGE_IN_USE) != 0) & (of_file == 0)).any())


@dataclass(kw_only=True, slots=True)
class ParameterMemory:
    """Which memory the parameters of a model are in on one rank. Tied parameters count once.

    Attributes:
        num_mapped: number of parameters that are unchanged views of a mapped file.
        num_private: number of parameters in memory of this process alone.
        num_on_meta: number of parameters on the meta device.
        private_bytes: host memory of this process alone.
    """

    num_mapped: int = 0
    num_private: int = 0
    num_on_meta: int = 0
    private_bytes: int = 0


def parameter_memory(parameters: Iterable[torch.Tensor]) -> ParameterMemory:
    """Read off the addresses of the parameters which memory they are in. No collectives."""
    files, memory = MappedFiles(), ParameterMemory()
    for parameter in {id(parameter): local_tensor(parameter) for parameter in parameters}.values():
        if parameter.is_meta:
            memory.num_on_meta += 1
        elif files.view(parameter) is not None:
            memory.num_mapped += 1
        elif parameter.device.type == "cpu":
            memory.num_private += 1
            memory.private_bytes += parameter.nbytes
    return memory


def file_identity(path: str) -> tuple[Any, ...] | None:
    """Return what all ranks with the same file have in common; ``None`` if it has been removed or replaced.

    The kernel adds "(deleted)" to the path of such a file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    name = os.path.basename(path)
    return (name, status.st_size) if _HASH_OF_CONTENT.fullmatch(name) else (path, status.st_size, status.st_mtime_ns)


def is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the data of a tensor or parameter is an ordinary tensor in host memory."""
    return type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"
