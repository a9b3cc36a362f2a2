"""Bytes on this rank, counted over the live tensors' storages, beside what plain data parallel would hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.observe.units import UnitObservation


@dataclass(frozen=True, kw_only=True)
class MemoryObservation:
    """All in bytes, of this rank; a storage that several tensors share counts once.

    Attributes:
        params_bytes: the shards (FSDP's own padding included) and the parameters that no unit manages.
        grads_bytes: the gradients; see ``grads_source``.
        optimizer_bytes: the optimizer's state tensors.
        gathered_bytes: whole parameters that are not freed at this moment.
        buffers_bytes: the model's buffers, whole on every rank.
        peak_bytes: the most that was held at a time; see ``peak_source``.
        grads_source: ``alive`` now, ``optimizer step`` as noted before a step, or ``trainable shards``: none is
            alive, and this is what a backward leaves.
        peak_source: ``cuda allocator`` or its like (tensors on the device), or ``process resident set`` (libraries
            too).
        ddp_params_bytes, ddp_grads_bytes, ddp_optimizer_bytes: the same tensors whole, in the same dtypes, as every
            rank of plain data parallel has them.
    """

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    buffers_bytes: int
    peak_bytes: int
    grads_source: str
    peak_source: str
    ddp_params_bytes: int
    ddp_grads_bytes: int
    ddp_optimizer_bytes: int

    @property
    def held_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes

    @property
    def ddp_bytes(self) -> int:
        """What data parallel would hold for them."""
        return self.ddp_params_bytes + self.ddp_grads_bytes + self.ddp_optimizer_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ddp_bytes": self.ddp_bytes}


def observe_memory(
    model: nn.Module,
    units: Sequence[UnitObservation],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    noted_grads_bytes: int | None = None,
) -> MemoryObservation:
    """Count this rank's memory. ``noted_grads_bytes``: alive before an optimizer step. No collectives."""
    plain = unmanaged_parameters(model, units)
    trained = [parameter for parameter in plain if parameter.requires_grad]
    grads_bytes, grads_source = gradient_bytes(model, units), "alive"
    if grads_bytes == 0 and noted_grads_bytes is not None:
        grads_bytes, grads_source = noted_grads_bytes, "optimizer step"
    elif grads_bytes == 0:
        grads_bytes = sum(unit.live.num_local_trainable * _master_itemsize(unit) for unit in units)
        grads_bytes, grads_source = grads_bytes + sum(map(_dense_bytes, trained)), "trainable shards"
    peak_bytes, peak_source = peak_memory()
    optimizer_bytes = storage_bytes(state_tensors(optimizer))
    return MemoryObservation(
        params_bytes=storage_bytes([*(shard for unit in units for shard in unit.live.shards), *plain]),
        grads_bytes=grads_bytes,
        optimizer_bytes=optimizer_bytes,
        gathered_bytes=storage_bytes(
            [tensor for unit in units for tensor in unit.live.gathered],
            apart_from=[shard for unit in units for shard in unit.live.shards],
        ),
        buffers_bytes=storage_bytes(model.buffers()),
        peak_bytes=peak_bytes,
        grads_source=grads_source,
        peak_source=peak_source,
        ddp_params_bytes=sum(unit.num_params * _master_itemsize(unit) for unit in units)
        + sum(map(_dense_bytes, plain)),
        ddp_grads_bytes=sum(_num_trainable(unit) * _master_itemsize(unit) for unit in units)
        + sum(map(_dense_bytes, trained)),
        ddp_optimizer_bytes=_whole_optimizer_bytes(units, trained, optimizer, optimizer_bytes),
    )


def unmanaged_parameters(model: nn.Module, units: Iterable[UnitObservation]) -> list[nn.Parameter]:
    """The parameters that no unit shards (ignored modules, models that are not sharded at all), each once."""
    managed = frozenset[int]().union(*(unit.live.parameter_ids for unit in units))
    return [parameter for parameter in model.parameters() if id(parameter) not in managed]


def gradient_bytes(model: nn.Module, units: Sequence[UnitObservation]) -> int:
    """Bytes of the gradients that are alive on this rank; 0 after ``zero_grad``."""
    tensors = [gradient for unit in units for gradient in unit.live.gradients]
    tensors += [p.grad for p in unmanaged_parameters(model, units) if p.grad is not None]
    return storage_bytes(tensors)


def state_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor], *, apart_from: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the distinct storages behind the tensors' local parts; a freed or meta storage is 0."""
    storages = {_storage_key(tensor): _storage_size(tensor) for tensor in tensors}
    for tensor in apart_from:
        storages.pop(_storage_key(tensor), None)
    return sum(storages.values())


def peak_memory() -> tuple[int, str]:
    """The peak so far in bytes, and what it is the peak of."""
    device = available_device()
    if not device.is_initialized():
        device = DEVICES["cpu"]
    return device.peak_memory(), device.peak_source


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    local = _local(tensor)
    pointer = local.untyped_storage().data_ptr()
    return str(local.device), pointer or -id(tensor)


def _storage_size(tensor: torch.Tensor) -> int:
    local = _local(tensor)
    return 0 if local.is_meta else local.untyped_storage().nbytes()


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _num_trainable(unit: UnitObservation) -> int:
    return unit.num_params - unit.num_frozen


def _master_itemsize(unit: UnitObservation) -> int:
    dtypes = unit.live.master_dtypes
    return max((dtype.itemsize for dtype in dtypes), default=0)


def _whole_optimizer_bytes(
    units: Sequence[UnitObservation],
    plain: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    optimizer_bytes: int,
) -> int:
    """The state of all parameters: exact for DTensors, else scaled by the trainable elements."""
    tensors = state_tensors(optimizer)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return sum(map(_dense_bytes, tensors))
    num_plain = sum(parameter.numel() for parameter in plain)
    whole = sum(map(_num_trainable, units)) + num_plain
    local = sum(unit.live.num_local_trainable for unit in units) + num_plain
    return round(optimizer_bytes * whole / local) if local else 0
