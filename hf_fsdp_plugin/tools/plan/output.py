"""What ``hf-fsdp plan`` prints: whether it fits and what limits it, then tables; or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.output import OK, PROBLEMS, colored, print_problems, print_result, text_width
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_count, format_memory, format_table, plural, wrap_words
from hf_fsdp_plugin.tools.common import format_seconds
from hf_fsdp_plugin.tools.plan.estimate import types
from hf_fsdp_plugin.tools.plan.estimate.machines import RANKS_PER_MACHINE, Machine

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel

_HEADROOM: Final = 0.9
"""Part of a device's memory from which a peak "just fits", if only allocated memory is predicted."""


_BESIDE_TIME: Final = ("step_seconds", "tokens_per_second", "machine")
"""Fields of a time estimate that ``plan --json`` has beside the object ``time``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What the verb was asked to predict.

    Attributes:
        gpu_memory: bytes of one device, as given or of the machine; ``None`` if unknown.
        machine: the machine that was named.
    """

    plan: FsdpPlan
    model: nn.Module
    workload: types.Workload
    gpu_memory: int | None
    machine: Machine | None

    @property
    def ranks_per_machine(self) -> int:
        return self.machine.ranks_per_machine if self.machine is not None else RANKS_PER_MACHINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Everything that the verb predicts.

    Attributes:
        times: the counted operations of the step; ``None`` if no machine is given.
        time: the time that these operations take; ``None`` if no machine is given.
    """

    planned: Planned
    memory: types.MemoryEstimate
    communication: Sequence[types.Collective]
    times: TimeModel | None = None
    time: types.TimeEstimate | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the device has the memory that a step needs at least; ``None`` if that is unknown."""
        gpu_memory = self.planned.gpu_memory
        return None if gpu_memory is None else self.memory.needed_bytes <= gpu_memory


def predict(planned: Planned) -> Prediction:
    """Return the memory and communication of a step, and the time if a machine is given."""
    from hf_fsdp_plugin.tools.plan.estimate.divided import as_loaded
    from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import profile_step
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import follow_step
    from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel, estimate_communication, unit_costs
    from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import ignored_bytes, unit_bytes

    planned = replace(planned, plan=as_loaded(planned.plan, planned.model))
    plan, machine, subject = planned.plan, planned.machine, (planned.plan, planned.model, planned.workload)
    profile = profile_step(*subject)
    sizes, ignored = unit_bytes(plan, planned.model), ignored_bytes(plan, planned.model)
    memory = follow_step(plan, sizes, ignored, planned.workload, profile, machine)
    times = TimeModel(*subject, unit_costs(plan, profile), profile, sizes) if machine is not None else None
    return Prediction(
        planned=planned,
        memory=memory,
        communication=tuple(estimate_communication(*subject, profile, sizes)),
        times=times,
        time=times.estimate(machine) if times is not None and machine is not None else None,
    )


def print_prediction(
    args: argparse.Namespace, prediction: Prediction, problems: Iterable[Problem], written: Sequence[str] = ()
) -> int:
    """Print memory, communication and time, and the lines ``written``. Returns 1 if it does not fit."""
    problems = [*problems, *host_problems(prediction)]
    if not args.json:
        print_problems(problem for problem in problems if problem.severity != "note")
    print_result(args, plan_json(prediction, problems), "\n".join([plan_text(prediction), *written]))
    return PROBLEMS if prediction.fits is False else OK


def plan_json(prediction: Prediction, problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the object of ``plan --json``."""
    planned, memory, time = prediction.planned, prediction.memory, prediction.time
    return {
        "ok": True,
        "per_rank": memory.to_json(),
        "device_memory": None if memory.device is None else memory.device.to_json(),
        "peak_at": memory.peak.where,
        "method": "closed_form",
        "fits": prediction.fits,
        "gpu_memory_bytes": planned.gpu_memory,
        "limited_by": {"kind": memory.peak.largest, "moment": memory.peak.where},
        "host_memory": {
            "offload_bytes": memory.offload_bytes,
            "staging_bytes": memory.staging_bytes,
            "ranks_per_machine": min(planned.plan.world_size, planned.ranks_per_machine),
            "machine_bytes": int(planned.machine.host_memory_bytes) or None if planned.machine else None,
        },
        "timeline": [
            {"where": moment.where, "bytes": moment.bytes, **{f"{k}_bytes": v for k, v in moment.bytes_by_kind.items()}}
            for moment in memory.timeline
        ],
        "communication": {
            **{f"{name}_bytes": size for name, size in _communicated(prediction.communication).items()},
            "calls": sum(each.calls for each in prediction.communication),
        },
        "step_seconds": time and time.step_seconds,
        "tokens_per_second": time and time.tokens_per_second,
        "machine": time and time.machine,
        "time": time and {name: value for name, value in asdict(time).items() if name not in _BESIDE_TIME},
        "assumptions": list(memory.assumptions),
        "workload": asdict(planned.workload),
        "plan": planned.plan.to_json(),
        "problems": list(problems),
    }


def plan_text(prediction: Prediction) -> str:
    """Return the text of the verb."""
    width = text_width()
    planned, memory = prediction.planned, prediction.memory
    lines = [
        *wrap_words(_verdict(memory, planned.gpu_memory), width, ""),
        "",
        *wrap_words(subject_of(planned.plan, planned.workload), width, ""),
        "",
        _kinds_table(memory),
        *([] if memory.device is None else ["", _device_table(memory.device)]),
        *(["", *wrap_words(_host_memory(planned, memory), width, "")] if memory.host_bytes else []),
        "",
        _communication_table(prediction.communication),
        "",
        *_time_lines(prediction),
        *(["", "assumptions"] if memory.assumptions else []),
        *(line for text in memory.assumptions for line in wrap_words(f"  {text}", width, "  ")),
    ]
    return "\n".join(lines)


def _host_memory(planned: Planned, memory: types.MemoryEstimate) -> str:
    """Return the CPU memory of a rank and of a machine, and what it is for."""
    ranks = min(planned.plan.world_size, planned.ranks_per_machine)
    parts = {"offload": memory.offload_bytes, "copies of asynchronous saves": memory.staging_bytes}
    shown = ", ".join(f"{name} {format_memory(size)}" for name, size in parts.items() if size)
    total = f"{format_memory(memory.host_bytes * ranks)} on a machine with {plural(ranks, 'rank')}"
    return f"CPU memory per rank: {format_memory(memory.host_bytes)} ({shown}); {total}"


def host_problems(prediction: Prediction) -> Iterator[Problem]:
    """Yield the warning that a machine has less memory than its ranks need for offload and for copies of saves."""
    planned, memory = prediction.planned, prediction.memory
    ranks, machine = min(planned.plan.world_size, planned.ranks_per_machine), planned.machine
    if machine is not None and 0 < machine.host_memory_bytes < memory.host_bytes * ranks:
        has = format_memory(int(machine.host_memory_bytes))
        message = f"{machine.name} has {has} of CPU memory, which is too little. {_host_memory(planned, memory)}."
        fix = "Use more machines, or less memory: without fsdp_async_save, training waits for each save; without "
        yield Problem(code="FSDP-W814", message=message, fix=f"{fix}offload, the device needs more memory.")


def _communicated(communication: Sequence[types.Collective]) -> dict[str, int]:
    """Return the bytes of each kind of collective per rank and optimizer step, then those of each axis of layers."""
    found = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for each in communication:
        for name in (each.kind, *({each.axis} & types.LAYER_AXES)):
            found[name] = found.get(name, 0) + each.bytes * each.calls
    return found


def _communication_table(communication: Sequence[types.Collective]) -> str:
    """Return the table of calls and bytes of each kind of collective, and of each axis that divides layers."""
    rows = [("communication per rank and step", "calls", "size")]
    order = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    for axis in ("", "context", "tensor", "expert"):
        over = [each for each in communication if (each.axis if each.axis in types.LAYER_AXES else "") == axis]
        for kind in order:
            if alike := [each for each in over if each.kind == kind]:
                name = kind.replace("_", "-") + (f" over the {axis} axis" if axis else "")
                size = sum(each.bytes * each.calls for each in alike)
                rows.append((name, f"{sum(each.calls for each in alike):,}", format_memory(size)))
    return format_table(rows, right=(1, 2)) if len(rows) > 1 else "no communication"


def _time_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the lines about time."""
    time = prediction.time
    if time is None:
        yield "time: unknown. Set --machine, such as h100-sxm, or the file of a machine."
        return
    low, high = time.low_seconds, time.high_seconds
    table = [
        ("time per step", format_seconds(time.step_seconds)),
        ("interval", "none" if low is None or high is None else f"{format_seconds(low)} to {format_seconds(high)}"),
        ("computation", format_seconds(time.compute_seconds)),
        ("communication", format_seconds(time.communication_seconds)),
        ("not overlapped", format_seconds(time.exposed_seconds)),
        ("tokens/s", f"{time.tokens_per_second:,.0f}"),
        ("tokens/s per rank", f"{time.tokens_per_second / prediction.planned.plan.world_size:,.0f}"),
        ("model FLOP/s utilization", f"{time.mfu:.1%}" if time.mfu is not None else "unknown"),
    ]
    yield from (format_table(table, right=(1,)), f"  {time.evidence}", f"  on {time.machine}")


def _verdict(memory: types.MemoryEstimate, gpu_memory: int | None) -> str:
    """Return sentences: whether the step fits into the memory of a device, and which kind of memory limits it."""
    peak, largest = memory.peak, memory.peak.largest
    why = f"Allocated memory has its peak in the {peak.where}; most of it is {types.KIND_NAMES[largest]} "
    why += f"({format_memory(peak.bytes_by_kind[largest])})."
    needed = memory.needed_bytes
    if gpu_memory is None:
        return f"Each rank needs {format_memory(needed)}. {why} Set --gpu-memory to see whether it fits."
    need = f"each rank needs {format_memory(needed)} of {format_memory(gpu_memory)}"
    if needed > gpu_memory:
        return f"{colored('It does not fit', 'red')}: {need}, {format_memory(needed - gpu_memory)} too much. {why}"
    part = needed / gpu_memory
    enough = memory.total_bytes <= gpu_memory and (memory.device is not None or part <= _HEADROOM)
    answer = colored("It fits", "green") if enough else colored("It just fits", "yellow")
    left = f"{format_memory(gpu_memory - needed)} are left"
    if memory.total_bytes > gpu_memory:
        left += f", but {format_memory(memory.total_bytes)} would be used: torch's allocator must return cached memory "
        left += "in each step, which waits for the GPU"
    return f"{answer}: {need} ({part:.0%}), {left}. {why}"


def _device_table(device: types.DeviceMemory) -> str:
    """Return the table of the parts of the device's memory, in the order in which they add up."""
    sizes = {
        "allocated by torch at the peak": device.allocated,
        "reserved by torch's allocator, with that": device.reserved,
        "CUDA context": device.context,
        "NCCL": device.nccl,
        "total": device.total,
        "needed, if cached memory is returned": device.total_needed,
    }
    rows = [(name, format_memory(size)) for name, size in sizes.items()]
    return format_table([("memory of a device", "size"), *rows], right=(1,))


def subject_of(plan: FsdpPlan, workload: types.Workload) -> str:
    sizes = {"replicas": plan.mesh.replicate, "shards": plan.mesh.shard, "context": plan.mesh.context,
             "tensor": plan.mesh.tensor}  # fmt: skip
    mesh = " × ".join(f"{size} {name}" for name, size in sizes.items() if size > 1 or name == "shards")
    mesh += f", {plan.mesh.expert} expert" if plan.mesh.expert > 1 else ""
    mesh = f" ({mesh})" if plan.mesh.replicate > 1 or plan.mesh.has_model_axes else ""
    steps = f" × {plural(workload.accumulation, 'micro-batch', 'micro-batches')}" if workload.accumulation > 1 else ""
    precision = plan.precision.param if plan.precision.param != "unchanged" else "the model's dtype"
    return (
        f"{plan.model_class}, {format_count(plan.num_params)} parameters, {plan.backend.upper()} {plan.strategy} on "
        f"{plural(plan.world_size, f'{plan.device_type} rank')}{mesh}, {precision}, micro-batch {workload.micro_batch} "
        f"× {workload.seq_len:,} tokens{steps}, {workload.optimizer}"
    )


def _kinds_table(memory: types.MemoryEstimate) -> str:
    peak = memory.peak
    rows = [("memory per rank at the peak", "size", "part")]
    for kind in types.MEMORY_KINDS:
        size = peak.bytes_by_kind[kind]
        rows.append((types.KIND_NAMES[kind], format_memory(size), f"{size / max(peak.bytes, 1):.0%}"))
    rows.append(("total", format_memory(peak.bytes), ""))
    return format_table(rows, right=(1, 2))
