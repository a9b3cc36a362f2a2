"""The time of one optimizer step: computation by a roofline, communication by an α-β model, and their overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, NamedTuple

from torch import nn

from hf_fsdp_plugin.backends.loading.weight_loader import master_dtype
from hf_fsdp_plugin.estimate.communication import (
    UnitSchedule,
    checkpointed_modules,
    estimate_communication,
    unit_schedules,
)
from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.op_costs import OpCost, unit_costs
from hf_fsdp_plugin.estimate.results import Collective, TimeEstimate
from hf_fsdp_plugin.estimate.schedule import Timeline, UnitTimes, exposed, simulate
from hf_fsdp_plugin.estimate.workload import Workload, update_loop
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan, ProblemCollector, UnitPlan
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.names import ancestors, is_inside
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.strategies import STRATEGIES

UPDATE_PASSES: Final = {"adamw": (7, 21), "sgd": (5, 7), "adafactor": (9, 20), "adamw_8bit": (4, 4), "muon": (40, 40)}
"""Reads and writes of a parameter's size (in the master dtype) per update, fused and as separate operations.

Fused AdamW reads parameter, gradient and two averages, and writes three of them; the count of separate operations is
that of ``_multi_tensor_adamw``. Muon: five Newton-Schulz iterations, counted as traffic only.
"""
UPDATE_OPS: Final = {"adamw": 12, "sgd": 3, "adafactor": 15, "adamw_8bit": 1, "muon": 25}
"""Operations per parameter and update, without ``fused``."""


def estimate_time(plan: FsdpPlan, model: nn.Module, workload: Workload, machine: Machine) -> TimeEstimate:
    """Return the time of one optimizer step of all ranks.

    Args:
        model: the model that was planned, on any device. It must be a Transformers model with token inputs.
    """
    return TimeModel(plan, model, workload).estimate(machine)


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One world size of a scaling table; efficiency is tokens/s per rank over that of the first row."""

    world_size: int
    mesh: MeshPlan
    estimate: TimeEstimate
    efficiency: float


class TimeModel:
    """The counted operations of one plan and workload, for estimates on several machines and world sizes.

    Attributes:
        costs: unit -> operations of one micro-batch. Equal layers share one object.
    """

    def __init__(self, plan: FsdpPlan, model: nn.Module, workload: Workload) -> None:
        self._plan, self._model, self._workload = plan, model, workload
        self._prepared: _Prepared | None = None
        self.costs = unit_costs(plan, model, workload)

    def estimate(self, machine: Machine, plan: FsdpPlan | None = None) -> TimeEstimate:
        """Return the estimate for the plan, or for the same plan with another mesh."""
        plan = plan or self._plan
        timeline = self.timeline(machine, plan)
        compute = sum(span.end - span.start for span in timeline.spans if span.stream == "compute")
        communication = sum(span.end - span.start for span in timeline.spans if span.stream != "compute")
        not_overlapped = exposed(timeline)
        contention = machine.contention * (communication - not_overlapped)
        step = max((span.end for span in timeline.spans), default=0.0) + contention
        tokens = self._workload.tokens * self._workload.accumulation * plan.world_size
        dtype = _compute_name(plan)
        peak = machine.peak.get(dtype) if machine.peak else None
        flops = self.model_flops() * self._workload.accumulation
        interval = interval_of(machine, plan, self._model, dtype)
        return TimeEstimate(
            step_seconds=step, low_seconds=interval.low and step * interval.low,
            high_seconds=interval.high and step * interval.high, evidence=interval.words,
            compute_seconds=compute + contention, communication_seconds=communication, exposed_seconds=not_overlapped,
            tokens_per_second=tokens / step if step else 0.0, mfu=flops / step / peak if peak and step else None,
            machine=machine.label,
        )  # fmt: skip

    def model_flops(self) -> int:
        """FLOPs of one micro-batch of one rank, forward and backward, without recomputation."""
        passes = [each for costs in self.costs.values() for each in (costs.forward, costs.backward)]
        return sum(cost.flops * count for each in passes for cost, count in each.items())

    def timeline(self, machine: Machine, plan: FsdpPlan | None = None) -> Timeline:
        """Return the simulated streams of a step."""
        plan, workload = plan or self._plan, self._workload
        if self._prepared is None or self._prepared.plan is not plan:
            self._prepared = _Prepared(plan, self._model, workload)
        prepared = self._prepared
        known: dict[int, tuple[float, float, float]] = {}
        units = [self._unit_times(prepared, schedule, machine, known) for schedule in prepared.schedules]
        return simulate(
            _in_order(units, prepared.schedules),
            micro_batches=workload.accumulation,
            reduces_each=workload.sync_each_batch,
            keeps_gathered=prepared.keeps_gathered and not workload.sync_each_batch,
            prefetch=plan.prefetch.backward,
            limited=plan.prefetch.limit_all_gathers,
            overlaps=machine.overlaps,
            tail=self._tail(prepared, machine),
        )

    def scaling(self, machine: Machine, worlds: Sequence[int]) -> list[ScalingRow]:
        """Return the estimates for other numbers of ranks, each with the same micro-batch (weak scaling)."""
        rows: list[ScalingRow] = []
        for world in worlds:
            plan = plan_for_world(self._plan, world, machine.ranks_per_machine)
            if plan is None:
                continue
            estimate = self.estimate(machine, plan)
            per_rank = estimate.tokens_per_second / world
            first = rows[0].estimate.tokens_per_second / rows[0].world_size if rows else per_rank
            efficiency = per_rank / first if first else 0.0
            rows.append(ScalingRow(world_size=world, mesh=plan.mesh, estimate=estimate, efficiency=efficiency))
        return rows

    def _unit_times(
        self,
        prepared: _Prepared,
        schedule: UnitSchedule,
        machine: Machine,
        known: dict[int, tuple[float, float, float]],
    ) -> UnitTimes:
        plan, unit, sizes = prepared.plan, schedule.unit, schedule.sizes
        costs = self.costs[unit.name]
        if id(costs) not in known:  # equal layers share their costs
            again = _recomputed(costs.forward, plan.activation.checkpointing)
            known[id(costs)] = tuple(_seconds(ops, machine) for ops in (costs.forward, costs.backward, again))  # type: ignore[assignment]
        forward, backward, recomputed = known[id(costs)]
        hooks = machine.unit_seconds.get(plan.backend, 0.0)
        gathers = schedule.backward_gathers / self._workload.accumulation
        copy_out = _copy_seconds(2 * sizes.gathered, machine)
        copy_in = _copy_seconds(2 * sizes.reduce_input, machine)
        # FSDP1 gathers into the memory that the parameters are views of; gloo copies once more.
        copies = copy_out if plan.backend == "fsdp2" or not machine.overlaps else 0.0
        gather = prepared.seconds(machine, unit.name, "all_gather")
        if plan.offload_params and machine.overlaps:
            gather += sizes.gathered / plan.mesh.shard / machine.host_bandwidth
        return UnitTimes(
            name=unit.name or "the root",
            forward=forward + hooks + (copies if schedule.forward_gathers else 0.0),
            backward=backward + hooks + copies * gathers + (copy_in if schedule.reductions else 0.0)
            + (recomputed if unit.name in prepared.recomputed else 0.0),
            gather_forward=gather if schedule.forward_gathers else 0.0,
            gather_backward=gather * gathers,
            reduce=prepared.seconds(machine, unit.name, "reduce_scatter"),
            all_reduce=prepared.seconds(machine, unit.name, "all_reduce"),
        )  # fmt: skip

    def _tail(self, prepared: _Prepared, machine: Machine) -> float:
        """Return the seconds of clipping and update."""
        plan, workload, local = prepared.plan, self._workload, prepared.local_bytes
        num_tensors = max(1, prepared.num_tensors)
        loop = update_loop(workload, plan.device_type if machine.overlaps else "cpu")
        fused, separate = UPDATE_PASSES[workload.optimizer]
        traffic = local * (fused if loop == "fused" else separate) + (local * 3 if workload.clip_norm else 0)
        throughput = machine.throughput("memory", "fp32", max(1, local // num_tensors) * 3)
        if plan.offload_params and machine.overlaps:
            throughput = min(throughput, machine.host_bandwidth)
        num_ops = (UPDATE_OPS[workload.optimizer] + 2) * (num_tensors if loop == "for_loop" else 1)
        clipping = [call for call in prepared.calls if call.phase in ("clipping", "update")]
        seconds = sum(collective_seconds(call, plan, machine) for call in clipping)
        return traffic / throughput + num_ops * machine.update_op_seconds + seconds


class _Prepared:
    """What estimates of one plan share: schedules, collectives, and sizes of this rank's parameters."""

    def __init__(self, plan: FsdpPlan, model: nn.Module, workload: Workload) -> None:
        self.plan = plan
        self.schedules = unit_schedules(plan, model, workload)
        self.calls = estimate_communication(plan, model, workload).collectives
        self.keeps_gathered = plan.backend == "fsdp1" and not STRATEGIES[plan.strategy].reshards_after_forward
        self._by_unit: dict[tuple[str, str], Collective] = {
            (call.unit, call.kind): call for call in self.calls if call.phase in ("forward", "backward")
        }
        parameters = [model.get_parameter(name) for unit in plan.units for name in unit.parameters]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.num_tensors = len(trained)
        checkpointed = checkpointed_modules(plan, model)
        self.recomputed = {unit.name for unit in plan.units if _is_recomputed(unit, checkpointed)}
        self.local_bytes = sum(ceil(p.numel() / plan.mesh.shard) * master_dtype(plan, p).itemsize for p in trained)

    def seconds(self, machine: Machine, unit: str, kind: str) -> float:
        call = self._by_unit.get((unit, kind))
        return collective_seconds(call, self.plan, machine) if call is not None else 0.0


def _is_recomputed(unit: UnitPlan, checkpointed: Collection[str]) -> bool:
    """Whether a unit is a checkpointed module, is inside one, or contains some."""
    inside = any(path in checkpointed for name in unit.modules for path in ancestors(name))
    return inside or any(is_inside(path, name) for path in checkpointed for name in unit.modules if name)


def _in_order(units: list[UnitTimes], schedules: Sequence[UnitSchedule]) -> list[UnitTimes]:
    """Return the units in forward order. The root's parameters are gathered first, and its head and loss run last."""
    *others, last = units
    if schedules[-1].unit.name or not schedules[-1].unit.parameters or not others:
        return units
    first = replace(last, forward=0.0, backward=0.0)
    return [first, *others, UnitTimes(name=last.name, forward=last.forward, backward=last.backward)]


def no_time(error: SpecError) -> Problem:
    """Return the warning that memory and communication are predicted without times."""
    return Problem(
        code="FSDP-W836",
        message=f"no time is predicted: {error.problems[0].message}",
        fix="Memory and communication are predicted. Omit --machine if no time is needed.",
    )


def plan_for_world(plan: FsdpPlan, world_size: int, ranks_per_machine: int) -> FsdpPlan | None:
    """Return the plan of the same settings for another number of ranks; ``None`` if their mesh has another size."""
    collector = ProblemCollector(plan.spec)
    local = min(ranks_per_machine, world_size)
    launch = replace(plan.spec.launch, num_processes=world_size, num_machines=max(1, world_size // local))
    mesh, strategy = resolve_mesh(replace(plan.spec, launch=launch), world_size, local, collector)
    if has_errors(collector.problems):
        return None
    return replace(plan, world_size=world_size, mesh=mesh, strategy=strategy)


def collective_seconds(call: Collective, plan: FsdpPlan, machine: Machine) -> float:
    """Return the seconds of one call, by the number of machines that its axis spans."""
    ranks = machine.ranks_per_machine
    per_machine = max(1, ranks // plan.mesh.shard) if call.axis == "replicate" else ranks
    machines = ceil(call.group_size / min(per_machine, call.group_size))
    return machine.collective_seconds(call.kind, call.group_size, call.bytes, machines)


def _seconds(ops: Mapping[OpCost, int], machine: Machine) -> float:
    """Return the time of a pass: an accelerator waits for the host only if starting takes longer than computing."""
    seconds = sum(_op_seconds(cost, machine) * count for cost, count in ops.items())
    starting = machine.op_seconds * sum(ops.values())
    return max(seconds, starting) if machine.overlaps else seconds + starting


def _op_seconds(cost: OpCost, machine: Machine) -> float:
    """Return the roofline: the slower of arithmetic and memory."""
    if not cost.bytes:
        return 0.0
    kind = cost.kind if cost.kind in ("function", "fused") else "memory"
    seconds = cost.bytes / machine.throughput(kind, cost.dtype, cost.bytes)
    if cost.flops:
        seconds = max(seconds, cost.flops / machine.throughput(cost.kind, cost.dtype, cost.flops, cost.length))
    return seconds + machine.kernel_seconds


def _copy_seconds(num_bytes: int, machine: Machine) -> float:
    return num_bytes / machine.throughput("memory", "fp32", num_bytes)


def _recomputed(forward: Mapping[OpCost, int], checkpointing: str) -> Counter[OpCost]:
    """Return the operations that run again: all, or without attention and every second product."""
    found: Counter[OpCost] = Counter()
    if checkpointing == "none":
        return found
    for cost, count in forward.items():
        if checkpointing == "selective" and cost.kind == "attention":
            continue
        found[cost] = count // 2 if checkpointing == "selective" and cost.kind == "matmul" else count
    return found


def _compute_name(plan: FsdpPlan) -> str:
    if plan.precision.param != "unchanged":
        return plan.precision.param
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    sizes: Counter[str] = Counter()
    for unit in plan.units:
        sizes.update(unit.dtypes)
    return names.get(sizes.most_common(1)[0][0] if sizes else "float32", "fp32")


class TimeInterval(NamedTuple):
    """Factors of the time of a step, ``None`` if no measurements support them, and what does or what is missing."""

    low: float | None
    high: float | None
    words: str


def interval_of(machine: Machine, plan: FsdpPlan, model: nn.Module, dtype: str) -> TimeInterval:
    """Return the interval that held for published runs of the same kind."""
    runs, class_name = machine.evidence, type(model).__name__
    missing = (
        (bool(machine.curves), "how often steps on calibrated machines lie in one was not measured"),
        (runs is None, f"no published run on {machine.device} was compared"),
        (dtype != "bf16", f"the published runs compute in bf16, not in {dtype}"),
        (plan.offload_params, "no published run with offloaded parameters was compared"),
        (
            any(not parameter.requires_grad for parameter in model.parameters()),
            "too few published runs with frozen parameters were compared",
        ),
        (
            any(type(module).__name__.endswith("Experts") for module in model.modules()),
            "too few published runs of mixtures of experts were compared",
        ),
        (
            not class_name.endswith(("CausalLM", "LMHeadModel")),
            f"the published runs train decoders for language, not {class_name}",
        ),
    )
    reason = next((text for is_missing, text in missing if is_missing), "")
    if reason or runs is None:
        return TimeInterval(None, None, f"no interval: {reason}")
    words = (
        f"{runs.inside} of {runs.runs} published runs on {runs.devices} lie inside, each by a fit without its source"
    )
    return TimeInterval(runs.low, runs.high, words)
