"""The collectives of one optimizer step: what the plan makes torch's FSDP communicate, call by call."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.weight_loader import master_dtype
from hf_fsdp_plugin.estimate.results import Axis, Collective, CollectiveKind, CommunicationEstimate, StepPhase
from hf_fsdp_plugin.estimate.unit_sizes import unit_sizes
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.modules import class_names
from hf_fsdp_plugin.plan.names import ancestors, is_inside, parent_of
from hf_fsdp_plugin.strategies import STRATEGIES

_NATIVE_LAYER = "GradientCheckpointingLayer"
"""Transformers' base class of layers that ``gradient_checkpointing_enable`` checkpoints."""


def estimate_communication(plan: FsdpPlan, model: nn.Module, workload: Workload) -> CommunicationEstimate:
    """Return every collective of one optimizer step of one rank, from the second step on.

    The counts follow torch's sources (``_fully_shard/_fsdp_param_group.py`` and ``_runtime_utils.py``) and are compared
    with those of real runs. It is assumed that each unit runs once per forward pass and that every trainable parameter
    has a gradient. Collectives of the training loop are not included: the Trainer gathers the number of tokens of each
    rank (8 bytes), and losses when it logs them.

    Args:
        model: the model that was planned, on any device.
    """
    found = [*_unit_collectives(plan, model, workload), *_ignored_parameters(plan, model, workload)]
    return CommunicationEstimate(collectives=(*found, *_clipping(plan, model, workload)))


def _unit_collectives(plan: FsdpPlan, model: nn.Module, workload: Workload) -> Iterator[Collective]:
    """Yield the all-gathers of each unit, in the order of the plan, and the reductions of its gradients."""
    strategy, micro_batches, shards = STRATEGIES[plan.strategy], workload.accumulation, plan.mesh.shard
    keeps_gathered = plan.backend == "fsdp1" and not strategy.reshards_after_forward
    # FSDP1 keeps parameters that it does not free after forward until a backward that reduces gradients.
    forward = 1 if keeps_gathered and not workload.sync_each_batch else micro_batches
    reductions = micro_batches if workload.sync_each_batch else 1
    # Gradients are reduced over replicas also if there is only one (see :func:`device_mesh`).
    has_replicas = plan.mesh.replicate > 1 or strategy.hybrid or not strategy.is_sharded
    in_backward = _gathered_in_backward(plan, model)
    for unit, sizes, backward in zip(plan.units, unit_sizes(plan, model), in_backward, strict=True):
        name, reduced = unit.name, sizes.reduce_input
        if shards > 1 and unit.parameters:
            yield _call(plan, "all_gather", "shard", sizes.gathered, forward, "forward", name)
            if backward:
                yield _call(plan, "all_gather", "shard", sizes.gathered, backward * micro_batches, "backward", name)
        if reduced and shards > 1:
            yield _call(plan, "reduce_scatter", "shard", reduced, reductions, "backward", name)
        if reduced and has_replicas:
            yield _call(plan, "all_reduce", "replicate", reduced // shards, reductions, "backward", name)


def _call(
    plan: FsdpPlan, kind: CollectiveKind, axis: Axis, num_bytes: int, calls: int, phase: StepPhase, unit: str = ""
) -> Collective:
    size = {"shard": plan.mesh.shard, "replicate": plan.mesh.replicate, "world": plan.world_size}[axis]
    return Collective(kind=kind, axis=axis, group_size=size, bytes=num_bytes, calls=calls, unit=unit, phase=phase)


def _gathered_in_backward(plan: FsdpPlan, model: nn.Module) -> list[int]:
    """Return, for each unit, the number of all-gathers in the backward pass of one micro-batch.

    A unit that is freed after forward is gathered again when the gradient of its output is computed. FSDP2 prefetches
    the preceding unit even if that one has no backward. FSDP1 gathers a unit inside a checkpointed module for the
    recomputed forward, frees it, and gathers it for the backward; FSDP2 frees it after the backward only.
    """
    needs_gradient = _output_needs_gradient(plan, model)
    counts = [
        int(unit.reshard_after_forward and needed) for unit, needed in zip(plan.units, needs_gradient, strict=True)
    ]
    if plan.backend == "fsdp1":
        again = _gathered_for_recompute(plan, model)
        counts = [count * (1 + more) for count, more in zip(counts, again, strict=True)]
    sharded = [index for index, unit in enumerate(plan.units) if unit.parameters]
    if plan.backend == "fsdp2" and plan.prefetch.backward == "pre":
        first = next((at for at, index in enumerate(sharded) if needs_gradient[index]), 0)
        if first > 0 and plan.units[sharded[first - 1]].reshard_after_forward:
            counts[sharded[first - 1]] = 1
    return counts


def _output_needs_gradient(plan: FsdpPlan, model: nn.Module) -> list[bool]:
    """Return, for each unit, whether a trainable parameter precedes the end of its forward, in the module tree."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    first_trainable = next((at for at, (_, p) in enumerate(parameters) if p.requires_grad), len(parameters))
    after = [name for name, _ in parameters[first_trainable:]]
    return [any(is_inside(name, path) for name in after for path in unit.modules) for unit in plan.units]


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
        return {name for name, module in model.named_modules() if _NATIVE_LAYER in class_names(module)}
    return {name for unit in plan.units if unit.from_policy for name in unit.modules}


def _last_parameter(path: str, layer: nn.Module) -> str:
    """Return the name of the parameter that a layer uses last.

    Many layers register their norms last, but use them before attention and MLP.
    """
    children = [name for name, child in layer.named_children() if next(child.parameters(), None) is not None]
    inner = [name for name in children if "norm" not in name.lower() and "ln" not in name.lower()] or children
    names = [name for name, _ in layer.named_parameters() if not inner or is_inside(name, inner[-1])]
    return f"{path}.{names[-1]}" if names else ""


def _ignored_parameters(plan: FsdpPlan, model: nn.Module, workload: Workload) -> Iterator[Collective]:
    """Yield the averages of the gradients of parameters that are not sharded, after every backward pass."""
    for parameter in map(model.get_parameter, plan.ignored_parameters):
        if parameter.requires_grad:
            num_bytes = parameter.numel() * master_dtype(plan, parameter).itemsize
            yield _call(plan, "all_reduce", "world", num_bytes, workload.accumulation, "backward")


def _clipping(plan: FsdpPlan, model: nn.Module, workload: Workload) -> Iterator[Collective]:
    """Yield the reduction of the gradient norm, and the reduction of the gradient scaler of fp16."""
    if plan.precision.param == "fp16":
        yield _call(plan, "all_reduce", "world", 4, 1, "clipping" if workload.clip_norm else "update")
    parameters = [model.get_parameter(name) for unit in plan.units for name in unit.parameters]
    is_sharded = plan.mesh.shard > 1 or plan.backend == "fsdp2"  # FSDP2 has a shard axis of size 1, too
    if workload.clip_norm and parameters and is_sharded:
        widest = any(master_dtype(plan, parameter) is torch.float64 for parameter in parameters)
        yield _call(plan, "all_reduce", "shard", 8 if widest else 4, 1, "clipping")
