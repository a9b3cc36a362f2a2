"""Process groups that exist, and their time-outs (``torch/distributed/distributed_c10d.py``)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the time-out of a process group, by default of all ranks; ``None`` if its backend reports none."""
    group = dist.group.WORLD if group is None else group
    backends: list[Any] = [group._get_backend(device) for device in group._device_types] if group is not None else []
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return max((timeout for timeout in found if timeout is not None), default=None)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of a process group, by default of all ranks. Collectives that have started keep theirs."""
    _set_pg_timeout(timeout, group)


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a functional collective, which accepts several forms; ``None`` for lists of ranks."""
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple):
        return group[0].get_group(group[1]) if isinstance(group[0], DeviceMesh) else None
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else None
