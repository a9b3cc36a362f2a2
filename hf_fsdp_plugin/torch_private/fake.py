"""A fake process group, whose collectives do nothing, and calls by torch's autograd engine.

``hf-fsdp doctor`` looks for private attributes on torch's objects of a tiny model of each FSDP version
(:func:`live_objects`), which is trained in such a group.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

from hf_fsdp_plugin.contracts import contracts_of, guard
from hf_fsdp_plugin.torch_private.functions import checkpoint_wrapper

CONTRACTS = (
    *contracts_of("torch.testing._internal.distributed.fake_pg", "refused", "the table of contracts", "FakeStore"),
    *contracts_of("torch.autograd.graph", "refused", "the prediction of memory", "_engine_run_backward"),
)


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose collectives do nothing.

    Args:
        world_size: number of ranks, which do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
