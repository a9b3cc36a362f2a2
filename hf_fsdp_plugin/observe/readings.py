"""One function a setting: what the live model shows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hf_fsdp_plugin.observe.memory import unmanaged_parameters
from hf_fsdp_plugin.observe.readings_run import (
    read_activation_offload,
    read_asynchronous,
    read_checkpointing,
    read_distributed_type,
    read_dynamo,
    read_loading,
    read_mixed_precision,
    read_num_machines,
    read_num_processes,
    read_ram_efficient,
    read_state_dict,
    read_use_cpu,
)
from hf_fsdp_plugin.observe.scene import Reading, Scene, uniform, unobservable
from hf_fsdp_plugin.observe.units import UnitObservation, checkpoints_natively, dtype_name
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.strategies import STRATEGIES, strategy_of


def read_version(scene: Scene) -> Reading:
    return Reading(value=uniform(unit.version for unit in scene.units))


def read_strategy(scene: Scene) -> Reading:
    """FSDP1 keeps the word; under FSDP2 the mesh and the layers' reshard flag are the strategy."""
    layers = scene.layers
    value = uniform(unit.live.strategy or _strategy_of_mesh(unit) for unit in layers)
    if scene.world_size == 1:
        return Reading(value=value, reason="one process holds everything, whatever the strategy", matches=True)
    if all(unit.is_root for unit in layers) and _differs_in_reshard_only(value, scene.plan.strategy):
        # torch keeps a root's parameters until backward under both versions and every strategy.
        return Reading(
            value=scene.plan.strategy, reason="with the root as the only unit, both are the same", matches=True
        )
    if value in STRATEGIES and not STRATEGIES[value].is_sharded and scene.plan.mesh.shard == 1:
        return Reading(value=value, reason="shard groups of one rank cut nothing", matches=True)
    return Reading(value=value)


def _differs_in_reshard_only(value: str, planned: str) -> bool:
    if value == planned or value not in STRATEGIES:
        return False
    return STRATEGIES[value].counterpart(reshard=STRATEGIES[planned].reshards_after_forward) is STRATEGIES[planned]


def _strategy_of_mesh(unit: UnitObservation) -> str:
    # None: left to FSDP2, which means "reshard", and makes an exception for the root only.
    reshard = unit.live.reshard_asked is None or unit.live.reshard_asked
    return strategy_of(sharded=unit.live.shard_size > 1, hybrid=unit.live.hybrid, reshard=reshard).name


def read_mesh_shard(scene: Scene) -> Reading:
    return Reading(value=uniform(unit.live.shard_size for unit in scene.owners))


def read_mesh_replicate(scene: Scene) -> Reading:
    return Reading(value=uniform(unit.live.replicate_size for unit in scene.owners))


def read_wrap_policy(scene: Scene) -> Reading:
    """Were the modules that the policy chose made units? FSDP keeps no policy, only its outcome."""
    if scene.plan.pre_sharded:
        return Reading(value="by hand", reason="the author of the model wrapped it")
    wrapped = {name for unit in scene.units for name in unit.module_names}
    chosen = [name for unit in scene.plan.units if unit.from_policy for name in unit.modules]
    absent = [name for name in chosen if name not in wrapped]
    below_root = [unit for unit in scene.units if not unit.is_root]
    if absent:
        value = "none" if not below_root else "other units"
        return Reading(
            value=value, reason=f"{len(absent)} of {len(chosen)} planned units are missing, {absent[0]} for one"
        )
    if chosen:
        return Reading(
            value=scene.plan.spec.wrap.policy, reason=f"{len(chosen)} modules chosen, all are units", matches=True
        )
    reason = "the units below the root are no layers that a policy chose" if below_root else ""
    return Reading(value="none", reason=reason)


def read_wrap_classes(scene: Scene) -> Reading:
    """The classes of the units, of those that were asked; a class that the model lacks was the plan's to judge."""
    asked = scene.plan.spec.wrap.classes
    found = {name for unit in scene.units for name in unit.class_name.split(" + ")}
    planned = {name for unit in scene.plan.units if unit.from_policy for name in unit.class_names}
    observed = tuple(name for name in asked if name in found) or tuple(sorted(found & planned))
    missing = sorted(planned - found)
    absent = sorted(set(asked) - found - planned)
    reason = f"not made units: {', '.join(missing)}" if missing else ""
    if absent and not missing:
        reason = f"not in the model: {', '.join(absent)}"
    # Without planned units there is nothing but the asked names to go by.
    return Reading(value=observed, reason=reason, matches=not missing if planned else not absent)


def read_min_num_params(scene: Scene) -> Reading:
    planned = {name for unit in scene.plan.units if unit.from_policy for name in unit.modules}
    sizes = [unit.num_params for unit in scene.units if planned.intersection(unit.module_names)]
    if not sizes:
        return unobservable("no unit was chosen by size")
    reason = f"the smallest unit chosen by size has {min(sizes)} parameters"
    return Reading(value=min(sizes), reason=reason, matches=min(sizes) >= scene.plan.spec.wrap.min_num_params)


def read_ignored_modules(scene: Scene) -> Reading:
    plain = {id(parameter) for parameter in unmanaged_parameters(scene.model, scene.units)}
    whole: list[str] = []
    for name, module in scene.model.named_modules():
        parameters = list(module.parameters())
        inside_another = any(name == outer or name.startswith(f"{outer}.") for outer in whole)
        if parameters and not inside_another and all(id(parameter) in plain for parameter in parameters):
            whole.append(name)
    found = [canonical_name(name) for name in whole]
    sharded = [name for name in scene.plan.ignored_modules if not _inside_any(name, found) and _owns(scene.model, name)]
    reason = (
        f"sharded all the same: {', '.join(sharded[:3])}"
        if sharded
        else f"whole on every rank: {', '.join(found) or 'nothing'}"
    )
    return Reading(value=found, reason=reason, matches=not sharded)


def _inside_any(name: str, outers: Iterable[str]) -> bool:
    return any(name == outer or not outer or name.startswith(f"{outer}.") for outer in outers)


def _owns(model: nn.Module, name: str) -> bool:
    return any(
        canonical_name(found) == name and any(True for _ in module.parameters())
        for found, module in model.named_modules()
    )


def read_offload(scene: Scene) -> Reading:
    flags = uniform(unit.offloaded for unit in scene.owners)
    devices = {shard.device.type for unit in scene.owners for shard in unit.live.shards}
    if flags is True and devices != {"cpu"}:
        return Reading(value=False, reason=f"the policy is set, yet shards lie on {', '.join(sorted(devices))}")
    if scene.plan.offload_params and scene.device_type == "cpu" and devices == {"cpu"}:
        return Reading(value=True, reason="CPU ranks keep their shards in host memory anyway", matches=True)
    return Reading(value=flags)


def read_pin_memory(scene: Scene) -> Reading:
    if not any(unit.offloaded for unit in scene.owners):
        return unobservable("no parameters are offloaded")
    if scene.device_type == "cpu":
        return unobservable("there is no accelerator to pin memory for")
    return Reading(value=uniform(shard.is_pinned() for unit in scene.owners for shard in unit.live.shards))


def read_param_dtype(scene: Scene) -> Reading:
    value = uniform(unit.param_dtype for unit in scene.owners)
    if scene.plan.precision.param == "unchanged":
        return Reading(value=value, reason="as the parameters are", matches=not any(u.live.casts for u in scene.owners))
    return Reading(value=value)


def read_reduce_dtype(scene: Scene) -> Reading:
    trained = [unit for unit in scene.owners if unit.reduce_dtype]
    if not trained:
        return unobservable("nothing is trained, so nothing is reduced")
    return Reading(
        value=uniform(unit.reduce_dtype for unit in trained), matches=_unless_unchanged(scene.plan.precision.reduce)
    )


def read_output_dtype(scene: Scene) -> Reading:
    """What a forward was seen to return comes before what the root's policy says."""
    matches = _unless_unchanged(scene.plan.precision.output)
    if scene.output_dtype is not None:
        return Reading(value=dtype_name(scene.output_dtype), reason="seen in the last forward", matches=matches)
    policies = [unit.live.output_dtype for unit in scene.units if unit.is_root and unit.version == 2]
    if policies:
        return Reading(value=dtype_name(policies[0]) or "unchanged", reason="the root's policy", matches=matches)
    return unobservable("FSDP1 keeps no output dtype, and no forward was watched")


def read_buffer_dtype(scene: Scene) -> Reading:
    dtypes = [dtype_name(buffer.dtype) for buffer in scene.model.buffers() if buffer.is_floating_point()]
    if not dtypes:
        return unobservable("the model has no floating-point buffers")
    if any(unit.version == 1 and unit.live.lazy for unit in scene.units):
        return unobservable("FSDP1 casts buffers in the first forward, which has not run")
    return Reading(value=uniform(dtypes), matches=_unless_unchanged(scene.plan.precision.buffer))


def _unless_unchanged(planned: str) -> bool | None:
    return True if planned == "unchanged" else None


def read_backward_prefetch(scene: Scene) -> Reading:
    below_root = [unit for unit in scene.owners if not unit.is_root]
    if len(below_root) < 2:
        return unobservable("there are no two units below the root to fetch ahead of each other")
    return Reading(value=uniform(unit.live.backward_prefetch for unit in below_root))


def read_forward_prefetch(scene: Scene) -> Reading:
    below_root = [unit for unit in scene.owners if not unit.is_root]
    if len(below_root) < 2:
        return unobservable("there are no two units below the root to fetch ahead of each other")
    num_ahead = sum(unit.live.forward_prefetch for unit in below_root)
    # Nothing comes after the last one in FSDP2's lists.
    if num_ahead in (0, len(below_root), len(below_root) - 1):
        return Reading(value=num_ahead > 0)
    return Reading(value=f"in {num_ahead} of {len(below_root)} units", matches=False)


def read_limit_all_gathers(scene: Scene) -> Reading:
    if any(unit.version == 2 for unit in scene.units):
        return Reading(value=True, reason="FSDP2 frees memory in stream order and has no limiter to switch off")
    return Reading(value=uniform(unit.live.limit_all_gathers for unit in scene.units))


def read_use_orig(scene: Scene) -> Reading:
    if any(unit.version == 2 for unit in scene.units):
        return Reading(value=True, reason="FSDP2 shards each parameter by itself and never flattens")
    return Reading(value=uniform(unit.live.use_orig for unit in scene.units))


READINGS: dict[str, Callable[[Scene], Reading]] = {
    "fsdp.version": read_version,
    "sharding.strategy": read_strategy,
    "mesh.shard": read_mesh_shard,
    "mesh.replicate": read_mesh_replicate,
    "wrap.policy": read_wrap_policy,
    "wrap.classes": read_wrap_classes,
    "wrap.min_num_params": read_min_num_params,
    "wrap.ignored_modules": read_ignored_modules,
    "offload.params": read_offload,
    "offload.pin_memory": read_pin_memory,
    "precision.param": read_param_dtype,
    "precision.reduce": read_reduce_dtype,
    "precision.output": read_output_dtype,
    "precision.buffer": read_buffer_dtype,
    "prefetch.backward": read_backward_prefetch,
    "prefetch.forward": read_forward_prefetch,
    "prefetch.limit_all_gathers": read_limit_all_gathers,
    "checkpoint.state_dict": read_state_dict,
    "checkpoint.asynchronous": read_asynchronous,
    "activation.checkpointing": read_checkpointing,
    "activation.native": lambda scene: Reading(value=any(map(checkpoints_natively, scene.model.modules()))),
    "activation.offload": read_activation_offload,
    "loading.ram_efficient": read_ram_efficient,
    "loading.sync_module_states": lambda scene: read_loading(scene, wanted=scene.plan.sync_module_states),
    "params.use_orig": read_use_orig,
    "launch.num_processes": read_num_processes,
    "launch.num_machines": read_num_machines,
    "launch.mixed_precision": read_mixed_precision,
    "launch.use_cpu": read_use_cpu,
    "launch.distributed_type": read_distributed_type,
    "launch.dynamo_config": read_dynamo,
}
