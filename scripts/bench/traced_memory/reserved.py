"""Replay a recorded step through the model of torch's caching allocator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import device_memory, workspace_bytes
from hf_fsdp_plugin.tools.plan.estimate.types import DeviceMemory
from scripts.bench.allocator.caching_allocator import AllocatorSettings, CachingAllocator, OutOfDeviceMemory
from scripts.bench.allocator.caching_allocator import Block as Allocation
from scripts.bench.traced_memory.recorder import Block, Event

_REPEATS: Final = 4
"""Times that the recorded step is replayed, at most; fewer if a repetition reserves nothing more."""
_PREPARATION: Final = "preparation"
_IN_FLIGHT: Final = 2
"""All-gathers of FSDP1 whose memory waits for the computation (``_max_num_inflight_all_gathers`` in
torch/distributed/fsdp/_limiter_utils.py)."""
_TOLERANCE: Final = 0.02


def simulated_memory(
    plan: FsdpPlan,
    machine: Machine | None,
    events: Sequence[Event],
    start: int,
    is_on_device: Callable[[Block], bool],
) -> tuple[DeviceMemory, int] | None:
    """Return the memory of a device, and the reserved bytes with expandable segments; ``None`` if it is not for CUDA.

    Args:
        events: all events since the first allocation.
        start: index of the first event of the recorded step.
        is_on_device: whether a block is in the device's memory.
    """
    if plan.device_type != "cuda":
        return None

    def run(capacity: int | None = None, *, expandable: bool = False) -> CachingAllocator:
        allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable), capacity)
        replay = Replay(allocator, is_on_device, defers_frees=plan.backend == "fsdp1")
        replay.run(events, start, workspace_bytes(plan.device_type, machine))
        return allocator

    free = run()
    allocated, needed = free.peak_allocated, free.peak_reserved
    low = allocated
    while needed - low > _TOLERANCE * allocated:
        limit = (low + needed) // 2
        try:
            run(limit)
            needed = limit
        except OutOfDeviceMemory:
            low = limit
    found = device_memory(plan, machine, allocated)
    assert found is not None, "the plan is for CUDA"
    found = replace(found, reserved=free.peak_reserved, needed=needed)
    return found, run(expandable=True).peak_reserved


class Replay:
    """Recorded events as calls of an allocator."""

    def __init__(
        self, allocator: CachingAllocator, is_on_device: Callable[[Block], bool], *, defers_frees: bool
    ) -> None:
        """Create a replay. ``defers_frees``: memory of other streams waits for the computation when it is freed."""
        self._allocator, self._is_on_device, self._defers_frees = allocator, is_on_device, defers_frees
        self._live: dict[int, Allocation] = {}
        self._left: defaultdict[int, list[Allocation]] = defaultdict(list)
        """Size -> what a repetition of the step has allocated for the next one."""

    def run(self, events: Sequence[Event], start: int, workspaces: Sequence[int]) -> None:
        """Replay preparation and first step, then the recorded step until it is steady.

        Args:
            workspaces: bytes that libraries allocate in the first forward and in the first backward pass.
        """
        prepared = list(takewhile(lambda event: event.where == _PREPARATION, events[:start]))
        ended = {id(event.block) for event in prepared if event.sign < 0}
        # The whole model is never on the device: parameters are moved one by one, or loaded into shards.
        self._replay(event for event in prepared if id(event.block) not in ended)
        first = dict(zip(("forward", "backward"), workspaces, strict=True))
        for event in events[len(prepared) : start]:
            if size := first.pop(event.where.partition(" ")[0], 0):
                self._allocator.malloc(size)
            self._replay((event,))
        self._allocator.synchronize()
        self._allocator.peak_allocated = self._allocator.allocated
        for _ in range(_REPEATS):
            before = self._allocator.peak_reserved
            self._replay(events[start:])
            self._allocator.synchronize()  # the next step begins when the loss was read
            for event in events[start:]:
                if event.sign > 0 and (found := self._live.pop(id(event.block), None)) is not None:
                    self._left[event.block.size].append(found)
            if self._allocator.peak_reserved == before:
                break

    def _replay(self, events: Iterable[Event]) -> None:
        for event in events:
            block = event.block
            if not self._is_on_device(block):
                continue
            if event.sign > 0:
                self._live[id(block)] = self._allocator.malloc(block.size, block.stream)
                continue
            found = self._live.pop(id(block), None)
            if found is None and self._left[block.size]:
                found = self._left[block.size].pop(0)
            if found is not None:
                if self._defers_frees:
                    self._allocator.record_stream(found, 0)
                self._allocator.free(found)
                self._allocator.synchronize(0, leave=_IN_FLIGHT)
