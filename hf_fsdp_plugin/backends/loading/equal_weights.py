"""Which memory the parameters of a model are in, and which weights are equal on all ranks.

The bits of tensors are compared by their hashes and sums. Parameters that are views of files need not be read for this.
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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_128_digest

from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.modules import local_tensor

SHARED_NAME = "hf_fsdp"
"""Name of the memory files of :mod:`hf_fsdp_plugin.backends.loading.shared_weights`, which the kernel lists."""
_MEMORY_FILE = f"/memfd:{SHARED_NAME}"
_HEADER = r"([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+ *(.*)"
_CHANGED = r"(?:Anonymous|Swap): *(\d+) kB"
"""Lines about a mapping: the size of its changed pages in memory, and of those that were swapped out."""
_LINE = re.compile(rf"^(?:{_HEADER}|{_CHANGED})$", re.MULTILINE)
_MASK = (1 << 62) - 1
"""Makes hashes positive, so that a reduction with MAX of the negated hashes returns the smallest hash of all ranks."""
_NO_VIEW = 0
_NOT_READ = -(1 << 62)
"""Result of a rank for a parameter that another rank with the same file reads. A reduction with MAX ignores it."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type with the same size."""
SUM_MODULUS = 1 << 32
"""Sums of bits are modulo this number: torch adds 4-byte integers to 4 bytes without a copy, but not to 8 bytes."""
_ADDED = 1 << 17
_ADDED_ON_ACCELERATOR = 1 << 24
"""Number of elements that are added at a time. If they have less than 4 bytes, torch makes a copy with 4 bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedRegion:
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

    def __init__(self, regions: Iterable[MappedRegion]) -> None:
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]

    @classmethod
    def read(cls, tensors: Iterable[torch.Tensor]) -> MemoryMaps:
        """Return the mappings, with their private bytes if one of the tensors may be in a file.

        The kernel counts these bytes by a search of all pages of the process.
        """
        maps = cls._read("maps")
        for tensor in (tensor for tensor in tensors if tensor.device.type == "cpu"):
            # A subclass may be a view of a file, too, but need not have one memory that can be looked up.
            if not is_plain_on_cpu(tensor) or ((region := maps.find(tensor)) is not None and region.is_file):
                return cls._read("smaps")
        return maps

    @classmethod
    def _read(cls, name: str) -> MemoryMaps:
        try:
            text = Path(f"/proc/self/{name}").read_text(errors="replace")
        except OSError:
            return cls([])
        regions: list[MappedRegion] = []
        for start, end, offset, path, kilobytes in _LINE.findall(text):
            if start:
                regions.append(MappedRegion(start=int(start, 16), end=int(end, 16), path=path, offset=int(offset, 16)))
            elif kilobytes != "0":
                regions[-1] = replace(regions[-1], private_bytes=regions[-1].private_bytes + int(kilobytes) * 1024)
        return cls(regions)

    def find(self, tensor: torch.Tensor) -> MappedRegion | None:
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
    distinct = {id(parameter): local_tensor(parameter) for parameter in parameters}.values()
    maps = MemoryMaps.read(distinct)
    counts: Counter[str] = Counter()
    touched: dict[int, MappedRegion] = {}
    private_bytes = total_bytes = 0
    for parameter in distinct:
        total_bytes += parameter.nbytes
        region = maps.find(parameter) if parameter.device.type == "cpu" else None
        if parameter.device.type != "cpu":
            counts["num_on_meta" if parameter.is_meta else "num_on_device"] += 1
        elif region is None or not region.is_file:
            counts["num_private"] += 1
            private_bytes += parameter.nbytes
        else:
            counts["num_shared" if region.is_shared_memory else "num_mapped"] += 1
            touched[region.start] = region
    private_bytes += sum(region.private_bytes for region in touched.values())
    return ParameterMemory(**counts, private_bytes=min(private_bytes, total_bytes), total_bytes=total_bytes)


def find_mapped_parameters(model: nn.Module, device: torch.device) -> set[int]:
    """Return the ids of the parameters that all ranks have mapped from equal files.

    Collective: one reduction of four numbers for each parameter; if ranks have copies of a file, two more collectives.

    Args:
        device: the device on which the numbers are reduced.
    """
    parameters = list(model.parameters())
    if not parameters:
        return set()
    maps, file_status = MemoryMaps.read(parameters), cache(_status)
    views = [_hashes_of_view(parameter, maps, file_status) for parameter in parameters]
    files = [of_file for of_file, _ in views]
    equal = _equal_on_all_ranks([*files, *(of_copy for _, of_copy in views)], device)
    is_equal, is_copied = equal[: len(files)], equal[len(files) :]
    compared = [index for index, copied in enumerate(is_copied) if copied and not is_equal[index]]
    if compared:
        contents = _hashes_of_content([parameters[index] for index in compared], files, device)
        for index, equal_content in zip(compared, _equal_on_all_ranks(contents, device), strict=True):
            is_equal[index] = equal_content
    return {id(parameter) for parameter, found in zip(parameters, is_equal, strict=True) if found}


def _hashes_of_view(
    parameter: nn.Parameter, maps: MemoryMaps, file_status: Callable[[str], tuple[int, int] | None]
) -> tuple[int, int]:
    """Return two hashes of a parameter's view of a file: one is equal only for this file, the other for copies too."""
    region = maps.find(parameter) if is_plain_on_cpu(parameter) and parameter.is_contiguous() else None
    if region is None or not region.is_unchanged_file:
        return _NO_VIEW, _NO_VIEW
    # The name of shared memory depends on its content.
    status = (0, 0) if region.is_shared_memory else file_status(region.path)
    if status is None:
        return _NO_VIEW, _NO_VIEW
    offset = parameter.data_ptr() - region.start + region.offset
    view = status[0], offset, str(parameter.dtype), str(list(parameter.shape))
    return _hash(region.path, status[1], *view), _hash(os.path.basename(region.path), *view)


def is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the data of a tensor or parameter is an ordinary tensor in host memory."""
    return type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"


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
        files: for all parameters of this rank, the hash of the file. Ranks with the same files share the work.
    """
    own = torch.tensor([_hash(*files)], dtype=torch.int64, device=device)
    of_ranks = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(of_ranks, own)
    readers = torch.nonzero(of_ranks == own).view(-1).tolist()
    index, count = readers.index(dist.get_rank()), len(readers)
    contents = (parameter.detach().reshape(-1).view(torch.uint8).numpy().data for parameter in parameters)
    mine = (number % count == index for number in range(len(parameters)))
    return [_hash(xxh3_128_digest(data)) if is_own else _NOT_READ for is_own, data in zip(mine, contents, strict=True)]


def _equal_on_all_ranks(values: Sequence[int], device: torch.device) -> list[bool]:
    """Return for each value whether all ranks that have read it have the same value. Collective."""
    negatives = [value if value == _NOT_READ else -value for value in values]
    extremes = torch.tensor([values, negatives], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return [highest == -lowest != _NO_VIEW for highest, lowest in zip(*extremes.tolist(), strict=True)]


def sum_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the tensors' elements, read as integers, modulo 2**32; ``None`` if there are none to read.

    The sums of the parts of a tensor add up to the sum of the tensor. The result is on the device of the tensors.
    """
    total = None
    for tensor in tensors:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.element_size() not in INTEGERS or tensor.is_meta:
            return None
        added = _sum(tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()]))
        total = added if total is None else total + added.to(total.device)
    return total


def _sum(integers: torch.Tensor) -> torch.Tensor:
    # torch makes a copy if the sum has another type. On the CPU a small one stays in the processor's cache, and leaves
    # no hole between the shards in memory. numpy needs none, but FSDP1 cannot resize a storage that numpy has seen.
    size = _ADDED if integers.device.type == "cpu" else _ADDED_ON_ACCELERATOR
    dtype = torch.int64 if integers.dtype == torch.int64 else torch.int32
    sums = torch.stack([part.sum(dtype=dtype) for part in integers.split(size)])
    return sums.sum(dtype=torch.int64) % SUM_MODULUS


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits as an int64 scalar on its device; the sum of its bits if that has no kernel."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() in INTEGERS:  # torch has no kernel for complex numbers, fp8 and unsigned integers
        tensor = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    try:
        return torch.hash_tensor(tensor).view(torch.int64)
    except NotImplementedError:  # torch 2.13 has kernels for CPU and CUDA
        return _sum(tensor.reshape(-1))


def read_together(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, Any]:
    """Return the values of tensors of one shape, for which the host waits for the device once."""
    device = next((tensor.device for tensor in tensors.values()), None)
    values = torch.stack([tensor.to(device) for tensor in tensors.values()]).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def check_same_weights(plan: FsdpPlan, model: nn.Module, device: torch.device) -> Problem | None:
    """Return a warning if the parameters of the model that is to be sharded differ between ranks. Collective.

    Every parameter is read once, except those that all ranks have mapped from equal files. Two numbers are reduced over
    all ranks; names are exchanged only if these differ.
    """
    if plan.pre_sharded or plan.ram_efficient or plan.sync_module_states or plan.world_size == 1:
        return None
    mapped = find_mapped_parameters(model, device)
    found = {
        canonical_name(name): hash_bits(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in mapped and type(parameter.data) is torch.Tensor and not parameter.is_meta
        if parameter.numel()
    }
    hashes = read_together(found)
    if all(_equal_on_all_ranks([_hash(*hashes.values())], device)):
        return None
    of_ranks = gather_objects(hashes)
    differing = [name for name, bits in of_ranks[0].items() if any(other.get(name) != bits for other in of_ranks)]
    message = f"the ranks have different weights in {plural(len(differing), 'parameter')} of {plan.model_class}: "
    message += f"{format_names(differing, 2)}. The sharded model gets a part of each rank's weights."
    message += " The replicas will stay different." if plan.mesh.replicate > 1 else ""
    fix = "Set fsdp_sync_module_states: true to use rank 0's weights, or set the same seed on all ranks before the "
    fix += "model is created."
    return Problem(code="FSDP-W325", setting="loading.sync_module_states", message=message, fix=fix)
