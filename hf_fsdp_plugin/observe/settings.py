"""Comparison of the requested value of each setting with its value on the live model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from hf_fsdp_plugin.contracts import ContractError
from hf_fsdp_plugin.observe import sharding_readers as sharding
from hf_fsdp_plugin.observe import training_readers as training
from hf_fsdp_plugin.observe.observed_run import ObservedRun, ObservedValue, common_value, differing, unobservable
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Origin, Problem

Reader = Callable[[ObservedRun], ObservedValue]
_ALWAYS_SHOWN: Final[dict[str, Reader]] = {
    "fsdp.version": lambda run: ObservedValue(common_value(unit.live.version for unit in run.units)),
    "sharding.strategy": sharding.read_strategy,
    "mesh.shard": sharding.read_mesh_shard,
    "mesh.replicate": sharding.read_mesh_replicate,
    "wrap.policy": sharding.read_wrap_policy,
    "offload.params": sharding.read_offload,
    "precision.param": sharding.read_param_dtype,
    "precision.reduce": sharding.read_reduce_dtype,
    "prefetch.backward": sharding.read_backward_prefetch,
    "prefetch.forward": sharding.read_forward_prefetch,
    "activation.checkpointing": training.read_checkpointing,
}
"""Settings that determine the memory, the speed or the numerics of the run: the report contains them in any case."""

READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        **_ALWAYS_SHOWN,
        "wrap.classes": sharding.read_wrap_classes,
        "wrap.min_num_params": sharding.read_min_num_params,
        "wrap.ignored_modules": sharding.read_ignored_modules,
        "offload.pin_memory": sharding.read_pin_memory,
        "precision.fp32_modules": sharding.read_fp32_modules,
        "precision.output": sharding.read_output_dtype,
        "precision.buffer": sharding.read_buffer_dtype,
        "prefetch.limit_all_gathers": sharding.read_limit_all_gathers,
        "params.use_orig": sharding.read_use_orig,
        "checkpoint.state_dict": training.read_state_dict,
        "checkpoint.asynchronous": training.read_asynchronous,
        "checkpoint.verify": lambda run: unobservable("only a resume uses this setting; the model does not record it"),
        "activation.native": training.read_native,
        "activation.offload": training.read_activation_offload,
        "loading.ram_efficient": training.read_ram_efficient,
        "loading.sync_module_states": lambda run: training.read_loading(run, planned=run.plan.sync_module_states),
        "launch.num_processes": lambda run: ObservedValue(run.world_size),
        "launch.num_machines": training.read_num_machines,
        "launch.mixed_precision": training.read_mixed_precision,
        "launch.use_cpu": training.read_use_cpu,
        "launch.distributed_type": lambda run: ObservedValue("FSDP"),
        "launch.dynamo_config": training.read_dynamo,
    }
)
"""Canonical name of a setting -> function that reads its value from the live model."""


def read_setting(name: str, run: ObservedRun) -> ObservedValue:
    """Read one setting from the live model, by canonical name."""
    if name in READERS:
        return READERS[name](run)
    if name.startswith("xla."):
        asked = run.plan.spec.get(name)
        return ObservedValue(False if asked else asked, "the model is not on an XLA device", matches=not asked)
    return unobservable("only the launcher uses this setting; the model does not record it")


Status = Literal["applied", "differs", "unobservable"]

_NOT_SUPPORTED_BY_FSDP2 = "FSDP-W148"


@dataclass(frozen=True, kw_only=True)
class SettingObservation:
    """One setting of the report. ``asked``, ``planned`` and ``observed`` are JSON values.

    Attributes:
        asked: the requested value, or the planned value if no source sets it.
        planned: the value in the plan for this model and world size; never ``auto``.
        observed: the value on the live model; ``None`` if ``unobservable``.
        origin: where the requested value was written, or ``DEFAULT_ORIGIN``.
        reason: why the setting differs or is unobservable, or an explanation of an applied value.
    """

    setting: str
    asked: Any
    planned: Any
    observed: Any
    status: Status
    origin: Origin
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "origin": self.origin.to_json()}


def observe_settings(run: ObservedRun) -> tuple[SettingObservation, ...]:
    """Compare the settings that the report shows with the live model, in the order of the spec."""
    return tuple(_observe_setting(name, run) for name in _shown_settings(run.plan))


def check_settings(settings: tuple[SettingObservation, ...], plan: FsdpPlan) -> list[Problem]:
    """Return a problem for each setting that differs.

    The problem is a warning if FSDP2 supports only the observed value, or if the script wrapped the model.
    """
    not_supported = {problem.setting for problem in plan.problems if problem.code == _NOT_SUPPORTED_BY_FSDP2}
    problems = []
    for row in settings:
        if row.status != "differs":
            continue
        reason = f" ({row.reason})" if row.reason else ""
        asked, observed = format_value(row.asked), format_value(row.observed)
        message = f"{asked} was requested, but the live model has {observed}{reason}."
        code, fix = "FSDP-E503", "Do not change the model after prepare(). If nothing changes it, report a bug."
        if plan.pre_sharded or row.setting in not_supported:
            code, fix = "FSDP-W506", ""
        origin = plan.spec.origin(row.setting)
        problems.append(Problem(code=code, setting=row.setting, origin=origin, message=message, fix=fix))
    return problems


def _shown_settings(plan: FsdpPlan) -> Iterator[str]:
    for name, _, _ in plan.spec.settings():
        decides_units = name == "wrap.classes" and plan.spec.wrap.policy == "transformer"
        if name in _ALWAYS_SHOWN or decides_units or plan.spec.asked(name):
            yield name


def _observe_setting(name: str, run: ObservedRun) -> SettingObservation:
    plan = run.plan
    planned = plan.get(name)
    asked = plan.spec.get(name) if plan.spec.asked(name) else planned
    expected = planned if asked == "auto" else asked
    if not run.units and not name.startswith("launch."):
        found = differing("not sharded", "no module of the live model is an FSDP unit")
    else:
        try:
            found = read_setting(name, run)
        except ContractError as error:
            found = unobservable(error.reason)
        if found.value is None and not found.unobservable:
            # For example, scalars are not sharded, so the units of a model of scalars have no parameters.
            reasons = (error.reason for unit in run.units for error in unit.live.unknown.values())
            found = unobservable(next(reasons, "no unit has parameters"))
    if plan.pre_sharded and not plan.spec.asked(name) and not found.unobservable:
        found = replace(found, reason=found.reason or "set by the script when it wrapped the model", matches=True)
    matches = found.matches if found.matches is not None else _json_value(found.value) == _json_value(expected)
    status: Status = "unobservable" if found.unobservable else "applied" if matches else "differs"
    return SettingObservation(
        setting=name,
        # JSON values, because ranks exchange rows by pickle, which does not support a mapping proxy.
        asked=_json_value(asked),
        planned=_json_value(planned),
        observed=_json_value(found.value),
        status=status,
        origin=plan.spec.origin(name),
        reason=found.reason,
    )


def format_value(value: Any) -> str:
    """Format a value for tables and messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "nothing"
    return "" if value is None else str(value)


def _json_value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_json_value(item) for item in value]
    if hasattr(value, "items"):
        return {str(key): _json_value(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
