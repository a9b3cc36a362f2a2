"""Memory of this rank, measured from the storages of the live tensors, and the memory that DDP would need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.parameters import step_mode
from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.observe.units import UnitObservation, unmanaged_parameters


@dataclass(frozen=True, kw_only=True)
class MemoryObservation:
    """Bytes on this rank. A storage that several tensors share counts once.

    Attributes:
        params_bytes: the shards, with FSDP's padding, and the parameters that no unit shards.
        grads_bytes: the gradients; see ``grads_source``.
        optimizer_bytes: the state tensors of the optimizer.
        gathered_bytes: gathered parameters that are currently not freed.
        buffers_bytes: the buffers of the model, which are never sharded.
        peak_bytes: the peak memory so far; see ``peak_source``.
        grads_source: ``alive`` if the gradients exist now, ``optimizer step`` if their size was recorded before a
            step, or ``trainable shards`` if it is computed from the shards.
        peak_source: name of an allocator (tensors on the device) or ``process resident set`` (includes libraries).
        ddp_params_bytes, ddp_grads_bytes, ddp_optimizer_bytes: the same tensors with the same dtypes, unsharded as on
            every rank of DistributedDataParallel.
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
        """The sum of parameters, gradients and optimizer state."""
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes

    @property
    def ddp_bytes(self) -> int:
        """The sum of parameters, gradients and optimizer state under DistributedDataParallel."""
        return self.ddp_params_bytes + self.ddp_grads_bytes + self.ddp_optimizer_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ddp_bytes": self.ddp_bytes}


def observe_memory(
    model: nn.Module,
    units: Sequence[UnitObservation],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    recorded_grads_bytes: int | None = None,
) -> MemoryObservation:
    """Measure the memory of this rank. No collectives.

    Args:
        recorded_grads_bytes: size of the gradients before an optimizer step; used if no gradient exists now.
    """
    unmanaged = unmanaged_parameters(model, units)
    trained = [parameter for parameter in unmanaged if parameter.requires_grad]
    shards = [shard for unit in units for shard in unit.live.shards]
    gathered = [tensor for unit in units for tensor in unit.live.known("gathered", ())]
    ddp_params_bytes = sum(unit.num_params * _master_itemsize(unit) for unit in units)
    ddp_grads_bytes = sum(unit.num_trainable * _master_itemsize(unit) for unit in units) + _nbytes(trained)
    grads_bytes, grads_source = gradient_bytes(model, units), "alive"
    if not (optimizers or recorded_grads_bytes or model.training):  # a process that only evaluates
        ddp_grads_bytes = 0
    elif grads_bytes == 0 and recorded_grads_bytes is None:
        grads_bytes = sum(unit.live.known("num_local_trainable", 0) * _master_itemsize(unit) for unit in units)
        grads_bytes, grads_source = grads_bytes + _nbytes(trained), "trainable shards"
    if grads_bytes == 0 and recorded_grads_bytes is not None:
        grads_bytes, grads_source = recorded_grads_bytes, "optimizer step"
    device = available_device() if available_device().is_initialized() else DEVICES["cpu"]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return MemoryObservation(
        params_bytes=storage_bytes([*shards, *unmanaged]),
        grads_bytes=grads_bytes,
        optimizer_bytes=storage_bytes(tensors),
        gathered_bytes=storage_bytes(gathered, excluding=shards),
        buffers_bytes=storage_bytes(model.buffers()),
        peak_bytes=device.peak_memory(),
        grads_source=grads_source,
        peak_source=device.peak_source,
        ddp_params_bytes=ddp_params_bytes + _nbytes(unmanaged),
        ddp_grads_bytes=ddp_grads_bytes,
        ddp_optimizer_bytes=_whole_optimizer_bytes(units, trained, optimizers, tensors),
    )


def gradient_bytes(model: nn.Module, units: Sequence[UnitObservation]) -> int:
    """Return the bytes of the gradients that exist on this rank now; 0 after ``zero_grad``."""
    tensors = [gradient for unit in units for gradient in unit.live.known("gradients", ())]
    # Between two collectives, parameters of FSDP1 can be views of gathered ones, which have no gradient.
    tensors += [p.grad for p in unmanaged_parameters(model, units) if p.is_leaf and p.grad is not None]
    return storage_bytes(tensors)


def storage_bytes(tensors: Iterable[torch.Tensor], *, excluding: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the distinct storages of the tensors' local parts; a freed or meta storage counts 0."""
    excluded = dict(map(_storage, _plain_tensors(excluding)))
    return sum(size for key, size in dict(map(_storage, _plain_tensors(tensors))).items() if key not in excluded)


def _plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the local parts of tensors; of a tensor subclass (torchao's quantized state) the tensors inside it."""
    for tensor in tensors:
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if hasattr(local, "__tensor_flatten__"):
            yield from _plain_tensors(getattr(local, name) for name in local.__tensor_flatten__()[0])
        else:
            yield local


def _storage(local: torch.Tensor) -> tuple[tuple[str, int], int]:
    """Return the identity and the bytes of a tensor's storage."""
    storage = local.untyped_storage()
    key = str(local.device), storage.data_ptr() or -id(local)
    return key, 0 if local.is_meta else storage.nbytes()


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _master_itemsize(unit: UnitObservation) -> int:
    return max((dtype.itemsize for dtype in unit.live.known("master_dtypes", ())), default=0)


def _whole_optimizer_bytes(
    units: Sequence[UnitObservation],
    unmanaged: Sequence[nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
) -> int:
    """Return the bytes of the unsharded optimizer state: exact for DTensors, else scaled by the trainable elements."""
    optimizer_bytes = storage_bytes(tensors)
    if any(step_mode(optimizer) == "whole" for optimizer in optimizers):
        return optimizer_bytes
    if any(isinstance(tensor, DTensor) and type(tensor.to_local()) is torch.Tensor for tensor in tensors):
        return _nbytes(tensors)
    num_unmanaged = sum(parameter.numel() for parameter in unmanaged)
    whole = sum(unit.num_trainable for unit in units) + num_unmanaged
    local = sum(unit.live.num_local_trainable for unit in units) + num_unmanaged
    return round(optimizer_bytes * whole / local) if local else 0
