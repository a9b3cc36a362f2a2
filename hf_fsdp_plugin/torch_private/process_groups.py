"""Process groups: their time-outs (``torch/distributed/distributed_c10d.py``), and one without communication.

In the latter, ``hf-fsdp doctor`` makes a tiny model of each FSDP version, to look for private attributes of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_plugin.contracts import contracts_of, guard

_C10D: Final = "torch.distributed.distributed_c10d"
_TIMEOUTS: Final = "the time-out of process groups"
CONTRACTS = (
    *contracts_of(f"{_C10D}:ProcessGroup", "off", _TIMEOUTS, "_get_backend", "_device_types"),
    *contracts_of(f"{_C10D}:ProcessGroupGloo", "off", _TIMEOUTS, "options"),
    *contracts_of(f"{_C10D}:ProcessGroupGloo._Options", "off", _TIMEOUTS, "_timeout"),
    *contracts_of(_C10D, "off", _TIMEOUTS, "set_timeout|_set_pg_timeout"),
    *contracts_of(_C10D, "off", "the record of collectives", "_resolve_process_group"),
    *contracts_of("torch.testing._internal.distributed.fake_pg", "refused", "the table of contracts", "FakeStore"),
)


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the time-out of a process group, by default of all ranks; ``None`` if its backend reports none."""
    group = dist.group.WORLD if group is None else group
    backends: list[Any] = [group._get_backend(device) for device in group._device_types] if group is not None else []
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return max((timeout for timeout in found if timeout is not None), default=None)


def supports_cpu(group: dist.ProcessGroup) -> bool:
    """Whether collectives of a process group accept tensors in host memory."""
    return any(device.type == "cpu" for device in group._device_types)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of a process group, by default of all ranks. Collectives that have started keep theirs."""
    # torch 2.14 and older have only the private function, which 2.15 deprecates.
    public = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    public(timeout, group)


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a functional collective, which accepts several forms; ``None`` for lists of ranks."""
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple):
        return group[0].get_group(group[1]) if isinstance(group[0], DeviceMesh) else None
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else None


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


guard(globals(), CONTRACTS, off={"timeout_of": None, "set_timeout": None, "resolve_group": None, "supports_cpu": False})
