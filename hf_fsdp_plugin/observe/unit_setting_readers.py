"""Reads off the units of a live model: sharding, mesh, wrapping, offload, precision and prefetching.

What a unit of torch says about itself is read in ``torch_private/fsdp1.py`` and ``fsdp2.py``. The readers of the other
settings are in ``run_setting_readers``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.backends.sharding.shard import sharded_optimizers
from hf_fsdp_plugin.observe.observed_run import ObservedRun, ObservedValue, common_value, differing, unobserved
from hf_fsdp_plugin.observe.units import UnitObservation, dtype_name, fp8_library
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.state import find_part
from hf_fsdp_plugin.strategies import STRATEGIES, strategy_of
from hf_fsdp_plugin.text import format_dtype, format_names, plural
from hf_fsdp_plugin.torch_private.context_parallel import ContextMesh, context_exchange
from hf_fsdp_plugin.torch_private.modules import local_tensor


def read_strategy(run: ObservedRun) -> ObservedValue:
    """Read FSDP1's strategy; under FSDP2, derive it from the mesh and the reshard flag of the layers."""
    value = common_value(unit.live.strategy or _strategy_of_mesh(unit) for unit in run.layers)
    if run.structure.unsharded:
        return differing(f"{value}, except some parameters", run.structure.reason)
    if added := run.structure.added:
        reason = f"{plural(len(added), 'parameter')} were added after prepare(): {format_names(added, 2)}"
        return differing(f"{value}, except some parameters", reason)
    switched_off = [unit.label for unit in run.units_with_params if not unit.live.reduces]
    if len(switched_off) == len(run.units_with_params):  # by Accelerate, between two micro-batches
        switched_off = []
    if unreduced := sorted({*run.first_step.unreduced, *switched_off}):
        reason = f"gradients are not reduced: {format_names(unreduced, 2)}"
        return differing(f"{value} without gradient reduction", reason)
    gathered = [unit.label for unit in run.units_with_params if not unit.live.reshards_after_backward]
    if gathered and run.world_size > 1:
        reason = f"set_reshard_after_backward(False) keeps gathered parameters: {format_names(gathered, 2)}"
        return differing(f"{value} without reshard after backward", reason)
    if run.world_size == 1:
        return ObservedValue(value, "with one rank, all strategies are the same", matches=True)
    is_only_root = all(unit.live.is_root for unit in run.layers)
    if (is_only_root or all(map(run.is_kept, run.layers))) and _differs_in_reshard_only(value, run.plan.strategy):
        # Both FSDP versions keep the root's gathered parameters until backward under every strategy.
        reason = f"the plan keeps these units until the backward, as {value}"
        return ObservedValue(run.plan.strategy, reason, matches=True)
    if value in STRATEGIES and not STRATEGIES[value].is_sharded and run.plan.mesh.shard == 1:
        return ObservedValue(value, "a shard group of one rank does not shard", matches=True)
    return ObservedValue(value)


def _differs_in_reshard_only(value: str, planned: str) -> bool:
    row, other = STRATEGIES[planned], STRATEGIES.get(value)
    return other is not None and other is not row and other.counterpart(reshard=row.reshards_after_forward) is row


def _strategy_of_mesh(unit: UnitObservation) -> str:
    # None means that FSDP2 decides; it reshards all units except the root.
    reshard = unit.live.reshard_asked in (None, True)
    return strategy_of(sharded=unit.live.shard_size > 1, hybrid=unit.live.hybrid, reshard=reshard).name


def read_mesh_shard(run: ObservedRun) -> ObservedValue:
    """Read the size of the shard groups, and check that the ranks of a group are consecutive, as planned."""
    context = axis_size(run, "context")
    size = common_value(unit.live.shard_size // context for unit in run.units_with_params)
    if size == run.plan.mesh.shard and not run.plan.pre_sharded:
        first = run.rank - run.rank % (size * context)
        planned = tuple(range(first, first + size * context))
        for unit in run.units_with_params:
            if unit.live.shard_ranks not in ((), planned):
                group, expected = (", ".join(map(str, ranks)) for ranks in (unit.live.shard_ranks, planned))
                reason = f"the shards of {unit.name or 'the root'} are on ranks {group} instead of {expected}"
                return differing(size, reason)
    return ObservedValue(size)


def axis_size(run: ObservedRun, axis: str) -> int:
    """Return the size of a model axis on the meshes of the live model; 1 if they do not have it."""
    if axis == "context":
        context = find_part(run.model, ContextMesh)
        return context.mesh.size() if context is not None else 1
    return max((unit.live.known("axes", {}).get(MODEL_AXES[axis], 1) for unit in run.units), default=1)


def read_context_exchange(run: ObservedRun) -> ObservedValue:
    if axis_size(run, "context") == 1:
        return ObservedValue(run.plan.get("mesh.context_exchange"), "there is no context axis", matches=True)
    return ObservedValue(context_exchange())


def read_mesh_replicate(run: ObservedRun) -> ObservedValue:
    size = common_value(unit.live.replicate_size for unit in run.units_with_params)
    local = [unit.label for unit in run.units_with_params if size != 1 and not unit.live.all_reduces]
    if run.weights is not None and run.weights.diverged:
        return differing(size, f"the replicas have different weights: {format_names(run.weights.diverged, 2)}")
    if local:
        return differing(size, f"gradients are not reduced over the replicas: {format_names(local, 2)}")
    return ObservedValue(size)


def read_late_reduction(run: ObservedRun) -> ObservedValue:
    """Read what Accelerate's ``no_sync`` switches off: all reductions, or those over the replicas."""
    switch = getattr(run.model, "set_requires_gradient_sync", None)
    return ObservedValue(getattr(switch, "__name__", "") == "set_requires_all_reduce")


def read_wrap_policy(run: ObservedRun) -> ObservedValue:
    if run.plan.sharded_at_load:
        return ObservedValue("fsdp_plan", "from_pretrained chose the units", matches=True)
    if run.plan.pre_sharded:
        return ObservedValue("by hand", "the script wrapped the model")
    return _if_planned(run, run.plan.spec.wrap.policy)


def _if_planned(run: ObservedRun, value: Any) -> ObservedValue:
    """Return a value if the units are those of the plan, because FSDP does not store what has selected them."""
    if run.plan.pre_sharded:
        return unobserved("the script wrapped the model")
    if run.structure.reason:
        below_root = any(not unit.live.is_root for unit in run.units)
        return differing("other units" if below_root else "none", run.structure.reason)
    return ObservedValue(value, "the units and their parameters are those of the plan", matches=True)


def read_wrap_classes(run: ObservedRun) -> ObservedValue:
    """Read which requested classes are units. The plan has already reported classes that the model does not contain."""
    planned = {name for unit in run.plan.units for name in unit.class_names}
    of_policy = {name for unit in run.plan.units if unit.from_policy for name in unit.class_names}
    asked = [name for name in run.plan.spec.wrap.classes if name in planned]
    return _if_planned(run, asked or sorted(of_policy))


def read_min_num_params(run: ObservedRun) -> ObservedValue:
    if not (sizes := [unit.num_params for unit in run.plan.units if unit.from_policy]):
        return unobserved("the size policy chose no unit")
    return _if_planned(run, f"smallest unit {min(sizes):,}")


def read_ignored_modules(run: ObservedRun) -> ObservedValue:
    return _if_planned(run, run.plan.ignored_modules)


def read_offload(run: ObservedRun) -> ObservedValue:
    offloaded = common_value(unit.offloaded for unit in run.units_with_params)
    devices = {shard.device.type for unit in run.units_with_params for shard in unit.live.shards}
    if offloaded is True and devices != {"cpu"}:
        return ObservedValue(False, f"the offload policy is set, but the shards are on {', '.join(sorted(devices))}")
    if run.plan.offload_params and run.device_type == "cpu" and devices == {"cpu"}:
        return ObservedValue(True, "CPU ranks keep their shards in host memory", matches=True)
    return ObservedValue(offloaded)


def read_offload_optimizer(run: ObservedRun) -> ObservedValue:
    """Read where the state tensors of the model's optimizers are."""
    own = set(map(id, run.model.parameters()))
    states = [pair for optimizer in sharded_optimizers() for pair in optimizer.state.items() if id(pair[0]) in own]
    tensors = [value for _, state in states for value in state.values() if isinstance(value, torch.Tensor)]
    devices = {local_tensor(value).device.type for value in tensors if value.dim()}
    if not devices:
        return unobserved("no optimizer has state")
    if run.device_type == "cpu":
        return ObservedValue(True, "CPU ranks keep their state in host memory", matches=True)
    return ObservedValue(devices == {"cpu"})


def read_pin_memory(run: ObservedRun) -> ObservedValue:
    if not any(unit.offloaded for unit in run.units_with_params):
        return unobserved("no parameters are offloaded")
    if run.device_type == "cpu":
        return unobserved("CPU ranks do not pin memory")
    shards = (shard for unit in run.units_with_params for shard in unit.live.shards)
    return ObservedValue(common_value(shard.is_pinned() for shard in shards))


def read_param_dtype(run: ObservedRun) -> ObservedValue:
    value = common_value(unit.param_dtype for unit in run.units_in_policy_dtype)
    if value is not None and (reason := unplanned_cast(run)):
        return differing(value, reason)
    if run.plan.precision.param == "unchanged":
        casts = any(unit.live.casts for unit in run.units_with_params)
        return ObservedValue(value, "the dtype of the parameters, without a cast", matches=not casts)
    return ObservedValue(value)


def read_fp32_modules(run: ObservedRun) -> ObservedValue:
    """Read which modules have parameters that are gathered in fp32 while the policy's dtype is another one."""
    planned = set(run.plan.fp32_parameters)
    found, others = [], []
    for unit in run.units_with_params:
        for name, dtype in zip(unit.parameters, unit.live.compute_dtypes, strict=False):
            is_fp32 = dtype_name(dtype) == "fp32"
            if is_fp32:
                found.append(name)
            if is_fp32 != (name in planned) and dtype.is_floating_point:
                others.append(name)
    if not planned:
        asked = run.plan.spec.precision.fp32_modules
        return ObservedValue(asked, "without mixed precision, no parameter is cast", matches=True)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in found))
    if others:
        reason = f"{len(others)} parameters are not gathered in the planned dtype: {format_names(others, 3)}"
        return differing(modules, reason)
    return ObservedValue(modules, f"{len(found)} parameters are gathered in fp32", matches=True)


def read_reduce_dtype(run: ObservedRun) -> ObservedValue:
    if not (dtypes := [unit.reduce_dtype for unit in run.units_with_params if unit.reduce_dtype]):
        return unobserved("no parameter is trained, so no gradient is reduced")
    return ObservedValue(common_value(dtypes))


def read_output_dtype(run: ObservedRun) -> ObservedValue:
    """Read the dtype of a recorded forward or, if there is none, of the root's policy."""
    if run.first_step.output_dtype is not None:
        return ObservedValue(dtype_name(run.first_step.output_dtype), "of a recorded forward")
    policies = [unit.live.output_dtype for unit in run.units if unit.live.is_root and unit.live.version == 2]
    if policies:
        return ObservedValue(dtype_name(policies[0]) or "unchanged", "from the policy of the root")
    return unobserved("FSDP1 does not store an output dtype, and no forward was recorded")


def read_buffer_dtype(run: ObservedRun) -> ObservedValue:
    dtypes = [dtype_name(buffer.dtype) for buffer in run.model.buffers() if buffer.is_floating_point()]
    if not dtypes:
        return unobserved("the model has no floating-point buffers")
    if any(unit.live.version == 1 and unit.live.lazy for unit in run.units):
        return unobserved("FSDP1 casts buffers in the first forward, which has not run yet")
    return ObservedValue(common_value(dtypes))


_NO_PREFETCH = "fewer than two units below the root, so there is nothing to prefetch"


def read_backward_prefetch(run: ObservedRun) -> ObservedValue:
    if len(run.units_below_root) < 2:
        return unobserved(_NO_PREFETCH)
    return ObservedValue(common_value(unit.live.backward_prefetch for unit in run.units_below_root))


def read_forward_prefetch(run: ObservedRun) -> ObservedValue:
    """Read whether units prefetch the next one in the module tree."""
    num_units = len(run.units_below_root)
    if num_units < 2:
        return unobserved(_NO_PREFETCH)
    num_prefetching = sum(unit.live.forward_prefetch for unit in run.units_below_root)
    if num_prefetching not in (0, num_units, num_units - 1):  # under FSDP2 the last unit has no next one
        return differing(f"in {num_prefetching} of {num_units} units")
    wrong = [
        unit.name
        for unit, successor in pairwise(unit for unit in run.units if not unit.live.is_root)
        if unit.live.prefetched and set(map(id, unit.live.prefetched)) != set(map(id, successor.live.modules))
    ]
    if wrong and not run.plan.pre_sharded:
        reason = f"{wrong[0]} prefetches another unit than the next one"
        return differing(f"of another unit in {len(wrong)} units", reason)
    return ObservedValue(num_prefetching > 0)


def unplanned_cast(run: ObservedRun) -> str:
    """Describe a cast of the weights after they were sharded, or autocast to another dtype; empty without either."""
    if cast := stored_cast(run):
        return cast
    autocast = {dtype_name(dtype) for dtype in run.first_step.autocast_dtypes} - {run.plan.precision.param}
    # Accelerate autocasts to `mixed_precision` even if the policy overrides it: that is not a cast by the script.
    autocast -= {str(run.plan.spec.launch.mixed_precision).lower()}
    return f"the model was called in an autocast context of {', '.join(sorted(autocast))}" if autocast else ""


def stored_cast(run: ObservedRun) -> str:
    """Describe a cast of the weights after they were sharded; empty without one."""
    # Units may have their dtype before or after the cast to the master.
    planned = {dtype for unit in run.plan.units for dtype in unit.dtypes}
    shards = (shard for unit in run.units_with_params for shard in unit.live.shards if shard.is_floating_point())
    found = {shard.dtype for shard in shards if format_dtype(shard.dtype) not in planned}
    stored = sorted(set(map(dtype_name, found)) - {run.plan.precision.master})
    if not stored or run.plan.pre_sharded:
        return ""
    return f"the weights have been cast to {', '.join(stored)} after they were sharded"


_NO_FP8 = "mixed_precision is not fp8"


def read_fp8_backend(run: ObservedRun) -> ObservedValue:
    """Read the library of the layers in fp8, and which linear layers are not among them."""
    layers = _fp8_layers(run)
    linear = [canonical_name(name) for name, module in run.model.named_modules() if isinstance(module, nn.Linear)]
    others = [name for name in linear if name not in layers]
    if not layers:
        return differing("none", "no layer computes in fp8") if run.plan.spec.uses_fp8 else unobserved(_NO_FP8)
    value = common_value(map(fp8_library, layers.values()))
    emulated = any(getattr(config, "emulate", False) for config in _fp8_configs(run))
    reason = f"{plural(len(layers), 'layer computes', 'layers compute')} in fp8{', emulated' if emulated else ''}"
    reason += f"; other linear layers: {format_names(others, 3)}" if others else ""
    return ObservedValue(value, reason, matches=value == run.plan.get("fp8.backend"))


def read_fp8_all_gather(run: ObservedRun) -> ObservedValue:
    """Read whether the shards of all layers in fp8 cast themselves in the all-gather."""
    if not (sharded := {name for unit in run.units for name in unit.fp8_modules}):
        return unobserved("no layer in fp8 is sharded" if run.plan.spec.uses_fp8 else _NO_FP8)
    found = sum(unit.live.casting.count("weight") for unit in run.units)
    if 0 < found < len(sharded):
        return differing(f"in {found} of {len(sharded)} layers")
    return ObservedValue(found > 0)


def read_fp8_padding(run: ObservedRun) -> ObservedValue:
    if not (configs := _fp8_configs(run)):
        return unobserved("no layer of torchao computes in fp8")
    return ObservedValue(common_value(config.pad_inner_dim for config in configs))


def _fp8_layers(run: ObservedRun) -> dict[str, nn.Module]:
    named = ((canonical_name(name), module) for name, module in run.model.named_modules())
    return {name: module for name, module in named if fp8_library(module)}


def _fp8_configs(run: ObservedRun) -> list[Any]:
    return [module.config for module in _fp8_layers(run).values() if hasattr(module, "config")]
