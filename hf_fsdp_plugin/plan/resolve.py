"""Resolves a spec for one model and one world size. Needs no process group and no weights, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_fsdp_plugin.devices import DEVICES, unsupported_device
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.model import (
    ActivationPlan,
    Backend,
    FsdpPlan,
    PrecisionPlan,
    PrefetchPlan,
)
from hf_fsdp_plugin.plan.modules import ModuleTree
from hf_fsdp_plugin.plan.parameters import check_parameters
from hf_fsdp_plugin.plan.policy import ignored_modules
from hf_fsdp_plugin.plan.presharded import model_class_name, sharded_backend, sharded_units
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.plan.settings import check_activation, check_offload, resolve_precision
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.plan.wrap import wrap_units
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.spec.model import FsdpSpec, Version
from hf_fsdp_plugin.spec.rules import check_fsdp2_support


def resolve(
    spec: FsdpSpec,
    model: nn.Module,
    *,
    world_size: int,
    device_type: str = "cpu",
    local_world_size: int | None = None,
) -> FsdpPlan:
    """Resolve a spec for ``model`` on ``world_size`` ranks.

    Args:
        model: on any device, including ``meta``. It is not changed.
        world_size: number of ranks.
        device_type: the type of device that the ranks compute on.
        local_world_size: number of ranks on one machine. Default: computed from the launch settings, else all ranks.

    Raises:
        SpecError: at least one problem is an error. Contains all problems, including warnings.
    """
    plan, problems = try_resolve(
        spec, model, world_size=world_size, device_type=device_type, local_world_size=local_world_size
    )
    if plan is None:
        raise SpecError(problems)
    return plan


def try_resolve(
    spec: FsdpSpec,
    model: nn.Module,
    *,
    world_size: int,
    device_type: str = "cpu",
    local_world_size: int | None = None,
) -> tuple[FsdpPlan | None, tuple[Problem, ...]]:
    """As :func:`resolve`, but return ``None`` and the problems after an error. Includes the problems of the spec."""
    collector = ProblemCollector(spec)
    mesh, strategy = resolve_mesh(spec, world_size, local_world_size, collector)
    precision = resolve_precision(spec, model, device_type, collector)
    parts = _sharded_before(spec, model, collector) or _to_shard(spec, model, strategy, precision, collector)
    version: Version = 1 if parts.backend == "fsdp1" else 2
    check_offload(spec, version, device_type, collector)
    check_activation(spec, model, parts.pre_sharded, collector)
    if device_type not in DEVICES:
        collector.extend([unsupported_device(device_type)])
    if version == 2:
        collector.extend(check_fsdp2_support(spec))
    problems = tuple(dict.fromkeys((*spec.problems, *collector.problems)))
    if has_errors(problems):
        return None, problems
    plan = FsdpPlan(
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
        pre_sharded=parts.pre_sharded,
        offload_params=spec.offload.params,
        pin_memory=spec.offload.pin_memory and device_type != "cpu",
        precision=precision,
        prefetch=PrefetchPlan(
            backward=spec.prefetch.backward,
            forward=spec.prefetch.forward,
            limit_all_gathers=spec.prefetch.limit_all_gathers or version == 2,
        ),
        state_dict=spec.checkpoint.state_dict,
        activation=ActivationPlan(
            checkpointing=spec.activation.checkpointing,
            offload=spec.activation.offload,
            native=spec.activation.native,
        ),
        ram_efficient=spec.loading.ram_efficient,
        sync_module_states=spec.loading.sync_module_states,
        use_orig=spec.params.use_orig or version == 2,
        spec=spec,
        problems=problems,
    )
    return plan, problems


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The part of the plan that is read from the model."""

    backend: Backend
    units: tuple[UnitPlan, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_modules: tuple[str, ...] = ()
    ignored_parameters: tuple[str, ...] = ()
    pre_sharded: bool = False


def _sharded_before(spec: FsdpSpec, model: nn.Module, problems: ProblemCollector) -> _Parts | None:
    """The units of a model that is already sharded; ``None`` for other models."""
    backend = sharded_backend(model)
    if backend is None:
        return None
    version = 1 if backend == "fsdp1" else 2
    function = "FullyShardedDataParallel" if version == 1 else "fully_shard"
    if spec.fsdp.version != version:
        problems.add(
            "FSDP-W250",
            "fsdp.version",
            f"version {spec.fsdp.version} is overridden: the model is already sharded with {function}.",
            f"Set fsdp_version: {version}, or pass the model unwrapped.",
        )
    wrap_settings = ("wrap.policy", "wrap.classes", "wrap.min_num_params", "wrap.ignored_modules")
    unused = [name for name in wrap_settings if spec.asked(name)]
    ignored = f" {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} ignored." if unused else ""
    problems.add(
        "FSDP-W251",
        unused[0] if unused else None,
        f"{model_class_name(model)} is already sharded with {function}. Its units, sharding, precision and offload are "
        f"kept.{ignored}",
        "Pass the model unwrapped to apply the config.",
    )
    return _Parts(backend=backend, units=sharded_units(model, backend), pre_sharded=True)


def _to_shard(
    spec: FsdpSpec, model: nn.Module, strategy: str, precision: PrecisionPlan, problems: ProblemCollector
) -> _Parts:
    version = spec.fsdp.version
    ignored = ignored_modules(spec, model, problems)
    named = dict(model.named_modules())
    tree = ModuleTree(model, [named[name] for name in ignored])
    if not tree.parameters:
        problems.add("FSDP-E252", None, f"{type(model).__name__} has no parameters to shard.", "Pass another model.")
        return _Parts(backend="fsdp2", units=())
    units = wrap_units(spec, tree, strategy, version, problems)
    check_parameters(tree, units, precision, version, spec.params.use_orig, problems)
    return _Parts(
        backend="fsdp1" if version == 1 else "fsdp2",
        units=units,
        ties=tuple(entry.names for entry in tree.parameters if len(entry.names) > 1),
        ignored_modules=ignored,
        ignored_parameters=tuple(entry.name for entry in tree.parameters if entry.ignored),
    )
