"""Communication and time of one optimizer step.

The collectives are those that the plan makes torch's FSDP run, call by call. The time is that of computation by a
roofline, of communication by an α-β model, and of their overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

import torch
from torch import nn

from hf_fsdp_plugin.backends.sharding.activation_checkpointing import checkpoints_itself
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import ancestors, is_inside, parent_of
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import SHORT_DTYPES
from hf_fsdp_plugin.tools.plan.estimate import types
from hf_fsdp_plugin.tools.plan.estimate.divided import as_loaded
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import profile_step
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import state_bytes, step_windows
from hf_fsdp_plugin.tools.plan.estimate.memory.step import AxisCall, OpCost, Stage, StepProfile
from hf_fsdp_plugin.tools.plan.estimate.muon import muon_step
from hf_fsdp_plugin.tools.plan.estimate.schedule import Timeline, UnitTimes, exposed_seconds, simulate
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind, StepPhase, Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import UnitBytes, fp8_gathered, unit_bytes

_UPDATES: Final = {
    "adamw": (7, 21, 12), "sgd": (5, 7, 3), "adafactor": (9, 20, 15), "adamw_8bit": (4, 4, 1), "muon": (12, 12, 5),
}  # fmt: skip
"""Reads and writes of a parameter's size (in the master dtype) per update, fused and as separate operations, and the
number of these operations.

Fused AdamW reads parameter, gradient and two averages, and writes three of them; the count of separate operations is
that of ``_multi_tensor_adamw``. Muon: momentum and weights of the shards; its products are counted apart.
"""
_NOT_COMPARED: Final = (
    "no interval: the published runs that were compared train dense decoders for language on A100, H100 SXM and H200, "
    "with all parameters in bf16, and without offload and context, tensor or expert axes"
)


def estimate_communication(
    plan: FsdpPlan,
    model: nn.Module,
    workload: Workload,
    profile: StepProfile | None = None,
    sizes_of_units: Sequence[UnitBytes] | None = None,
) -> Iterator[types.Collective]:
    """Yield every collective of one optimizer step of one rank, from the second step on.

    Those of each unit come first, in the order of the plan, then those of context, tensor and expert axes, of ignored
    parameters, of the flags of used parameters, and of clipping.

    The counts follow torch's sources (``_fully_shard/_fsdp_param_group.py`` and ``_runtime_utils.py``) and are compared
    with those of real runs. It is assumed that each unit runs once per forward pass and that every trainable parameter
    has a gradient. Collectives of the training loop are not included: the Trainer gathers the number of tokens of each
    rank (8 bytes), and losses when it logs them.

    Args:
        model: the model that was planned, on any device; on the meta device with context, tensor or expert axes.
        profile: what ``profile_step`` returns, if it is known. Only these axes need it.
        sizes_of_units: what ``unit_bytes`` returns, if it is known.

    Raises:
        SpecError: with these axes, as :func:`~hf_fsdp_plugin.tools.plan.estimate.memory.peak.estimate_memory`.
    """
    plan = as_loaded(plan, model)
    strategy, micro_batches, shards = STRATEGIES[plan.strategy], workload.accumulation, plan.mesh.num_shards
    mesh = plan.mesh
    group_sizes: dict[types.Axis, int] = {
        "shard": shards, "replicate": mesh.replicate, "world": plan.world_size, "context": mesh.context,
        "tensor": mesh.tensor, "expert": mesh.expert,
    }  # fmt: skip

    def calls(
        num: int, kind: CollectiveKind, axis: types.Axis, size: int, phase: StepPhase, unit: str = "", ranks: int = 0
    ) -> types.Collective:
        ranks = ranks or group_sizes[axis]
        return types.Collective(kind=kind, axis=axis, group_size=ranks, bytes=size, calls=num, unit=unit, phase=phase)

    keeps_gathered = plan.backend == "fsdp1" and not strategy.reshards_after_forward
    # FSDP1 keeps parameters that it does not free after forward until a backward that reduces gradients.
    forward = 1 if keeps_gathered and not workload.sync_each_batch else micro_batches
    is_late = plan.spec.sharding.reduce_replicas_at_last_micro_batch
    reductions = micro_batches if workload.sync_each_batch or is_late else 1
    all_reductions = micro_batches if workload.sync_each_batch else 1
    in_backward, all_sizes = _gathered_in_backward(plan, model), sizes_of_units or unit_bytes(plan, model)
    for unit, sizes, backward in zip(plan.units, all_sizes, in_backward, strict=True):
        name, reduced, ranks = unit.name, sizes.reduce_input, sizes.num_shards
        if ranks > 1 and unit.parameters:
            yield calls(forward, "all_gather", "shard", sizes.gathered, "forward", name, ranks)
            if backward:
                yield calls(backward * micro_batches, "all_gather", "shard", sizes.gathered, "backward", name, ranks)
        if reduced and ranks > 1:
            yield calls(reductions, "reduce_scatter", "shard", reduced, "backward", name, ranks)
        if reduced and plan.has_replicas:  # also if there is only one replica
            yield calls(all_reductions, "all_reduce", "replicate", reduced // ranks, "backward", name)
    if mesh.has_model_axes:
        profile = profile_step(plan, model, workload) if profile is None else profile
        for (name, phase, call), number in axis_calls(plan, profile).items():
            yield calls(number * micro_batches, call.kind, call.axis, call.bytes, phase, name)
    names = [name for unit in plan.units for name in unit.parameters]
    # The gradients of parameters that are not sharded are averaged after every backward pass.
    for parameter in map(model.get_parameter, plan.ignored_parameters):
        if parameter.requires_grad:
            num_bytes = parameter.numel() * plan.precision.stored_dtype(parameter).itemsize
            yield calls(micro_batches, "all_reduce", "world", num_bytes, "backward")
    if plan.world_size > 1 and any(model.get_parameter(name).requires_grad for name in names):
        yield calls(
            all_reductions, "all_reduce", "world", len(names), "backward"
        )  # whether any rank has used each of them
    if weights := fp8_gathered(plan, model):  # the largest elements, from which their scales are computed
        yield calls(1, "all_reduce", "shard", 4 * len(weights), "update")
    if workload.optimizer == "muon":
        step = muon_step(plan, [shard for sizes in all_sizes for shard in sizes.shards])
        for size, number in step.exchanges.items():
            yield calls(number, "all_to_all", "shard", size, "update")
        for size, number in step.results.items():
            yield calls(number, "all_gather", "replicate", size, "update")
    if plan.precision.param == "fp16":  # the gradient scaler
        yield calls(1, "all_reduce", "world", 4, "clipping" if workload.clip_norm else "update")
    parameters = list(map(model.get_parameter, names))
    is_sharded = shards > 1 or plan.backend == "fsdp2"  # FSDP2 has a shard axis of size 1, too
    if workload.clip_norm and parameters and is_sharded:
        widest = any(plan.precision.stored_dtype(parameter) is torch.float64 for parameter in parameters)
        # Norms are added up for each layout of parameters, axis by axis. Experts may be on the ranks of a tensor axis.
        pairs = dict.fromkeys((sizes.num_shards, shard.axis) for sizes in all_sizes for shard in sizes.shards)
        for (ranks, _), axis in {(ranks, plan.mesh.axes().get(str(axis))): axis for ranks, axis in pairs}.items():
            yield calls(1, "all_reduce", "shard", 8 if widest else 4, "clipping", ranks=ranks)
            if axis is not None:
                yield calls(1, "all_reduce", axis, 8 if widest else 4, "clipping")


def axis_calls(plan: FsdpPlan, profile: StepProfile) -> Counter[tuple[str, Literal["forward", "backward"], AxisCall]]:
    """Return the collectives over context, tensor and expert axes in one micro-batch: unit, pass and call."""
    found: Counter[tuple[str, Literal["forward", "backward"], AxisCall]] = Counter()
    for stage, phase, unit in _stages_of_units(plan, profile):
        for call, number in stage.calls.items():
            found[unit, phase, call] += number
    return found


def _gathered_in_backward(plan: FsdpPlan, model: nn.Module) -> list[int]:
    """Return, for each unit, the number of all-gathers in the backward pass of one micro-batch.

    A unit that is freed after forward is gathered again when the gradient of its output is computed. FSDP2 prefetches
    the preceding unit even if that one has no backward. FSDP1 gathers a unit inside a checkpointed module for the
    recomputed forward, frees it, and gathers it for the backward; FSDP2 frees it after the backward only.
    """
    # A trainable parameter must precede the end of the unit's forward, in the module tree.
    parameters = list(model.named_parameters(remove_duplicate=False))
    first_trainable = next((at for at, (_, p) in enumerate(parameters) if p.requires_grad), len(parameters))
    after = [name for name, _ in parameters[first_trainable:]]
    needed = [any(is_inside(name, path) for name in after for path in unit.modules) for unit in plan.units]
    counts = [int(unit.reshard_after_forward and need) for unit, need in zip(plan.units, needed, strict=True)]
    if plan.backend == "fsdp1":
        again = _gathered_for_recompute(plan, model)
        counts = [count * (1 + more) for count, more in zip(counts, again, strict=True)]
    sharded = [index for index, unit in enumerate(plan.units) if unit.parameters]
    if plan.backend == "fsdp2" and plan.prefetch.backward == "pre":
        first = next((at for at, index in enumerate(sharded) if needed[index]), 0)
        if first > 0 and plan.units[sharded[first - 1]].reshard_after_forward:
            counts[sharded[first - 1]] = 1
    return counts


def _gathered_for_recompute(plan: FsdpPlan, model: nn.Module) -> list[bool]:
    """Return, for each unit, whether FSDP1 gathers it for a recomputed forward and frees it after that.

    This happens to units inside a checkpointed module, except the one in which the recomputation stops: torch stops it
    as soon as the last tensor for the backward is computed.
    """
    checkpointed = checkpointed_modules(plan, model)
    last = {_last_parameter(name, model.get_submodule(name)) for name in checkpointed}
    return [
        any(path in checkpointed for name in unit.modules if name for path in ancestors(parent_of(name)))
        and last.isdisjoint(unit.parameters)
        for unit in plan.units
    ]


def checkpointed_modules(plan: FsdpPlan, model: nn.Module) -> set[str]:
    """Return the names of the modules whose forward is recomputed in backward."""
    if plan.activation.checkpointing == "none":
        return set()
    if plan.activation.native:
        return {name for name, module in model.named_modules() if checkpoints_itself(module)}
    return {name for unit in plan.units if unit.from_policy for name in unit.modules}


def _last_parameter(path: str, layer: nn.Module) -> str:
    """Return the name of the parameter that a layer uses last.

    Many layers register their norms last, but use them before attention and MLP.
    """
    children = [name for name, child in layer.named_children() if next(child.parameters(), None) is not None]
    inner = [name for name in children if "norm" not in name.lower() and "ln" not in name.lower()] or children
    names = [name for name, _ in layer.named_parameters() if not inner or is_inside(name, inner[-1])]
    return f"{path}.{names[-1]}" if names else ""


@dataclass(slots=True)
class UnitCosts:
    """Operations of one unit in one micro-batch, and how often each runs."""

    forward: Counter[OpCost]
    backward: Counter[OpCost]


class TimeModel:
    """The operations and collectives of one plan and workload, for estimates on several machines.

    Attributes:
        costs: unit -> operations of one micro-batch. Equal layers share one object.
    """

    def __init__(
        self,
        plan: FsdpPlan,
        model: nn.Module,
        workload: Workload,
        costs: Mapping[str, UnitCosts] | None = None,
        profile: StepProfile | None = None,
        sizes: Sequence[UnitBytes] | None = None,
    ) -> None:
        """Count the operations, unless `costs` has them already.

        Args:
            model: the model that was planned, on the meta device.
            profile, sizes: what ``profile_step`` and ``unit_bytes`` return, if they are known.

        Raises:
            SpecError: as :func:`~hf_fsdp_plugin.tools.plan.estimate.memory.peak.estimate_memory`.
        """
        plan = as_loaded(plan, model)
        if costs is None:
            profile = profile or profile_step(plan, model, workload)
            costs = unit_costs(plan, profile)
        self._plan, self._model, self._workload = plan, model, workload
        self.costs = costs
        self._sizes = sizes or unit_bytes(plan, model)
        self._calls = tuple(estimate_communication(plan, model, workload, profile, self._sizes))
        by_fsdp = [call for call in self._calls if call.axis in ("shard", "replicate")]
        self._of_units = {(call.unit, call.kind, call.phase): call for call in by_fsdp}
        parameters = [model.get_parameter(name) for unit in plan.units for name in unit.parameters]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._num_tensors = max(1, len(trained))
        stored = plan.precision.stored_dtype
        self._local_bytes = sum(ceil(p.numel() / plan.mesh.num_shards) * stored(p).itemsize for p in trained)
        if plan.mesh.has_divided_layers:
            shards = [shard for sizes in self._sizes for shard in sizes.shards if shard.trainable]
            self._local_bytes = sum(shard.numel * shard.dtype.itemsize for shard in shards)
        self._recomputed = _recomputed_units(plan, checkpointed_modules(plan, model))

    def estimate(self, machine: Machine) -> types.TimeEstimate:
        """Return the time of a step on a machine."""
        plan, workload = self._plan, self._workload
        timeline = self.timeline(machine)
        compute = sum(span.end - span.start for span in timeline.spans if span.stream == "compute")
        communication = sum(span.end - span.start for span in timeline.spans if span.stream != "compute")
        not_overlapped = exposed_seconds(timeline)
        contention = machine.contention * (communication - not_overlapped)
        step = max((span.end for span in timeline.spans), default=0.0) + contention
        dtype = _compute_name(plan)
        peak = machine.peak.get(dtype)
        passes = [each for costs in self.costs.values() for each in (costs.forward, costs.backward)]
        flops = sum(cost.flops * count for each in passes for cost, count in each.items()) * workload.accumulation
        low, high, evidence = interval_of(machine, plan, self._model, dtype)
        samples = workload.micro_batch * workload.accumulation * plan.mesh.num_data_ranks
        return types.TimeEstimate(
            step_seconds=step, low_seconds=low and step * low, high_seconds=high and step * high, evidence=evidence,
            compute_seconds=compute + contention, communication_seconds=communication, exposed_seconds=not_overlapped,
            tokens_per_second=samples * workload.seq_len / step if step else 0.0,
            mfu=flops / step / peak if peak and step else None, machine=machine.label,
        )  # fmt: skip

    def timeline(self, machine: Machine) -> Timeline:
        """Return the simulated streams of a step."""
        plan = self._plan
        different = {id(costs): costs for costs in self.costs.values()}
        seconds = {key: self._compute_seconds(costs, machine) for key, costs in different.items()}
        units = [self._unit_times(sizes, seconds[id(self.costs[sizes.name])], machine) for sizes in self._sizes]
        if not plan.units[-1].name and plan.units[-1].parameters and len(units) > 1:
            # The root's parameters are gathered first, and its head and loss run last.
            *others, root = units
            last = replace(root, gather_forward=0.0, gather_backward=0.0, reduce=0.0, all_reduce=0.0)
            first = replace(root, forward=0.0, backward=0.0, exchange_forward=0.0, exchange_backward=0.0)
            units = [first, *others, last]
        return simulate(units, plan, self._workload, overlaps=machine.overlaps, tail=self._tail(machine))

    def _compute_seconds(self, costs: UnitCosts, machine: Machine) -> tuple[float, float, float]:
        """Return the seconds of the forward, the backward and a recomputed forward of a unit."""
        again = _recomputed(costs.forward, self._plan.activation.checkpointing)
        return _seconds(costs.forward, machine), _seconds(costs.backward, machine), _seconds(again, machine)

    def _unit_times(self, sizes: UnitBytes, compute: tuple[float, float, float], machine: Machine) -> UnitTimes:
        plan, name = self._plan, sizes.name
        forward, backward, recomputed = compute
        hooks = machine.unit_seconds.get(plan.backend, 0.0)
        gather_forward, _ = self._calls_of(name, "all_gather", "forward", machine)
        gather_backward, num_gathers = self._calls_of(name, "all_gather", "backward", machine)
        reduce, _ = self._calls_of(name, "reduce_scatter", "backward", machine)
        all_reduce, _ = self._calls_of(name, "all_reduce", "backward", machine)
        copy_out = 0.0
        # FSDP1 gathers into the memory that the parameters are views of; gloo copies once more.
        if plan.backend == "fsdp2" or not machine.overlaps:
            copy_out = _copy_seconds(2 * sizes.gathered, machine)
        copy_in = _copy_seconds(2 * sizes.reduce_input, machine) if sizes.reduce_input else 0.0
        if plan.offload_params and machine.overlaps and gather_forward:
            copied = sizes.gathered / plan.mesh.num_shards / machine.host_bandwidth
            gather_forward, gather_backward = gather_forward + copied, gather_backward + copied
        return UnitTimes(
            name=name or "the root",
            forward=forward + hooks + (copy_out if gather_forward else 0.0),
            backward=backward + hooks + copy_out * num_gathers + copy_in + recomputed * (name in self._recomputed),
            exchange_forward=self._exchange_seconds(name, "forward", machine),
            exchange_backward=self._exchange_seconds(name, "backward", machine),
            gather_forward=gather_forward,
            gather_backward=gather_backward * num_gathers,
            reduce=reduce,
            all_reduce=all_reduce,
        )

    def _exchange_seconds(self, unit: str, phase: StepPhase, machine: Machine) -> float:
        """Return the seconds of a unit's collectives over context, tensor and expert axes in one micro-batch."""
        own = [call for call in self._calls if (call.unit, call.phase) == (unit, phase)]
        calls = [call for call in own if call.axis in types.LAYER_AXES]
        seconds = sum(collective_seconds(call, self._plan, machine) * call.calls for call in calls)
        return seconds / self._workload.accumulation

    def _calls_of(self, unit: str, kind: CollectiveKind, phase: StepPhase, machine: Machine) -> tuple[float, float]:
        """Return the seconds of one call, and the calls per micro-batch; zeros if there is none."""
        call = self._of_units.get((unit, kind, phase))
        if call is None:
            return 0.0, 0.0
        return collective_seconds(call, self._plan, machine), call.calls / self._workload.accumulation

    def _tail(self, machine: Machine) -> float:
        """Return the seconds of clipping and update."""
        plan, workload, local, num_tensors = self._plan, self._workload, self._local_bytes, self._num_tensors
        loop = types.update_loop(workload, plan.device_type if machine.overlaps else "cpu")
        fused, separate, num_ops = _UPDATES[workload.optimizer]
        traffic = local * (fused if loop == "fused" else separate) + (local * 3 if workload.clip_norm else 0)
        throughput = machine.throughput("memory", "fp32", max(1, local // num_tensors) * 3)
        if plan.offload_params and machine.overlaps:
            throughput = min(throughput, machine.host_bandwidth)
        starts = (num_ops + 2) * (num_tensors if loop == "for_loop" else 1)
        clipping = [call for call in self._calls if call.phase in ("clipping", "update")]
        seconds = sum(collective_seconds(call, plan, machine) for call in clipping)
        if workload.optimizer == "muon":
            step = muon_step(plan, [shard for sizes in self._sizes for shard in sizes.shards])
            seconds += step.flops / machine.throughput("matmul", "bf16", step.flops / max(1, 15 * step.most_matrices))
        update = traffic / throughput + starts * machine.update_op_seconds
        if plan.offload_optimizer and machine.overlaps:
            # Windows are copied in both directions at once, beside the updates. The first and last are copied alone.
            shards = [shard for sizes in self._sizes for shard in sizes.shards]
            states = [state_bytes(workload.optimizer, window) for window in step_windows(plan, shards)]
            update = max(update, sum(states) / machine.host_bandwidth)
            update += 2 * max(states, default=0) / machine.host_bandwidth
        return update + seconds


def _stages_of_units(
    plan: FsdpPlan, profile: StepProfile
) -> Iterator[tuple[Stage, Literal["forward", "backward"], str]]:
    """Yield each stage, its pass, and the innermost unit around it: the root (empty) outside of the others."""
    units = {"", *(unit.name for unit in plan.units)}
    for stage, phase, inside in profile.walk():
        yield stage, phase, next(name for name in reversed(inside) if name in units)


def unit_costs(plan: FsdpPlan, profile: StepProfile) -> dict[str, UnitCosts]:
    """Return unit name -> its operations in one micro-batch. Operations outside of units (the loss) are the root's."""
    costs = {name: UnitCosts(Counter(), Counter()) for name in ("", *(unit.name for unit in plan.units))}
    for stage, phase, unit in _stages_of_units(plan, profile):
        getattr(costs[unit], phase).update(stage.ops)
    shared: dict[object, UnitCosts] = {}
    return {
        name: shared.setdefault((frozenset(each.forward.items()), frozenset(each.backward.items())), each)
        for name, each in costs.items()
    }


def _recomputed_units(plan: FsdpPlan, checkpointed: Collection[str]) -> set[str]:
    """Return the units that are checkpointed modules, are inside one, or contain some."""

    def is_recomputed(module: str) -> bool:
        inside = any(path in checkpointed for path in ancestors(module))
        return inside or (module != "" and any(is_inside(path, module) for path in checkpointed))

    return {unit.name for unit in plan.units if any(map(is_recomputed, unit.modules))}


def collective_seconds(call: types.Collective, plan: FsdpPlan, machine: Machine) -> float:
    """Return the seconds of one call, by the number of machines that its axis spans."""
    mesh = plan.mesh
    # Ranks are numbered tensor axis first, then context, shard and replicate axis; or expert axis first.
    of_shards = mesh.tensor if call.group_size == mesh.num_shards else mesh.expert
    steps = {"context": mesh.tensor, "shard": of_shards, "replicate": mesh.num_shards * mesh.tensor}
    per_machine = max(1, machine.ranks_per_machine // steps.get(call.axis, 1))
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
    sizes = sum((Counter(unit.dtypes) for unit in plan.units), Counter())
    return SHORT_DTYPES.get(max(sizes, key=sizes.__getitem__, default=""), "fp32")


def interval_of(
    machine: Machine, plan: FsdpPlan, model: nn.Module, dtype: str
) -> tuple[float | None, float | None, str]:
    """Return the ends of an interval, as factors of the predicted time, and how many published runs are inside it.

    The factors are ``None`` if too few published runs of this kind were compared.
    """
    runs = machine.evidence
    is_decoder = type(model).__name__.endswith(("CausalLM", "LMHeadModel"))
    is_trained = all(parameter.requires_grad for parameter in model.parameters())
    has_experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    offloads = plan.offload_params or plan.offload_optimizer
    is_plain = dtype == "bf16" and not offloads and not plan.mesh.has_model_axes
    if runs is None or not (is_decoder and is_trained and is_plain) or has_experts:
        return None, None, _NOT_COMPARED
    inside = f"{runs.inside} of {runs.runs} published runs on {runs.devices} lie inside"
    return runs.low, runs.high, f"{inside}, each by a fit without its source"
