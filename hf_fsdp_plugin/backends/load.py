"""Prepare parameters and buffers for sharding: allocate, broadcast from rank 0, cast.

Parameters that all ranks have mapped from equal files (:mod:`hf_fsdp_plugin.backends.file_weights`) are not broadcast.

This implements ``sync_module_states`` and the second half of ``cpu_ram_efficient_loading``. One unit is broadcast at a
time, so a rank holds at most one whole unit on its device. FSDP1's own broadcast rejects CPU modules, and FSDP2 has no
broadcast. This broadcast works for both versions and every device type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.bits import hash_bits, sum_bits
from hf_fsdp_plugin.backends.file_shards import FileShards
from hf_fsdp_plugin.backends.file_views import FileView, file_views
from hf_fsdp_plugin.backends.file_weights import find_file_weights
from hf_fsdp_plugin.backends.memory_maps import MemoryMaps, ParameterMemory, parameter_memory
from hf_fsdp_plugin.backends.pinned_windows import PinnedWindows, copy_to_device
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.torch_private.modules import buffers as own_buffers
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

BROADCAST_ATTRIBUTE = "_hf_fsdp_broadcast"
"""Attribute of a sharded model that contains its :class:`BroadcastRecord`."""
_FILE_SHARDS_ATTRIBUTE = "_hf_fsdp_file_shards"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedWeights:
    """What this rank received from rank 0.

    Attributes:
        num_tensors: number of parameters and buffers.
        num_filled: number of these that were on the meta device on this rank before the broadcast.
        num_from_files: number of parameters that were not broadcast, because all ranks have mapped them from equal
            files.
        before: which memory the parameters of this rank were in before the broadcast.
        checksum: checksum of the bits of all tensors. Equal on all ranks if all received the same weights.
        bit_sum: sum of the bits of the parameters of all units just before they were sharded, without those that every
            rank took from a file; ``None`` if unknown. It is modulo 2**64, as the next one.
        shard_bit_sum: sum of the bits of the shards that this rank took from whole weights; ``None`` if unknown.
    """

    num_tensors: int
    num_filled: int
    num_from_files: int
    before: ParameterMemory | None
    checksum: int
    bit_sum: int | None
    shard_bit_sum: int | None


@dataclass(kw_only=True, slots=True)
class BroadcastRecord:
    """Collects what this rank receives. Hashes and sums stay on the device, because the host would wait for each."""

    num_tensors: int = 0
    num_filled: int = 0
    num_from_files: int = 0
    before: ParameterMemory | None = None
    _checksum: torch.Tensor | int = 0
    _unit_sum: torch.Tensor | int | None = 0
    _shard_sum: torch.Tensor | int | None = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.num_tensors += 1
        if tensor.numel():
            # Rotate before each XOR: otherwise two equal tensors would leave the checksum unchanged.
            self._checksum = hash_bits(tensor) ^ (self._checksum << 1) ^ (self._checksum >> 63 & 1)

    def add_unit(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add the parameters of a unit to the sum that the sum over all shards must equal."""
        added = sum_bits(parameters)
        self._unit_sum = None if self._unit_sum is None or added is None else self._unit_sum + added

    def add_shard(self, bits: torch.Tensor | int | None) -> None:
        """Add the sum of the bits of a shard that this rank took from a whole weight."""
        if isinstance(bits, int):
            bits = torch.tensor((bits + (1 << 63)) % (1 << 64) - (1 << 63), device="cpu")  # in the range of int64
        self._shard_sum = None if self._shard_sum is None or bits is None else self._shard_sum + bits

    def read(self) -> ReceivedWeights:
        """Return the hashes and sums as numbers, with one copy from the device."""
        totals = [self._checksum, self._unit_sum, self._shard_sum]
        known = [torch.as_tensor(total, dtype=torch.int64) for total in totals if total is not None]
        device = next((total.device for total in known if total.device.type != "cpu"), torch.device("cpu"))
        numbers = iter(torch.stack([total.to(device) for total in known]).tolist())
        checksum, bit_sum, shard_bit_sum = (None if total is None else next(numbers) for total in totals)
        return ReceivedWeights(
            num_tensors=self.num_tensors,
            num_filled=self.num_filled,
            num_from_files=self.num_from_files,
            before=self.before,
            checksum=checksum or 0,
            bit_sum=bit_sum,
            shard_bit_sum=shard_bit_sum,
        )


_PART = 1 << 18
"""Elements that are copied at a time."""


def broadcasts(plan: FsdpPlan) -> bool:
    """Whether all ranks get rank 0's weights and buffers."""
    return plan.ram_efficient or plan.sync_module_states


class WeightLoader:
    """Prepares the parameters and buffers of one model for sharding.

    Collective: its methods are called in the same order on all ranks.

    Attributes:
        record: what this rank received.
        file_shards: the shards that are mapped from files.
    """

    def __init__(self, plan: FsdpPlan, model: nn.Module, device: torch.device, *, find_views: bool = True) -> None:
        self._plan = plan
        self._model = model
        self._device = device
        self._has_meta_parameters = any(parameter.is_meta for parameter in model.parameters())
        maps = MemoryMaps.read(private_bytes=True)
        self.record = BroadcastRecord(before=parameter_memory(model.parameters(), maps) if plan.ram_efficient else None)
        self.file_shards = FileShards()
        self._windows = PinnedWindows()
        # Without the parameters that were prepared: a new parameter may get the id of one that was freed.
        self._views = self._find_views(maps) if find_views else {}
        self._read_later: dict[int, FileView] = {}

    def _find_views(self, maps: MemoryMaps) -> dict[int, FileView]:
        """Return the views of files by id of the parameter; if the plan broadcasts, those that all ranks have."""
        if broadcasts(self._plan):
            return find_file_weights(self._model, self._device, maps)
        parameters = list(self._model.parameters())
        views = zip(parameters, file_views(parameters, maps), strict=True)
        return {id(parameter): view for parameter, view in views if view is not None}

    def prepare_buffers(self) -> None:
        """Move all buffers to the device, and overwrite them with rank 0's values if the plan broadcasts.

        This includes non-persistent buffers (rotary frequencies, position ids). No checkpoint contains them: on ranks
        that loaded no weights they are zeros, and the loss would be NaN or wrong.
        """
        for module in self._model.modules():
            registered = own_buffers(module)
            for name, buffer in registered.items():
                if buffer is None:
                    continue
                if not broadcasts(self._plan):
                    registered[name] = buffer if buffer.is_meta else self._on_device(buffer)
                else:
                    self.record.num_filled += buffer.is_meta
                    registered[name] = self._broadcast(buffer)

    def prepare_unit(self, unit: UnitPlan, on_read: Collection[int] = ()) -> list[nn.Parameter]:
        """Allocate, broadcast and cast the parameters of one unit before it is sharded.

        Args:
            on_read: ids of the parameters of which each rank takes only its shard. They are left as they are.

        Returns:
            The parameters that were left.
        """
        parameters = self._prepare_parameters(unit.parameters, on_read)
        prepared = [parameter for parameter in parameters if id(parameter) not in on_read]
        cast_to_master(self._plan, prepared)
        if prepared and broadcasts(self._plan):
            self.record.add_unit(prepared)
        return [parameter for parameter in parameters if id(parameter) in on_read]

    def prepare_ignored(self) -> list[nn.Parameter]:
        """Move the ignored parameters to the device, which FSDP does not do, and average their gradients in hooks.

        They are cast to the dtype in which the optimizer updates them, as shards are.

        Returns each parameter once.
        """
        views = frozenset(self._views)
        parameters = self._prepare_parameters(self._plan.ignored_parameters)
        for parameter in parameters:
            # Every rank keeps these parameters. A view of a file would follow changes of the file.
            dtype = master_dtype(self._plan, parameter)
            copies = id(parameter) in views
            parameter.data = self._on_device(parameter.data).to(dtype, copy=copies and self._device.type == "cpu")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_average_gradient)
        return parameters

    def can_read_parts(self, parameter: nn.Parameter) -> bool:
        """Whether each rank can take its own part from the whole parameter in host memory, which is not broadcast."""
        is_plain = type(parameter.data) is torch.Tensor and parameter.device.type == "cpu"
        is_own = not broadcasts(self._plan) or id(parameter) in self._views
        return is_own and is_plain and parameter.is_contiguous()

    def shard_of(
        self, parameter: nn.Parameter, part: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return this rank's part of a parameter in ``dtype`` on ``device``: mapped from its file, or copied."""
        view = self._read_later.pop(id(parameter), None)
        # Offloaded shards of an accelerator are pinned, which copies them at once.
        if view is not None and dtype == part.dtype and self._plan.device_type == "cpu":
            offset = part.data_ptr() - parameter.data_ptr()
            mapped = self.file_shards.map(view, offset, part)
            if mapped is not None:
                return mapped
        local = torch.empty(part.shape, dtype=dtype, device=device)
        self.copy_part(local, part)
        return local

    def copy_part(self, into: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this rank's part of a parameter, cast it, and record its bits."""
        if into.device.type != "cpu" and part.device.type == "cpu":
            self._windows.copy(into, part)
            if broadcasts(self._plan):
                self.record.add_shard(sum_bits([into]))
        elif not broadcasts(self._plan):
            into.copy_(part)
        elif into.device.type != "cpu" or not (part.is_contiguous() and into.is_contiguous()):
            self.record.add_shard(sum_bits([into.copy_(part)]))
        else:
            # The bits of a small piece are added while it is still in the processor's cache.
            pieces = zip(into.view(-1).split(_PART), part.view(-1).split(_PART), strict=True)
            self.record.add_shard(sum_bits(piece.copy_(source) for piece, source in pieces))

    def _prepare_parameters(self, names: Iterable[str], on_read: Collection[int] = ()) -> list[nn.Parameter]:
        """Allocate and broadcast the named parameters as planned. Returns each once, in the same order on all ranks."""
        names = list(names)
        if self._plan.ram_efficient and self._has_meta_parameters:
            materialize(self._model, names, self._device, self.record)
        parameters = list({id(parameter): parameter for parameter in map(self._model.get_parameter, names)}.values())
        for parameter in parameters:
            view = self._views.pop(id(parameter), None)
            if view is not None and id(parameter) in on_read:
                self._read_later[id(parameter)] = view
            if not broadcasts(self._plan):
                continue
            if view is None:
                parameter.data = self._broadcast(_without_subclass(parameter.data))
                continue
            self.record.num_from_files += 1
            if id(parameter) not in on_read:
                parameter.data = self._on_device(parameter.data)
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


def read_in_background(model: nn.Module, loader: WeightLoader) -> None:
    """Set the record of the loader as attribute of the sharded model, and read its mapped shards in the background."""
    setattr(model, BROADCAST_ATTRIBUTE, loader.record)
    if loader.file_shards.start():
        setattr(model, _FILE_SHARDS_ATTRIBUTE, loader.file_shards)
        model.register_state_dict_pre_hook(_before_state_dict)


def _before_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    finish_reading(model)


def finish_reading(model: nn.Module) -> None:
    """Wait until the shards of a model are read from their files. Not collective.

    Raises:
        CheckpointError: a file was changed meanwhile, or could not be read.
    """
    shards: FileShards | None = model.__dict__.get(_FILE_SHARDS_ATTRIBUTE)
    if shards is not None:
        shards.wait()
        delattr(model, _FILE_SHARDS_ATTRIBUTE)
        record: BroadcastRecord = getattr(model, BROADCAST_ATTRIBUTE)
        record.add_shard(shards.bit_sum)


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


def master_dtype(plan: FsdpPlan, parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype in which the optimizer updates a parameter; for others, the dtype that it has."""
    master = torch_dtype(plan.precision.master)
    is_updated = parameter.requires_grad and parameter.is_floating_point()
    return parameter.dtype if master is None or not is_updated else master


def cast_to_master(plan: FsdpPlan, parameters: Iterable[nn.Parameter]) -> None:
    """Cast trainable floating-point parameters in place to the dtype in which the optimizer updates them.

    The optimizer updates the shards. In bf16, updates smaller than bf16's resolution would be lost.
    """
    for parameter in parameters:
        dtype = master_dtype(plan, parameter)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


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
