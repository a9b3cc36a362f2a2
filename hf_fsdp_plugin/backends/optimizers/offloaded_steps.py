"""Steps of an optimizer whose state is in host memory: window by window on the device, with copies beside the updates.

While a window is updated, the state of the next one is copied to the device, and that of the one before back to the
host. The device has the state of two windows, and no copy lets the host wait. The update is the optimizer's own step
with the parameters of one window, so it must not read other parameters.

Each window crosses the bus twice, once in each direction. An update on the CPU would send less, but reads and writes
all values in host memory, which the ranks of a machine share: docs/planning.md compares the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.optimizers.parameters import StepHooks, parameters_in, step_without_hooks
from hf_fsdp_plugin.devices import Device
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.torch_private.functions import with_local_tensor
from hf_fsdp_plugin.torch_private.modules import local_tensor

WINDOW = 64 << 20
"""Bytes of the shards that are updated together, unless a single one has more. AdamW's state has twice as many."""
_ALIGNMENT = 64
_Window = Sequence[tuple[int, torch.Tensor]]
"""Parameters that are updated together, with the numbers of their groups."""


def windows_of(sizes: Iterable[int]) -> list[list[int]]:
    """Return the positions of the parameters of each window, from their bytes on this rank."""
    windows: list[list[int]] = []
    num_bytes = 0
    for position, size in enumerate(sizes):
        if not windows or num_bytes + size > WINDOW:
            windows.append([])
            num_bytes = 0
        windows[-1].append(position)
        num_bytes += size
    return windows


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the state of a parameter, in host memory, and this rank's part of it on the device."""

    parameter: torch.Tensor
    key: str
    value: torch.Tensor
    on_device: torch.Tensor


class OffloadedSteps:
    """Hooks of an optimizer's step, which then updates nothing itself: all parameters are updated after it.

    Args:
        inner: hooks around the update of each window: those of a step on plain tensors.
        pinned: whether the state is in page-locked memory. Otherwise the host waits for each copy.
    """

    def __init__(self, inner: StepHooks | None, device: Device, *, pinned: bool) -> None:
        self._inner, self._device, self._pinned = inner, device, pinned
        self._groups: list[list[torch.Tensor]] = []
        self._arrived = self._left = device.record_event()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)  # the last step may have raised an error, without its hook at the end
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Update all parameters. They are not updated before the step, because hooks of it wait for readers."""
        members = [(number, p) for number, group in enumerate(self._groups) for p in group if p.grad is not None]
        positions = windows_of(local_tensor(parameter).nbytes for _, parameter in members)
        windows = [[members[position] for position in window] for window in positions]
        try:
            coming = self._fetch(optimizer, windows[0]) if windows else []
            for window, following in zip(windows, [*windows[1:], []], strict=True):
                fetched, arrived = coming, self._arrived
                self._left.wait()  # the state of the following window gets the memory of the one before
                coming = self._fetch(optimizer, following)
                arrived.wait()
                self._update(optimizer, window, fetched)
            self._left.wait()
        finally:
            self._restore(optimizer)

    def wait(self) -> None:
        """Wait until the state of the last step has arrived in host memory."""
        self._left.synchronize()

    def _restore(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = parameters
        self._groups = []

    def _fetch(self, optimizer: Optimizer, window: _Window) -> list[_Entry]:
        """Start to copy the state of a window to the device, into new memory."""
        entries = []
        for _, parameter in window:
            for key, value in _tensors_of(optimizer, parameter):
                if (local := local_tensor(value)).device.type == "cpu":
                    on_device = torch.empty_like(local, device=local_tensor(parameter).device)
                    entries.append(_Entry(parameter, key, value, on_device))
        allocated, before = self._device.record_event(), self._arrived
        with self._device.new_stream():
            allocated.wait()
            before.wait()  # copies of two windows at once would both be slower
            for entry in entries:
                entry.on_device.copy_(local_tensor(entry.value), non_blocking=True)
            self._arrived = self._device.record_event()
        return entries

    def _update(self, optimizer: Optimizer, window: _Window, fetched: list[_Entry]) -> None:
        """Update the parameters of a window."""
        for entry in fetched:
            optimizer.state[entry.parameter][entry.key] = _like(entry.value, entry.on_device)
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [parameter for of, parameter in window if of == number]
        if self._inner is not None:
            self._inner.before(optimizer, (optimizer,), {})
        step_without_hooks(optimizer)
        if self._inner is not None:
            self._inner.after(optimizer, (optimizer,), {})
        self._store(optimizer, window, {(id(entry.parameter), entry.key): entry.value for entry in fetched})

    def _store(self, optimizer: Optimizer, window: _Window, held: Mapping[tuple[int, str], torch.Tensor]) -> None:
        """Start to copy the state of a window to the host: to the memory that it came from, or to new memory."""
        pairs, new = [], []
        for _, parameter in window:
            for key, value in _tensors_of(optimizer, parameter):
                host = held.get((id(parameter), key))
                if host is not None and self._can_hold(host, value):
                    optimizer.state[parameter][key] = host
                    pairs.append((local_tensor(host), local_tensor(value)))
                else:
                    new.append((parameter, key, value))
        for (parameter, key, value), local in zip(new, self._allocate([value for *_, value in new]), strict=True):
            optimizer.state[parameter][key] = _like(value, local)
            pairs.append((local, local_tensor(value)))
        updated = self._device.record_event()
        with self._device.new_stream():
            updated.wait()
            for local, on_device in pairs:
                local.copy_(on_device, non_blocking=True)
            self._left = self._device.record_event()

    def _can_hold(self, host: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a value can be copied to the host memory of another one, as the same kind of tensor."""
        old, new = local_tensor(host), local_tensor(value)
        layouts = [(type(each), each.shape, each.stride(), each.dtype) for each in (old, new)]
        is_pinned = not self._pinned or old.is_pinned()
        return layouts[0] == layouts[1] and isinstance(host, DTensor) == isinstance(value, DTensor) and is_pinned

    def _allocate(self, values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield host memory for each shard, in one piece: torch rounds page-locked memory up to powers of two."""
        tensors = [local_tensor(value) for value in values]
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        for tensor, part in zip(tensors, memory.split(sizes), strict=True):
            yield part[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _is_moved(value: Any) -> bool:
    """Whether a value of a state is kept in host memory. Scalars stay where the optimizer has them."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _tensors_of(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    state = optimizer.state.get(parameter, {})
    yield from [(key, value) for key, value in state.items() if _is_moved(value)]


def _like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return with_local_tensor(value, local) if isinstance(value, DTensor) else local


def offload_state(optimizer: Optimizer, inner: StepHooks | None, device: Device, *, pinned: bool) -> OffloadedSteps:
    """Keep the state of an optimizer in host memory from its next step on, and return the hooks of its steps."""
    steps = OffloadedSteps(inner, device, pinned=pinned)
    parts_of(optimizer).put(steps)
    optimizer.register_state_dict_pre_hook(lambda _: steps.wait())
    return steps


def wait_for_state(optimizer: Optimizer) -> bool:
    """Return whether the state is kept in host memory. If so, wait until that of the last step has arrived there."""
    if (steps := find_part(optimizer, OffloadedSteps)) is not None:
        steps.wait()
    return steps is not None


def load_on_host(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict into an optimizer whose state is kept in host memory.

    ``load_state_dict`` alone would move all tensors to the device. They get the dtypes that it would give them.
    """
    parameters = parameters_in(optimizer)
    states: dict[int, dict[str, Any]] = state_dict["state"]
    small = {index: {key: v for key, v in entry.items() if not _is_moved(v)} for index, entry in states.items()}
    optimizer.load_state_dict({**state_dict, "state": small})
    for index, entry in states.items():
        parameter = parameters[index]
        dtype = parameter.dtype if parameter.is_floating_point() else None
        optimizer.state[parameter].update({key: v.to(dtype=dtype) for key, v in entry.items() if _is_moved(v)})
