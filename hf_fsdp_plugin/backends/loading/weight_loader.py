"""Prepare parameters and buffers for sharding: allocate, broadcast from rank 0, cast.

Parameters that all ranks have mapped from equal files (:mod:`hf_fsdp_plugin.backends.loading.equal_weights`) are not
broadcast: each rank copies its own part of them only to an accelerator, which casts it.

This implements ``sync_module_states`` and, after rank 0 has loaded the model, the broadcast of
``cpu_ram_efficient_loading``. One unit is broadcast at a time, so a rank holds at most one whole unit on its device.
FSDP1's own broadcast rejects CPU modules, and FSDP2 has no broadcast. This broadcast works for both versions and every
device type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.loading import equal_weights, mapped_files
from hf_fsdp_plugin.backends.optimizers.parameters import average_gradient
from hf_fsdp_plugin.backends.ranks.agreement import same_on_all_ranks
from hf_fsdp_plugin.backends.torch_types import PinnedWindows, copy_to_device
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan, torch_dtype
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.modules import buffers as own_buffers
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters
from hf_fsdp_plugin.torch_private.modules import registrations

Places = dict[tuple[nn.Module, str], torch.Tensor]
"""Module and attribute of a parameter -> its whole values in host memory, of which each rank copies its part."""
_PACKS_ON_CPU = "support_avx512bf16_for_cpu"
"""Attribute of ``Linear4bit``: whether an evaluation on a CPU repacks the weight in place."""


@dataclass(kw_only=True, slots=True)
class BroadcastRecord:
    """Collects what this rank receives from rank 0. Part of the state of the sharded model.

    Checksum and sums are integers on the device until :meth:`read`, because the host would wait for each.

    Attributes:
        num_tensors: number of parameters and buffers.
        num_filled: number of these that were on the meta device on this rank before the broadcast.
        num_from_files: number of parameters that were not broadcast, because all ranks have mapped them from equal
            files.
        before: which memory the parameters of this rank were in before the broadcast.
        checksum: checksum of the bits of all tensors. Equal on all ranks if all received the same weights.
    """

    num_tensors: int = 0
    num_filled: int = 0
    num_from_files: int = 0
    before: mapped_files.ParameterMemory | None = None
    checksum: Any = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.num_tensors += 1
        if tensor.numel():
            # Rotate before each XOR: otherwise two equal tensors would leave the checksum unchanged.
            self.checksum = equal_weights.hash_bits(tensor) ^ (self.checksum << 1) ^ (self.checksum >> 63 & 1)

    def read(self) -> BroadcastRecord:
        """Return the record with its checksum as a number. The host waits for the device."""
        return replace(self, checksum=int(self.checksum))


def broadcasts_weights(plan: FsdpPlan) -> bool:
    """Whether all ranks get rank 0's weights and buffers."""
    return plan.ram_efficient or plan.sync_module_states


class WeightLoader:
    """Prepares the parameters and buffers of one model for sharding.

    Collective: its methods are called in the same order on all ranks.

    Attributes:
        record: what this rank received.
    """

    def __init__(self, plan: FsdpPlan, model: nn.Module, device: torch.device) -> None:
        self._plan = plan
        self._model = model
        self._device = device
        self._has_meta_parameters = any(parameter.is_meta for parameter in model.parameters())
        before = mapped_files.parameter_memory(model.parameters()) if plan.ram_efficient else None
        self.record = BroadcastRecord(before=before)
        self._windows = PinnedWindows()
        # Parameters are removed when they are prepared: a new parameter may get the id of one that was freed.
        self._mapped = equal_weights.find_mapped_parameters(model, device) if broadcasts_weights(plan) else set()

    def prepare_buffers(self) -> None:
        """Move all buffers to the device, and overwrite them with rank 0's values if the plan broadcasts.

        This includes non-persistent buffers (rotary frequencies, position ids). No checkpoint contains them: on ranks
        that loaded no weights they are zeros, and the loss would be NaN or wrong. The states of quantized weights are
        prepared like buffers.
        """
        for module in self._model.modules():
            registered = own_buffers(module)
            for name, buffer in registered.items():
                if buffer is None:
                    continue
                if not broadcasts_weights(self._plan):
                    registered[name] = buffer if buffer.is_meta else self._on_device(buffer)
                else:
                    self.record.num_filled += buffer.is_meta
                    registered[name] = self._broadcast(buffer)
        _prepare_quantized(self._plan, self._model, self._device)

    def prepare_unit(self, unit: UnitPlan) -> Places:
        """Allocate, broadcast and cast the parameters of one unit before it is sharded.

        Returns:
            The parameters that have memory on the device, but no values yet: pass their parts to :meth:`copy_part`.
        """
        whole: dict[int, torch.Tensor] = {}
        for parameter in self._prepare_parameters(unit.parameters):
            # The optimizer updates the shards: in bf16, small updates would be lost.
            dtype = self._plan.precision.stored_dtype(parameter)
            if self._device.type != "cpu" and mapped_files.is_plain_on_cpu(parameter) and parameter.is_contiguous():
                whole[id(parameter)] = parameter.data
                parameter.data = torch.empty_like(parameter.data, dtype=dtype, device=self._device)
            elif parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
        return {
            (module, attribute): whole[id(parameter)]
            for module in (self._model.modules() if whole else ())
            for attribute, parameter in own_parameters(module).items()
            if id(parameter) in whole
        }

    @torch.no_grad()
    def copy_part(self, shard: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this rank's part of a whole parameter to its shard, which is in host memory if it is offloaded."""
        if shard.device.type == "cpu":
            shard.copy_(part)
        elif part.numel():
            self._windows.copy(shard, part)

    def prepare_ignored(self) -> list[nn.Parameter]:
        """Move the ignored parameters to the device, which FSDP does not do, and average their gradients in hooks.

        They are cast to the dtype in which the optimizer updates them, as shards are.

        Returns each parameter once.
        """
        parameters = self._prepare_parameters(self._plan.ignored_parameters)
        for parameter in parameters:
            # Every rank keeps these parameters. On the CPU, a view of a file would follow changes of the file.
            dtype, copies = self._plan.precision.stored_dtype(parameter), self._device.type == "cpu"
            parameter.data = self._on_device(parameter.data).to(dtype, copy=copies)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average_gradient)
        return parameters

    def _prepare_parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Allocate and broadcast the named parameters as planned. Returns each once, in the same order on all ranks."""
        names = list(names)
        if self._plan.ram_efficient and self._has_meta_parameters:
            materialize(self._model, names, self._device, self.record)
        parameters = list({id(parameter): parameter for parameter in map(self._model.get_parameter, names)}.values())
        for parameter in parameters if broadcasts_weights(self._plan) else ():
            if id(parameter) not in self._mapped:
                data = parameter.data
                # The packed bytes of a weight of bitsandbytes: its class requires attributes that ``data`` lacks.
                data = data.as_subclass(torch.Tensor) if type(data).__name__ == "Params4bit" else data
                parameter.data = self._broadcast(data)
                continue
            self._mapped.remove(id(parameter))
            self.record.num_from_files += 1
        return parameters

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return copy_to_device(tensor, self._device, self._windows)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values of a tensor, on the device. Collective.

        The other ranks receive them in new memory: their tensor may be a view of a mapped file, which a change in place
        would copy page by page.
        """
        is_plain = type(tensor) is torch.Tensor  # a subclass may not support empty_like
        if tensor.is_meta or (is_plain and dist.get_rank() != 0):
            received = torch.empty_like(tensor, device=self._device, memory_format=torch.contiguous_format)
        else:
            received = self._on_device(tensor).contiguous()
        dist.broadcast(received, src=0)
        self.record.add(received)
        return received


def materialize(model: nn.Module, names: Iterable[str], device: torch.device, record: BroadcastRecord) -> None:
    """Allocate memory on ``device`` for the named parameters that are meta tensors. Tied parameters stay tied.

    A script may create the model on the meta device on every rank except rank 0.
    """
    empty = {id(parameter): parameter for parameter in map(model.get_parameter, names) if parameter.is_meta}
    record.num_filled += len(empty)
    allocated = {
        key: nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        for key, parameter in empty.items()
    }
    for registered, attribute, parameter in registrations(model.modules()):
        registered[attribute] = allocated.get(id(parameter), parameter)


def cast_buffers(plan: FsdpPlan, model: nn.Module) -> None:
    """Cast floating-point buffers in place under FSDP2. FSDP1 casts them itself."""
    dtype = torch_dtype(plan.precision.buffer)
    if dtype is None:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _prepare_quantized(plan: FsdpPlan, model: nn.Module, device: torch.device) -> None:
    """Move the states of 4-bit weights to ``device``; if the plan broadcasts, overwrite them with rank 0's. Collective.

    ``Linear4bit`` of bitsandbytes stores packed bytes in a parameter, which FSDP shards, and scales and codes in a
    ``QuantState``, of which each rank keeps a whole one (about 1/8 of the size of the packed bytes, less with double
    quantization). The packed bytes of a weight are rank 0's, so its scales must be rank 0's, too.
    """
    modules = {
        canonical_name(name): module
        for name, module in model.named_modules()
        if hasattr(getattr(module, "weight", None), "quant_state")
    }
    if not modules:
        return
    states: dict[str, Any] = {name: module.weight.quant_state for name, module in modules.items()}
    present = [name for name, state in states.items() if state is not None]
    same_on_all_ranks("the list of quantized weights", ",".join(present))
    in_flat = plan.backend == "fsdp1" and not plan.use_orig
    for name, module in modules.items():
        if in_flat and f"{name}.weight" not in plan.ignored_parameters:
            module.register_forward_hook(_unregister_view)
        if hasattr(module, _PACKS_ON_CPU):
            # The repacked weight would be a gathered copy, while the repacked state would remain.
            setattr(module, _PACKS_ON_CPU, False)
        if states[name] is not None:
            states[name].to(device)
            module.quant_state = states[name]  # the shards of the weight have no state
    if broadcasts_weights(plan):
        for name in present:
            for tensor in _tensors(states[name]):
                dist.broadcast(tensor, src=0)


def _unregister_view(module: nn.Module, args: Any, output: Any) -> None:
    """Make the weight an attribute again, as FSDP1 sets it: bitsandbytes has registered the view as a parameter.

    Its memory is freed after the forward, and a program that reads the parameters of the model would crash.
    """
    view = own_parameters(module).pop("weight", None)
    if view is not None:
        vars(module)["weight"] = view


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a ``QuantState``. With double quantization, the scales are quantized by a second state."""
    for tensor in (state.absmax, state.code, state.offset):
        if tensor is not None:
            yield tensor
    if state.state2 is not None:
        yield from _tensors(state.state2)
