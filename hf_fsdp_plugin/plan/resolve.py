"""An FSDP spec, a model and a world size -> the plan. Needs no process group, no weights, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_fsdp_plugin.devices import DEVICES, unsupported_device
from hf_fsdp_plugin.plan.complaints import Complaints
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.model import (
    ActivationPlan,
    Backend,
    FsdpPlan,
    PrecisionPlan,
    PrefetchPlan,
)
from hf_fsdp_plugin.plan.modules import ModelIndex
from hf_fsdp_plugin.plan.parameters import judge_parameters
from hf_fsdp_plugin.plan.policy import ignored_modules
from hf_fsdp_plugin.plan.presharded import author_backend, author_units, model_class_name
from hf_fsdp_plugin.plan.settings import judge_activation, judge_devices, judge_mapping, resolve_precision
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.plan.wrap import wrap_units
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.spec.model import FsdpSpec, Version


def resolve(
    spec: FsdpSpec,
    model: nn.Module,
    *,
    world_size: int,
    device_type: str = "cpu",
    local_world_size: int | None = None,
) -> FsdpPlan:
    """Decide everything that FSDP will do with ``model`` on ``world_size`` ranks.

    Args:
        model: on any device, ``meta`` included; it is read and not changed.
        world_size: number of ranks.
        device_type: where the ranks compute.
        local_world_size: ranks on one machine; by default what the launch settings say, else all of them.

    Raises:
        SpecError: with every problem at once, warnings included, if one of them is an error.
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
    """As :func:`resolve`, but errors are returned beside ``None``. The problems include those of the spec."""
    complaints = Complaints(spec)
    mesh, strategy = resolve_mesh(spec, world_size, local_world_size, complaints)
    precision = resolve_precision(spec, model, device_type, complaints)
    parts = _sharded_by_author(spec, model, complaints) or _to_shard(spec, model, strategy, precision, complaints)
    version: Version = 1 if parts.backend == "fsdp1" else 2
    judge_devices(spec, version, device_type, complaints)
    judge_mapping(spec, version, complaints)
    judge_activation(spec, model, parts.pre_sharded, complaints)
    device_problems = () if device_type in DEVICES else (unsupported_device(device_type),)
    problems = (*spec.problems, *device_problems, *complaints.problems)
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
    """What reading the model yields."""

    backend: Backend
    units: tuple[UnitPlan, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_modules: tuple[str, ...] = ()
    ignored_parameters: tuple[str, ...] = ()
    pre_sharded: bool = False


def _sharded_by_author(spec: FsdpSpec, model: nn.Module, complaints: Complaints) -> _Parts | None:
    backend = author_backend(model)
    if backend is None:
        return None
    asked: Backend = "fsdp1" if spec.fsdp.version == 1 else "fsdp2"
    by = {"fsdp1": "FullyShardedDataParallel", "fsdp2": "fully_shard"}[backend]
    if asked != backend:
        complaints.warning(
            "fsdp.version",
            f"the config says version {spec.fsdp.version}, but the model is already sharded with {by}; that stays.",
            f"Set fsdp_version: {1 if backend == 'fsdp1' else 2}, or hand over the model unwrapped.",
        )
    wrap_settings = ("wrap.policy", "wrap.classes", "wrap.min_num_params", "wrap.ignored_modules")
    unused = [name for name in wrap_settings if spec.asked(name)]
    said = f"{', '.join(unused)} are not used" if unused else "its units are its author's"
    complaints.warning(
        unused[0] if unused else None,
        f"{model_class_name(model)} is already sharded with {by}: {said}, and sharding, precision and offload are as "
        "the author set them.",
        "Hand over the model unwrapped, if the config is to decide.",
    )
    return _Parts(backend=backend, units=author_units(model, backend), pre_sharded=True)


def _to_shard(
    spec: FsdpSpec, model: nn.Module, strategy: str, precision: PrecisionPlan, complaints: Complaints
) -> _Parts:
    version = spec.fsdp.version
    ignored = ignored_modules(spec, model, complaints)
    named = dict(model.named_modules())
    index = ModelIndex(model, [named[name] for name in ignored])
    if not index.parameters:
        complaints.error(None, f"{type(model).__name__} has no parameters, so that there is nothing to shard.")
        return _Parts(backend="fsdp2", units=())
    units = wrap_units(spec, index, strategy, version, complaints)
    judge_parameters(index, units, precision, version, spec.params.use_orig, complaints)
    return _Parts(
        backend="fsdp1" if version == 1 else "fsdp2",
        units=units,
        ties=tuple(entry.names for entry in index.parameters if len(entry.names) > 1),
        ignored_modules=ignored,
        ignored_parameters=tuple(entry.name for entry in index.parameters if entry.ignored),
    )
