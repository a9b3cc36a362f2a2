"""Private APIs of torch that a trace needs: fake tensors, fake process groups, and numbers of the autograd graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import _flat_param as flat_param
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_fsdp_plugin.torch_private.functions import storage_key

__all__ = [
    "FakeTensorMode",
    "fake_process_group",
    "fake_tensor_group",
    "next_sequence_number",
    "running_sequence_number",
]
__all__ += ["watch_propagation", "watch_resizes"]
_PROPAGATE = "_propagate_tensor_meta_non_cached"


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose collectives do nothing.

    Args:
        world_size: number of ranks, which do not exist.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensor_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose collectives do nothing, and let FSDP shard fake tensors.

    Args:
        world_size: number of ranks, which do not exist.
    """
    with (
        fake_process_group(world_size),
        warnings.catch_warnings(),
        _without_log(),
        _one_chunk(),
        _compared_by_identity(),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextmanager
def _without_log() -> Iterator[None]:
    """Hide the stack traces that fake tensors log for operators that raise. The exception is reported to the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def _one_chunk() -> Iterator[None]:
    """Create only the chunk of a parameter that FSDP2 uses, instead of one for each rank."""
    original = fsdp_param._chunk_with_empty

    class Chunks:
        def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
            self._tensor, self._dim = tensor, dim
            self._size = -(-tensor.size(dim) // num_chunks)

        def __getitem__(self, index: int) -> torch.Tensor:
            start = index * self._size
            length = min(self._size, self._tensor.size(self._dim) - start)
            if length <= 0:
                return self._tensor.new_empty(0)
            return self._tensor.narrow(self._dim, start, length)

    fsdp_param._chunk_with_empty = Chunks
    try:
        yield
    finally:
        fsdp_param._chunk_with_empty = original


@contextmanager
def _compared_by_identity() -> Iterator[None]:
    """Make FSDP1 compare storages by identity and size. It compares addresses, which are 0 for all fake tensors."""
    originals = flat_param._same_storage, flat_param._data_ptr_allocated

    def same(left: torch.Tensor, right: torch.Tensor) -> bool:
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in (left, right)]
        return storage_key(locals_[0]) == storage_key(locals_[1])

    flat_param._same_storage = same
    flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().nbytes() > 0
    try:
        yield
    finally:
        flat_param._same_storage, flat_param._data_ptr_allocated = originals


@contextmanager
def watch_resizes(after: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``after(storage)`` after Python has resized a storage, as both FSDP versions do with gathered parameters."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        after(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def watch_propagation(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter ``around()`` whenever DTensor runs an operator on fake tensors of the global shape to learn its output."""
    original = getattr(ShardingPropagator, _PROPAGATE)

    def propagate(*args: Any) -> Any:
        with around():
            return original(*args)

    setattr(ShardingPropagator, _PROPAGATE, propagate)
    try:
        yield
    finally:
        setattr(ShardingPropagator, _PROPAGATE, original)


def next_sequence_number() -> int:
    """Return the number that the next node of the autograd graph gets on this thread."""
    return int(torch.autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward is running; ``None`` outside of nodes."""
    node = torch._C._current_autograd_node()
    number = None if node is None else node._sequence_nr()
    return None if number is None or number >= 1 << 63 else int(number)  # nodes that accumulate have the largest one
