"""Fake tensors and fake process groups: tensors without memory, and collectives of one process.

``hf-fsdp doctor`` looks for private attributes on torch's objects of a tiny model of each FSDP version
(:func:`live_objects`), which is trained in a fake process group.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.contracts import contracts_of, guard, load
from hf_fsdp_plugin.torch_private.functions import checkpoint_wrapper
from hf_fsdp_plugin.torch_private.tracing import TorchDispatchMode, storage_key

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

_TRACE = "a prediction that traces the model (`plan --trace`)"
CONTRACTS = (
    *contracts_of("torch._subclasses.fake_tensor", "refused", _TRACE, "FakeTensorMode"),
    *contracts_of("torch.testing._internal.distributed.fake_pg", "refused", _TRACE, "FakeStore"),
    *contracts_of("torch.distributed.fsdp", "refused", _TRACE, "_flat_param"),
    *contracts_of("torch.distributed.fsdp._flat_param", "refused", _TRACE, "_same_storage", "_data_ptr_allocated"),
    *contracts_of("torch.distributed.fsdp._fully_shard", "refused", _TRACE, "_fsdp_param"),
    *contracts_of("torch.distributed.fsdp._fully_shard._fsdp_param", "refused", _TRACE, "_chunk_with_empty"),
    *contracts_of("torch:UntypedStorage", "refused", _TRACE, "resize_"),
    *contracts_of("torch:autograd", "refused", _TRACE, "_get_sequence_nr"),
    *contracts_of("torch:_C", "refused", _TRACE, "_current_autograd_node"),
    *contracts_of("torch._C:_FunctionBase", "refused", _TRACE, "_sequence_nr"),
    *contracts_of("torch.autograd.graph", "refused", "the prediction of memory", "_engine_run_backward"),
    *contracts_of("torch.distributed.tensor._sharding_prop", "refused", _TRACE, "ShardingPropagator"),
    *contracts_of(
        "torch.distributed.tensor._sharding_prop:ShardingPropagator",
        "refused",
        _TRACE,
        "_propagate_tensor_meta_non_cached",
    ),
)
if not TYPE_CHECKING:
    FakeTensorMode = load("torch._subclasses.fake_tensor:FakeTensorMode", CONTRACTS)
_flat_param = load("torch.distributed.fsdp:_flat_param", CONTRACTS)
_fsdp_param = load("torch.distributed.fsdp._fully_shard:_fsdp_param", CONTRACTS)
ShardingPropagator = load("torch.distributed.tensor._sharding_prop:ShardingPropagator", CONTRACTS)
_PROPAGATE = "_propagate_tensor_meta_non_cached"

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "called_by_engine",
    "fake_process_group",
    "has_part",
    "live_objects",
    "next_sequence_number",
    "running_sequence_number",
    "watch_propagation",
    "watch_resizes",
]


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose collectives do nothing.

    Args:
        world_size: number of ranks, which do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings(), _without_log(), _one_chunk(), _compared_by_identity():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        dist.destroy_process_group()


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
    original = _fsdp_param._chunk_with_empty

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

    _fsdp_param._chunk_with_empty = Chunks
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


@contextmanager
def _compared_by_identity() -> Iterator[None]:
    """Make FSDP1 compare storages by identity and size. It compares addresses, which are 0 for all fake tensors."""
    originals = _flat_param._same_storage, _flat_param._data_ptr_allocated

    def same(left: torch.Tensor, right: torch.Tensor) -> bool:
        locals_ = [each.to_local() if isinstance(each, DTensor) else each for each in (left, right)]
        return storage_key(locals_[0]) == storage_key(locals_[1])

    _flat_param._same_storage = same
    _flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().nbytes() > 0
    try:
        yield
    finally:
        _flat_param._same_storage, _flat_param._data_ptr_allocated = originals


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


def called_by_engine(depth: int) -> bool:
    """Return whether the autograd engine has called a function without Python in between.

    Args:
        depth: number of frames between the caller and that function's own.
    """
    return sys._getframe(depth + 1).f_code.co_name == "_engine_run_backward"


def has_part(source: Any, name: str) -> bool:
    """Whether an object has an attribute, or a module a child that a wrapper may hide."""
    return hasattr(source, name) or name in vars(source).get("_modules", {})


@cache
def live_objects() -> tuple[Any, ...]:
    """Return torch's objects of a tiny model of each FSDP version, after a training step without communication."""
    with fake_process_group(2):
        return tuple(_live_objects())


def _live_objects() -> Iterator[Any]:
    for objects in (_fsdp2_objects, _fsdp1_objects, _other_objects):
        # What a newer torch lacks is missing among the objects, and so in the table.
        with contextlib.suppress(AttributeError, ImportError, TypeError, LookupError):
            yield from objects()


def _fsdp2_objects() -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    yield from (model, model[0], next(iter(model.parameters())), _step(model))
    state: Any = model[0]._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from (state, state._state_ctx, groups[0], groups[0].mesh_info, *groups[0].fsdp_params)
    yield from (item._module_info for item in groups[0].fsdp_params)


def _fsdp1_objects() -> Iterator[Any]:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"), mixed_precision=precision, use_orig_params=True
    )
    yield from (model, _step(model))
    handle: Any = model._handle
    yield from (handle, handle.flat_param, *handle.flat_param._param_infos, *handle.flat_param._shard_param_infos)


def _other_objects() -> Iterator[Any]:
    yield torch.ops.aten.mm.default
    yield checkpoint_wrapper(nn.Linear(1, 1))


def _step(model: nn.Module) -> Any:
    """Run a forward and a backward, and return a node of the graph."""
    output = model(torch.zeros(2, 4)).float().sum()
    output.backward()
    return output.grad_fn


guard(globals(), CONTRACTS)
