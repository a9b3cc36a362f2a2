"""Objects of torch in which private attributes are looked up: those of a tiny model of each FSDP version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_fsdp_plugin.torch_private.functions import fake_process_group


def has_part(source: Any, name: str) -> bool:
    """Whether an object has an attribute or, for a module, a child, which the attributes of a wrapper may hide."""
    return hasattr(source, name) or name in vars(source).get("_modules", {})


@cache
def live_objects() -> tuple[Any, ...]:
    """Return torch's objects of a tiny model of each FSDP version, after a training step without communication."""
    with fake_process_group(2):
        return tuple(_live_objects())


def _live_objects() -> Iterator[Any]:
    for objects in (_fsdp2_objects, _fsdp1_objects, _other_objects):
        # If a newer torch lacks one of these names, the remaining objects are left out, and the probe finds less.
        with suppress(AttributeError, ImportError, TypeError, LookupError):
            yield from objects()


def _fsdp2_objects() -> Iterator[Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 4)), device_id=torch.device("cpu"), mixed_precision=precision, use_orig_params=True
    )
    yield from (model, _step(model))
    handle: Any = model._handle
    yield from (handle, handle.flat_param, *handle.flat_param._param_infos, *handle.flat_param._shard_param_infos)


def _other_objects() -> Iterator[Any]:
    from hf_fsdp_plugin.torch_private.functions import checkpoint_wrapper

    yield torch.ops.aten.mm.default
    yield checkpoint_wrapper(nn.Linear(1, 1))


def _step(model: nn.Module) -> Any:
    """Run a forward and a backward, and return a node of the graph."""
    output = model(torch.zeros(2, 4)).float().sum()
    output.backward()
    return output.grad_fn
