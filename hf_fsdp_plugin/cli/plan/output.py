"""What ``hf-fsdp plan`` prints and writes: whether it fits and what limits it, then tables; or JSON; and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.output import colored, text_width
from hf_fsdp_plugin.cli.plan.arguments import Planned
from hf_fsdp_plugin.estimate.results import (
    KIND_NAMES,
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
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_bytes, format_count, format_seconds, format_table, plural, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.time import ScalingRow

_HEADROOM: Final = 0.9
"""Part of a device's memory above which a peak that fits is called close, if only allocated memory is predicted."""
_SCALING_FIGURES: Final = ("step_seconds", "tokens_per_second", "exposed_seconds", "mfu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Everything that the verb predicts.

    Attributes:
        time: ``None`` if no machine is given, or if the operations of the model cannot be counted.
        scaling: the time on other numbers of ranks.
    """

    planned: Planned
    memory: MemoryEstimate
    communication: CommunicationEstimate
    time: TimeEstimate | None = None
    scaling: tuple[ScalingRow, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory that a step needs at least; ``None`` if that is unknown."""
        gpu_memory = self.planned.gpu_memory
        return None if gpu_memory is None else self.memory.needed_bytes <= gpu_memory


def plan_json(prediction: Prediction, problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the object of ``plan --json``."""
    planned, memory, time = prediction.planned, prediction.memory, prediction.time
    seconds = ("low", "high", "compute", "communication", "exposed")
    return {
        "ok": True,
        "per_rank": memory.to_json(),
        "device_memory": None if memory.device is None else memory.device.to_json(),
        "suggestions": [],
        "peak_at": memory.peak.where,
        "method": "closed_form",
        "fits": prediction.fits,
        "gpu_memory_bytes": planned.gpu_memory,
        "limited_by": {"kind": _largest(memory.peak), "moment": memory.peak.where},
        "timeline": [
            {"where": moment.where, "bytes": moment.bytes, **{f"{k}_bytes": v for k, v in moment.bytes_by_kind.items()}}
            for moment in memory.timeline
        ],
        "communication": prediction.communication.to_json(),
        "step_seconds": time and time.step_seconds,
        "tokens_per_second": time and time.tokens_per_second,
        "machine": time and time.machine,
        "time": time
        and {
            **{f"{name}_seconds": getattr(time, f"{name}_seconds") for name in seconds},
            "evidence": time.evidence,
            "mfu": time.mfu,
        },
        "scaling": [
            {
                **{name: getattr(row, name) for name in ("world_size", "efficiency")},
                **{name: getattr(row.estimate, name) for name in _SCALING_FIGURES},
            }
            for row in prediction.scaling
        ],
        "assumptions": list(memory.assumptions),
        "workload": asdict(planned.workload),
        "plan": planned.plan.to_json(),
        "problems": [problem.to_json() for problem in problems],
    }


def plan_text(prediction: Prediction) -> str:
    """Return the text of the verb."""
    width = text_width()
    planned, memory = prediction.planned, prediction.memory
    lines = [
        *wrap_words(_verdict(memory, planned.gpu_memory), width, ""),
        "",
        *wrap_words(_subject(planned.plan, planned.workload), width, ""),
        "",
        _kinds_table(memory),
        "",
        _moments_table(memory),
        *([] if memory.device is None else ["", _device_table(memory.device)]),
        *(["", f"CPU memory per rank: {_size(memory.host_bytes)}"] if memory.host_bytes else []),
        "",
        _communication_table(prediction.communication),
        "",
        *_time_lines(prediction),
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


def _time_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the lines about time."""
    estimate, rows, planned = prediction.time, prediction.scaling, prediction.planned
    if estimate is None and planned.machine is not None:
        yield f"time: unknown on {planned.machine.label}, because the operations of the model cannot be counted."
    elif estimate is None:
        yield "time: unknown. Set --machine, such as h100-sxm, or measure this one with --calibrate."
    if estimate is None:
        return
    low, high = estimate.low_seconds, estimate.high_seconds
    interval = "none" if low is None or high is None else f"{format_seconds(low)} to {format_seconds(high)}"
    table = [
        ("time per step", format_seconds(estimate.step_seconds)),
        ("interval", interval),
        ("computation", format_seconds(estimate.compute_seconds)),
        ("communication", format_seconds(estimate.communication_seconds)),
        ("not overlapped", format_seconds(estimate.exposed_seconds)),
        ("tokens/s", f"{estimate.tokens_per_second:,.0f}"),
        ("tokens/s per rank", f"{estimate.tokens_per_second / planned.plan.world_size:,.0f}"),
        ("model FLOP/s utilization", f"{estimate.mfu:.1%}" if estimate.mfu is not None else "unknown"),
    ]
    yield from (format_table(table, right=(1,)), f"  {estimate.evidence}", f"  on {estimate.machine}")
    if rows:
        head = ("ranks", "mesh", "step", "not overlapped", "tokens/s", "efficiency")
        yield from ("", format_table([head, *map(_scaling_cells, rows)], right=(0, 2, 3, 4, 5)))


def _scaling_cells(row: ScalingRow) -> tuple[str, ...]:
    estimate = row.estimate
    return (
        f"{row.world_size:,}", f"{row.mesh.replicate} × {row.mesh.shard}", format_seconds(estimate.step_seconds),
        format_seconds(estimate.exposed_seconds), f"{estimate.tokens_per_second:,.0f}", f"{row.efficiency:.0%}",
    )  # fmt: skip


def _verdict(memory: MemoryEstimate, gpu_memory: int | None) -> str:
    """Return whether it fits, and what limits it."""
    peak = memory.peak
    largest = KIND_NAMES[_largest(peak)]
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
        rows.append((KIND_NAMES[kind], _size(size), f"{size / max(peak.bytes, 1):.0%}"))
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


def write_file(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all. Raises ``SpecError`` (FSDP-E835)."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.write_bytes(content)
        staging.replace(path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        message = f"cannot write {path}: {error.strerror or error}."
        fix = "Choose a file in a folder that exists and is writable."
        raise SpecError([Problem(code="FSDP-E835", message=message, fix=fix)]) from error
