"""``trace_memory``: the memory of one rank, from a step under fake tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.torch_types import device_mesh
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.types import MEMORY_KINDS, MemoryKind, Moment, Workload
from scripts.bench.traced_memory.device import Device
from scripts.bench.traced_memory.places import Places
from scripts.bench.traced_memory.private import FakeTensorMode, fake_tensor_group
from scripts.bench.traced_memory.recorder import Event, Recorder
from scripts.bench.traced_memory.reserved import DeviceMemory, simulated_memory
from scripts.bench.traced_memory.step import Step


class CannotTrace(Exception):
    """A step cannot run under fake tensors, for example because the model reads values of tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMemory:
    """Memory of the rank that needs most, in the steady state: from the second step on.

    Attributes:
        peak: the moment with the most memory.
        timeline: moments in the order of a step.
        host_bytes: memory of the host per rank that offload uses.
        device: what the allocator of a device holds; ``None`` for other devices than those of CUDA.
        expandable: reserved bytes of the allocator with ``expandable_segments:True``.
    """

    peak: Moment
    timeline: tuple[Moment, ...]
    host_bytes: int
    device: DeviceMemory | None
    expandable: int | None


def trace_memory(plan: FsdpPlan, model: nn.Module, workload: Workload, machine: Machine | None = None) -> TracedMemory:
    """Return the memory of the rank that needs most, from a training step of ``model`` under fake tensors.

    The backends shard a copy of the model in a fake process group of ``plan.world_size`` ranks. A first step creates
    the state of the optimizer and of FSDP; the second one is recorded. Needs no memory for tensors.

    Args:
        model: the model that was planned, for example on the meta device. It is not changed.
        machine: the figures of the GPUs of a plan for CUDA; ``None`` if they are unknown.

    Raises:
        CannotTrace: this process already has a process group, or the step cannot run under fake tensors.
        SpecError: the backend refuses the optimizer.
    """
    if dist.is_initialized():
        raise CannotTrace("this process is a rank of a run, so it cannot be rank 0 of a world that does not exist.")
    device = Device(plan, machine)
    events, start = _record(_traceable(plan), model, workload, device)
    found, host = moments(events, start, device)
    simulated = simulated_memory(plan, machine, events, start, lambda block: device.kind_of(block) is not None)
    return TracedMemory(
        peak=max(found, key=lambda moment: moment.bytes),
        timeline=merged(found, lambda where: where.endswith(f" of {plan.model_class}")),
        host_bytes=host,
        device=simulated and simulated[0],
        expandable=simulated and simulated[1],
    )


def _traceable(plan: FsdpPlan) -> FsdpPlan:
    """Return the plan for the CPU, without collectives whose results the program reads."""
    return replace(
        plan,
        device_type="cpu",
        ram_efficient=False,
        sync_module_states=False,
        pin_memory=False,
        offload_params=plan.offload_params and plan.device_type == "cpu",
    )


def _record(plan: FsdpPlan, model: nn.Module, workload: Workload, device: Device) -> tuple[list[Event], int]:
    """Return all events since the model was created, and the index of the recorded step's first one."""
    places = Places(plan.model_class)
    recorder = Recorder(places.now, on_cpu=device.is_cpu, shard_copies=device.shard_copies)
    try:
        with fake_tensor_group(plan.world_size):
            device_mesh(plan)
            with FakeTensorMode(), recorder, unpacked_samples(), device.functions(recorder):
                step = Step(plan, model, workload, recorder, places, device)
                step.run(1)
                step.label()
                start = len(recorder.events)
                step.run(workload.accumulation)
                return list(recorder.finish()), start
    except SpecError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        message = f"a step of {plan.model_class} cannot be traced: {type(error).__name__}: {reason}"
        raise CannotTrace(message) from error


@contextmanager
def unpacked_samples() -> Iterator[None]:
    """Make Transformers create the attention mask of samples that are not packed.

    Transformers looks for packed samples in the position ids. For fake tensors it assumes that there are some, and
    creates a mask of all pairs of tokens, which real tensors without packing do not need.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original


class _Held:
    """Bytes that are held: on the device by kind, and on the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.by_kind: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.by_kind["other"] = device.framework_bytes
        self.total, self.host = device.framework_bytes, 0

    def apply(self, event: Event) -> None:
        size = event.sign * self._device.size_of(event.block)
        kind = self._device.kind_of(event.block)
        if kind is None:
            self.host += size
        else:
            self.by_kind[kind] += size
            self.total += size


def moments(events: Sequence[Event], start: int, device: Device) -> tuple[list[Moment], int]:
    """Return the moment with the most memory of each part of a step, in order, and the peak of host memory.

    Args:
        events: all events since the first allocation.
        start: index of the first event of the step.
    """
    held = _Held(device)
    for event in events[:start]:
        held.apply(event)
    found, host = [], held.host
    for where, group in groupby(events[start:], key=lambda event: event.where):
        largest, total = dict(held.by_kind), -1
        for event in group:
            held.apply(event)
            host = max(host, held.host)
            if event.sign > 0 and held.total > total:
                largest, total = dict(held.by_kind), held.total
        found.append(Moment(where=where, bytes_by_kind=largest))
    return found, host


def merged(found: Iterable[Moment], is_root: Callable[[str], bool]) -> tuple[Moment, ...]:
    """Return the moments without those of the root between two units: of each of its parts, the largest is kept."""
    largest: dict[str, Moment] = {}
    listed = list(found)
    for moment in listed:
        known = largest.get(moment.where)
        largest[moment.where] = moment if known is None or moment.bytes > known.bytes else known
    kept: list[Moment] = []
    for moment in listed:
        if is_root(moment.where) and moment is not largest[moment.where]:
            continue
        if kept and kept[-1].where == moment.where:
            kept[-1] = max(kept[-1], moment, key=lambda one: one.bytes)
        else:
            kept.append(moment)
    return tuple(kept)
