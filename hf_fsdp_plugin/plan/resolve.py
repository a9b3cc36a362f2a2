"""Resolves a spec for one model and one world size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from hf_fsdp_plugin.devices import unsupported_device
from hf_fsdp_plugin.plan.fp32 import Fp32Parts, resolve_fp32_modules
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.model import Backend, FsdpPlan, PrecisionPlan
from hf_fsdp_plugin.plan.modules import ModuleTree
from hf_fsdp_plugin.plan.parameters import check_parameters
from hf_fsdp_plugin.plan.policy import ignored_modules
from hf_fsdp_plugin.plan.presharded import (
    distributed_config_of,
    has_units,
    model_class_name,
    sharded_backend,
    sharded_units,
    tied_names,
    unsharded_parameters,
)
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.plan.settings import check_activation, check_offload, resolve_precision
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.plan.wrap import wrap_units
from hf_fsdp_plugin.problems import SpecError, has_errors
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, Version
from hf_fsdp_plugin.spec.rules import check_fsdp2_support


def resolve(
    spec: FsdpSpec,
    model: nn.Module,
    *,
    world_size: int,
    device_type: str = "cpu",
    local_world_size: int | None = None,
) -> FsdpPlan:
    """Return the plan of a spec for one model and one world size. Needs no process group.

    Args:
        model: on any device, including ``meta``. It is not changed.
        world_size: number of ranks.
        device_type: type of the device that the ranks compute on.
        local_world_size: number of ranks on one machine. Default: computed from the launch settings, else all ranks.

    Raises:
        SpecError: at least one problem is an error. The exception contains all problems of the spec and of the plan,
            including warnings and notes.
    """
    collector = ProblemCollector(spec)
    mesh, strategy = resolve_mesh(spec, world_size, local_world_size, collector)
    precision = resolve_precision(spec, model, device_type, collector)
    parts = _sharded_parts(spec, model, collector) or _planned_parts(spec, model, strategy, precision, collector)
    version: Version = 1 if parts.backend == "fsdp1" else 2
    fp32 = Fp32Parts()
    if parts.sharded_at_load or not parts.pre_sharded:
        fp32 = resolve_fp32_modules(spec, model, precision, parts.backend, parts.ignored_parameters, collector)
    check_offload(spec, version, device_type, collector)
    check_activation(spec, model, parts.pre_sharded, collector)
    if (problem := unsupported_device(device_type)) is not None:
        collector.problems.append(problem)
    if version == 2:
        collector.problems.extend(check_fsdp2_support(spec))
    problems = tuple(dict.fromkeys((*spec.problems, *collector.problems)))
    if has_errors(problems):
        raise SpecError(problems)
    return FsdpPlan(
        backend=parts.backend,
        model_class=model_class_name(model),
        world_size=world_size,
        device_type=device_type,
        strategy=strategy,
        mesh=mesh,
        units=parts.units,
        ties=parts.ties,
        ignored_modules=parts.ignored_modules,
        ignored_parameters=parts.ignored_parameters,
        fp32_modules=fp32.modules,
        fp32_parameters=fp32.parameters,
        pre_sharded=parts.pre_sharded,
        sharded_at_load=parts.sharded_at_load,
        offload_params=spec.offload.params,
        pin_memory=spec.offload.pin_memory and device_type != "cpu",
        precision=precision,
        prefetch=replace(spec.prefetch, limit_all_gathers=spec.prefetch.limit_all_gathers or version == 2),
        state_dict=spec.checkpoint.state_dict,
        activation=spec.activation,
        ram_efficient=spec.loading.ram_efficient,
        sync_module_states=spec.loading.sync_module_states,
        use_orig=spec.params.use_orig or version == 2,
        spec=spec,
        problems=problems,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Fields of the plan that depend on the model."""

    backend: Backend
    units: tuple[UnitPlan, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_modules: tuple[str, ...] = ()
    ignored_parameters: tuple[str, ...] = ()
    pre_sharded: bool = False
    sharded_at_load: bool = False


def _sharded_parts(spec: FsdpSpec, model: nn.Module, problems: ProblemCollector) -> _Parts | None:
    """Return the parts of a model that is already sharded; ``None`` for other models."""
    backend = sharded_backend(model)
    if backend is None:
        return None
    version = 1 if backend == "fsdp1" else 2
    function = "FullyShardedDataParallel" if version == 1 else "fully_shard"
    if not has_units(model):
        function = "DTensors of another parallelism"
    if spec.fsdp.version != version:
        problems.add(
            "FSDP-W250",
            "fsdp.version",
            f"version {spec.fsdp.version} is overridden: the model is already sharded with {function}.",
            f"Set fsdp_version: {version}, or pass the model unwrapped.",
        )
    wrap_settings = ("wrap.policy", "wrap.classes", "wrap.min_num_params", "wrap.ignored_modules")
    at_load = distributed_config_of(model) is not None
    kept = wrap_settings if at_load else (*wrap_settings, "precision.fp32_modules")
    unused = [name for name in kept if spec.asked(name)]
    ignored = f" {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} ignored." if unused else ""
    if at_load and not unused:
        message = f"from_pretrained has sharded {model_class_name(model)}: its units, mesh and offload are kept."
        problems.add("FSDP-N280", None, message)
    elif has_units(model):
        problems.add(
            "FSDP-W251",
            unused[0] if unused else None,
            f"{model_class_name(model)} is already sharded with {function}. Its units, sharding, precision and offload "
            f"are kept.{ignored}",
            "Pass the model unwrapped to apply the config.",
        )
    else:
        problems.add(
            "FSDP-W251",
            unused[0] if unused else None,
            f"the parameters of {model_class_name(model)} are DTensors already, as tensor parallelism makes them, and "
            "it has no FSDP units. FSDP is not applied: nothing more is sharded, and no gradients are averaged over "
            f"ranks with other data.{ignored}",
            "Load the model without tp_plan and without parallelize_module to train it with FSDP.",
        )
    if backend == "fsdp1":
        return _Parts(backend=backend, units=sharded_units(model, backend), pre_sharded=True)
    units = sharded_units(model, backend)
    if at_load:
        # Transformers never frees the last norm and the head, whatever the strategy: they do not show it.
        units = tuple(replace(unit, from_policy=unit.from_policy and unit.reshard_after_forward) for unit in units)
    return _Parts(
        backend=backend,
        units=units,
        ties=tied_names(model),
        # Transformers does not know of parameters that are added after from_pretrained. In a model that the script
        # sharded, the script reduces their gradients.
        ignored_parameters=unsharded_parameters(model) if at_load else (),
        pre_sharded=True,
        sharded_at_load=at_load,
    )


def _planned_parts(
    spec: FsdpSpec, model: nn.Module, strategy: str, precision: PrecisionPlan, problems: ProblemCollector
) -> _Parts:
    """Return the parts of a model that is not sharded yet."""
    version = spec.fsdp.version
    ignored = ignored_modules(spec, model, problems)
    tree = ModuleTree(model, [model.get_submodule(name) for name in ignored])
    if not tree.parameters:
        problems.add(
            "FSDP-E252", None, f"{type(model).__name__} has no parameters to shard.", "Pass the model that is trained."
        )
        return _Parts(backend="fsdp2", units=())
    units = wrap_units(spec, tree, strategy, version, precision, problems)
    check_parameters(tree, units, precision, version, spec.params.use_orig, problems)
    return _Parts(
        backend="fsdp1" if version == 1 else "fsdp2",
        units=units,
        ties=tuple(entry.names for entry in tree.parameters if len(entry.names) > 1),
        ignored_modules=ignored,
        ignored_parameters=tuple(entry.name for entry in tree.parameters if entry.ignored),
    )
