"""What ``hf-fsdp plan`` prints: whether it fits and what limits it, then tables; or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.plan_time import time_json, time_text
from hf_fsdp_plugin.cli.terminal import colored, text_width
from hf_fsdp_plugin.estimate.results import (
    MEMORY_KINDS,
    CollectiveKind,
    CommunicationEstimate,
    DeviceMemory,
    MemoryEstimate,
    MemoryKind,
    Moment,
    TimeEstimate,
)
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_bytes, format_count, format_table, plural, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.time import ScalingRow

_KIND_NAMES: Final[dict[MemoryKind, str]] = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered units and buffers",
    "other": "other",
}
_HEADROOM: Final = 0.9
"""Part of a device's memory above which a peak that fits is called close, if only allocated memory is predicted."""
_WORTHWHILE: Final = 0.03
"""Smallest part of the reserved memory for which expandable segments are suggested."""
_EXPANDABLE: Final = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Everything that the verb predicts.

    Attributes:
        gpu_memory: bytes of one device; ``None`` if unknown.
        machine: the machine that was named.
        time: ``None`` if no machine is given, or if the operations of the model cannot be counted.
        scaling: the time on other numbers of ranks.
    """

    plan: FsdpPlan
    workload: Workload
    memory: MemoryEstimate
    communication: CommunicationEstimate
    gpu_memory: int | None
    machine: str | None = None
    time: TimeEstimate | None = None
    scaling: tuple[ScalingRow, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory that a step needs at least; ``None`` if that is unknown."""
        return None if self.gpu_memory is None else self.memory.needed_bytes <= self.gpu_memory


def plan_json(prediction: Prediction, problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the object of ``plan --json``."""
    memory = prediction.memory
    return {
        "ok": True,
        "per_rank": memory.to_json(),
        "device_memory": None if memory.device is None else memory.device.to_json(),
        "suggestions": list(_suggestions(prediction)),
        "peak_at": memory.peak.where,
        "method": memory.method,
        "fits": prediction.fits,
        "gpu_memory_bytes": prediction.gpu_memory,
        "limited_by": {"kind": _largest(memory.peak), "moment": memory.peak.where},
        "timeline": [
            {"where": moment.where, "bytes": moment.bytes, **{f"{k}_bytes": v for k, v in moment.bytes_by_kind.items()}}
            for moment in memory.timeline
        ],
        "communication": prediction.communication.to_json(),
        **time_json(prediction.time, list(prediction.scaling)),
        "assumptions": list(memory.assumptions),
        "workload": asdict(prediction.workload),
        "plan": prediction.plan.to_json(),
        "problems": [problem.to_json() for problem in problems],
    }


def plan_text(prediction: Prediction) -> str:
    """Return the text of the verb."""
    width = text_width()
    memory = prediction.memory
    lines = [
        *wrap_words(_verdict(memory, prediction.gpu_memory), width, ""),
        "",
        *wrap_words(_subject(prediction.plan, prediction.workload), width, ""),
        "",
        _kinds_table(memory),
        "",
        _moments_table(memory),
        *([] if memory.device is None else ["", _device_table(memory.device)]),
        *(line for text in _suggestions(prediction) for line in ["", *wrap_words(text, width, "")]),
        *(["", f"CPU memory per rank: {_size(memory.host_bytes)}"] if memory.host_bytes else []),
        "",
        _communication_table(prediction.communication),
        "",
        *time_text(prediction.time, list(prediction.scaling), prediction.plan.world_size, prediction.machine),
        *(["", "assumptions"] if memory.assumptions else []),
        *(line for text in memory.assumptions for line in wrap_words(f"  {text}", width, "  ")),
    ]
    return "\n".join(lines)


def _communication_table(communication: CommunicationEstimate) -> str:
    """Return calls and bytes of each collective per rank and optimizer step."""
    rows = [("communication per rank and step", "calls", "size")]
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    for kind in kinds:
        calls = sum(each.calls for each in communication.collectives if each.kind == kind)
        if calls:
            rows.append((kind.replace("_", "-"), f"{calls:,}", _size(communication.bytes_of(kind))))
    return format_table(rows, right=(1, 2)) if len(rows) > 1 else "no communication"


def _verdict(memory: MemoryEstimate, gpu_memory: int | None) -> str:
    """Return whether it fits, and what limits it."""
    peak = memory.peak
    largest = _KIND_NAMES[_largest(peak)]
    size = _size(peak.bytes_by_kind[_largest(peak)])
    why = f"Allocated memory has its peak in the {peak.where}; most of it is {largest} ({size})."
    if gpu_memory is None:
        return f"Each rank needs {_size(memory.needed_bytes)}. {why} Set --gpu-memory to see whether it fits."
    part = memory.needed_bytes / gpu_memory
    need = f"each rank needs {_size(memory.needed_bytes)} of {_size(gpu_memory)}"
    if part > 1:
        missing = _size(memory.needed_bytes - gpu_memory)
        return f"{colored('It does not fit', 'red')}: {need}, {missing} too much. {why}"
    enough = memory.total_bytes <= gpu_memory and (memory.device is not None or part <= _HEADROOM)
    answer = colored("It fits", "green") if enough else colored("It just fits", "yellow")
    left = f"{_size(gpu_memory - memory.needed_bytes)} are left"
    if memory.total_bytes > gpu_memory:
        left += f", but {_size(memory.total_bytes)} would be used: torch's allocator must return cached memory in each "
        left += "step, which waits for the GPU"
    return f"{answer}: {need} ({part:.0%}), {left}. {why}"


def _device_table(device: DeviceMemory) -> str:
    """Return what the device holds, in the order in which it adds up."""
    rows = [
        ("memory of a device", "size"),
        ("allocated by torch at the peak", _size(device.allocated)),
        ("reserved by torch's allocator, with that", _size(device.reserved)),
        ("CUDA context", _size(device.context)),
        ("NCCL", _size(device.nccl)),
        ("total", _size(device.total)),
        ("needed, if cached memory is returned", _size(device.total_needed)),
    ]
    return format_table(rows, right=(1,))


def _suggestions(prediction: Prediction) -> Iterator[str]:
    device = prediction.memory.device
    if device is None or device.expandable is None:
        return
    if device.reserved - device.expandable > _WORTHWHILE * device.reserved:
        saved = f"{_size(device.expandable)} instead of {_size(device.reserved)}"
        yield f"With {_EXPANDABLE} in the environment, torch's allocator reserves {saved}."


def _subject(plan: FsdpPlan, workload: Workload) -> str:
    mesh = f" ({plan.mesh.replicate} replicas × {plan.mesh.shard} shards)" if plan.mesh.replicate > 1 else ""
    steps = f" × {plural(workload.accumulation, 'micro-batch', 'micro-batches')}" if workload.accumulation > 1 else ""
    precision = plan.precision.param if plan.precision.param != "unchanged" else "the model's dtype"
    return (
        f"{plan.model_class}, {format_count(plan.num_params)} parameters, {plan.backend.upper()} {plan.strategy} on "
        f"{plural(plan.world_size, f'{plan.device_type} rank')}{mesh}, {precision}, micro-batch {workload.micro_batch} "
        f"× {workload.seq_len:,} tokens{steps}, {workload.optimizer}"
    )


def _kinds_table(memory: MemoryEstimate) -> str:
    peak = memory.peak
    rows = [("memory per rank at the peak", "size", "part")]
    for kind in MEMORY_KINDS:
        size = peak.bytes_by_kind[kind]
        rows.append((_KIND_NAMES[kind], _size(size), f"{size / max(peak.bytes, 1):.0%}"))
    rows.append(("total", _size(peak.bytes), ""))
    return format_table(rows, right=(1, 2))


def _moments_table(memory: MemoryEstimate) -> str:
    """Return the largest moment of each part of a step."""
    rows = [("largest in", "size", "at")]
    for part in ("forward", "backward", "clipping", "optimizer step"):
        moments = [moment for moment in memory.timeline if moment.where.startswith(part)]
        if moments:
            most = max(moments, key=lambda moment: moment.bytes)
            rows.append((part, _size(most.bytes), most.where.removeprefix(f"{part} of ")))
    return format_table(rows, right=(1,))


def _largest(moment: Moment) -> MemoryKind:
    return max(MEMORY_KINDS, key=lambda kind: moment.bytes_by_kind[kind])


def _size(size: int) -> str:
    return format_bytes(size, binary=True)
