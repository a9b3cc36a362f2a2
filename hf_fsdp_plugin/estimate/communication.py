"""The collectives of one optimizer step: what the plan makes torch's FSDP communicate, call by call."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.weight_loader import master_dtype
from hf_fsdp_plugin.backends.sharding.forwards import checkpoints_itself
from hf_fsdp_plugin.estimate.types import Axis, Collective, CollectiveKind, CommunicationEstimate, StepPhase, Workload
from hf_fsdp_plugin.estimate.unit_sizes import unit_sizes
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import ancestors, is_inside, parent_of
from hf_fsdp_plugin.strategies import STRATEGIES


def estimate_communication(plan: FsdpPlan, model: nn.Module, workload: Workload) -> CommunicationEstimate:
    """Return every collective of one optimizer step of one rank, from the second step on.

    The counts follow torch's sources (``_fully_shard/_fsdp_param_group.py`` and ``_runtime_utils.py``) and are compared
    with those of real runs. It is assumed that each unit runs once per forward pass and that every trainable parameter
    has a gradient. Collectives of the training loop are not included: the Trainer gathers the number of tokens of each
    rank (8 bytes), and losses when it logs them.

    Args:
        model: the model that was planned, on any device.
    """
    return CommunicationEstimate(collectives=tuple(_collectives(plan, model, workload)))


def _collectives(plan: FsdpPlan, model: nn.Module, workload: Workload) -> Iterator[Collective]:
    """Yield the collectives of each unit, in the order of the plan, then those of ignored parameters and clipping."""
    strategy, micro_batches, shards = STRATEGIES[plan.strategy], workload.accumulation, plan.mesh.shard
    group_sizes: dict[Axis, int] = {"shard": shards, "replicate": plan.mesh.replicate, "world": plan.world_size}

    def calls(
        number: int, kind: CollectiveKind, axis: Axis, num_bytes: int, phase: StepPhase, unit: str = ""
    ) -> Collective:
        size = group_sizes[axis]
        return Collective(kind=kind, axis=axis, group_size=size, bytes=num_bytes, calls=number, unit=unit, phase=phase)

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
            yield calls(forward, "all_gather", "shard", sizes.gathered, "forward", name)
            if backward:
                yield calls(backward * micro_batches, "all_gather", "shard", sizes.gathered, "backward", name)
        if reduced and shards > 1:
            yield calls(reductions, "reduce_scatter", "shard", reduced, "backward", name)
        if reduced and has_replicas:
            yield calls(reductions, "all_reduce", "replicate", reduced // shards, "backward", name)
    # The gradients of parameters that are not sharded are averaged after every backward pass.
    for parameter in map(model.get_parameter, plan.ignored_parameters):
        if parameter.requires_grad:
            num_bytes = parameter.numel() * master_dtype(plan, parameter).itemsize
            yield calls(micro_batches, "all_reduce", "world", num_bytes, "backward")
    if plan.precision.param == "fp16":  # the gradient scaler
        yield calls(1, "all_reduce", "world", 4, "clipping" if workload.clip_norm else "update")
    parameters = [model.get_parameter(name) for unit in plan.units for name in unit.parameters]
    is_sharded = shards > 1 or plan.backend == "fsdp2"  # FSDP2 has a shard axis of size 1, too
    if workload.clip_norm and parameters and is_sharded:
        widest = any(master_dtype(plan, parameter) is torch.float64 for parameter in parameters)
        yield calls(1, "all_reduce", "shard", 8 if widest else 4, "clipping")


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
