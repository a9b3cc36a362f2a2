"""Prepare parameters and buffers for sharding: allocate, broadcast from rank 0, cast.

This implements ``sync_module_states`` and the second half of ``cpu_ram_efficient_loading``. One unit is broadcast at a
time, so a rank holds at most one whole unit on its device. FSDP1's own broadcast rejects CPU modules, and FSDP2 has no
broadcast. This broadcast works for both versions and every device type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.memory_maps import ParameterMemory, parameter_memory
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.torch_private.modules import buffers as own_buffers
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

BROADCAST_ATTRIBUTE = "_hf_fsdp_broadcast"
"""Attribute of a sharded model that contains its :class:`BroadcastRecord`."""


@dataclass(kw_only=True, slots=True)
class BroadcastRecord:
    """What this rank received from rank 0.

    Attributes:
        num_tensors: number of parameters and buffers.
        num_filled: number of these that were on the meta device on this rank before the broadcast.
        checksum: checksum of the bits of all tensors. Equal on all ranks if all received the same weights.
        bit_sum: sum of the bits of the parameters of all units just before they were sharded; ``None`` if unknown.
        before: which memory the parameters of this rank were in before the broadcast.
    """

    num_tensors: int = 0
    num_filled: int = 0
    checksum: int = 0
    bit_sum: int | None = 0
    before: ParameterMemory | None = None

    def add(self, tensor: torch.Tensor) -> None:
        self.num_tensors += 1
        if tensor.numel():
            # item() overflows for a uint64 above 2**63; its bits are valid as int64.
            bits = int(torch.hash_tensor(tensor).view(torch.int64))
            # Rotate before each XOR: otherwise two equal tensors would leave the checksum unchanged.
            self.checksum = (self.checksum << 1 ^ self.checksum >> 63 ^ bits) & (1 << 64) - 1

    def add_unit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the parameters of a unit to the sum that the sum over all shards must equal."""
        added = sum_bits(parameters)
        self.bit_sum = None if self.bit_sum is None or added is None else self.bit_sum + int(added)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type with the same size."""


def sum_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the tensors' elements, read as integers, modulo 2**64; ``None`` if there are none to read.

    The sums of the parts of a tensor add up to the sum of the tensor. The result is on the device of the tensors.
    """
    total = None
    for tensor in tensors:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.element_size() not in _INTEGERS or tensor.is_meta:
            return None
        part = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        total = part if total is None else total + part.to(total.device)
    return total


def start_record(plan: FsdpPlan, model: nn.Module) -> BroadcastRecord:
    """Return a record with the memory that the parameters are in now, if the plan loads RAM-efficiently."""
    return BroadcastRecord(before=parameter_memory(model.parameters()) if plan.ram_efficient else None)


def prepare_buffers(plan: FsdpPlan, model: nn.Module, device: torch.device, record: BroadcastRecord) -> None:
    """Overwrite all buffers with rank 0's values, on ``device``, if the plan broadcasts. Collective.

    This includes non-persistent buffers (rotary frequencies, position ids). No checkpoint contains them: on ranks that
    loaded no weights they are zeros, and the loss would be NaN or wrong.
    """
    if not (plan.ram_efficient or plan.sync_module_states):
        return
    for module in model.modules():
        registered = own_buffers(module)
        for name, buffer in registered.items():
            if buffer is not None:
                record.num_filled += buffer.is_meta
                registered[name] = _broadcast(buffer, device, record)


def prepare_unit(
    plan: FsdpPlan, unit: UnitPlan, model: nn.Module, device: torch.device, record: BroadcastRecord
) -> None:
    """Allocate, broadcast and cast the parameters of one unit before it is sharded."""
    parameters = _prepare_parameters(plan, unit.parameters, model, device, record)
    cast_to_master(plan, parameters)
    if parameters and (plan.ram_efficient or plan.sync_module_states):
        record.add_unit(parameters)


def prepare_ignored(
    plan: FsdpPlan, model: nn.Module, device: torch.device, record: BroadcastRecord
) -> list[nn.Parameter]:
    """Move the ignored parameters to ``device``, which FSDP does not do, and average their gradients in hooks.

    Returns each parameter once.
    """
    parameters = _prepare_parameters(plan, plan.ignored_parameters, model, device, record)
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_average_gradient)
    return parameters


def _prepare_parameters(
    plan: FsdpPlan, names: Iterable[str], model: nn.Module, device: torch.device, record: BroadcastRecord
) -> list[nn.Parameter]:
    """Allocate and broadcast the named parameters as planned. Returns each once, in the same order on all ranks.

    Collective, with the same parameters on all ranks.
    """
    names = list(names)
    if plan.ram_efficient:
        materialize(model, names, device, record)
    parameters = list({id(parameter): parameter for parameter in map(model.get_parameter, names)}.values())
    if plan.ram_efficient or plan.sync_module_states:
        for parameter in parameters:
            parameter.data = _broadcast(_without_subclass(parameter.data), device, record)
    return parameters


def _without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """Return the packed bytes of a weight of bitsandbytes: its class requires attributes that ``data`` lacks."""
    return tensor.as_subclass(torch.Tensor) if type(tensor).__name__ == "Params4bit" else tensor


def materialize(model: nn.Module, names: Iterable[str], device: torch.device, record: BroadcastRecord) -> None:
    """Allocate memory on ``device`` for the named parameters that are meta tensors. Tied parameters stay tied.

    A script may create the model on the meta device on every rank except rank 0.
    """
    wanted = set(names)
    allocated: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        registered = own_parameters(module)
        for attribute, parameter in list(registered.items()):
            if parameter is None or not parameter.is_meta:
                continue
            name = canonical_name(f"{module_name}.{attribute}".lstrip("."))
            if id(parameter) not in allocated and name in wanted:
                empty = torch.empty_like(parameter, device=device)
                allocated[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                record.num_filled += 1
            registered[attribute] = allocated.get(id(parameter), parameter)


def _broadcast(tensor: torch.Tensor, device: torch.device, record: BroadcastRecord) -> torch.Tensor:
    """Return rank 0's values of a tensor, on ``device``. Collective.

    The other ranks receive them in new memory: their tensor may be a view of a mapped file, which a change in place
    would copy page by page.
    """
    is_plain = type(tensor) is torch.Tensor  # a subclass may not support empty_like
    if tensor.is_meta or (is_plain and dist.get_rank() != 0):
        received = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    else:
        received = tensor.to(device).contiguous()
    dist.broadcast(received, src=0)
    record.add(received)
    return received


def cast_to_master(plan: FsdpPlan, parameters: Iterable[nn.Parameter]) -> None:
    """Cast trainable floating-point parameters in place to the dtype in which the optimizer updates them.

    The optimizer updates the shards. In bf16, updates smaller than bf16's resolution would be lost.
    """
    master = torch_dtype(plan.precision.master)
    if master is None:
        return
    for parameter in parameters:
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != master:
            parameter.data = parameter.data.to(master)


def cast_buffers(plan: FsdpPlan, model: nn.Module) -> None:
    """Cast floating-point buffers in place under FSDP2. FSDP1 casts them itself."""
    dtype = torch_dtype(plan.precision.buffer)
    if dtype is None:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _average_gradient(parameter: torch.Tensor) -> None:
    """Average a gradient over all ranks. Neither FSDP version reduces the gradients of ignored parameters.

    It runs after every backward. This is correct under gradient accumulation too, because gradients that are averaged
    already are equal on all ranks.
    """
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
