"""Time-outs of process groups (``torch/distributed/distributed_c10d.py``), and a group without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hf_fsdp_plugin.contracts import contracts_of, guard_functions

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


guard_functions(
    globals(), CONTRACTS, off={"timeout_of": None, "set_timeout": None, "resolve_group": None, "supports_cpu": False}
)
