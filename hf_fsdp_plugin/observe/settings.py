"""Comparison of the requested value of each setting with its value on the live model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_fsdp_plugin.contracts import ContractError
from hf_fsdp_plugin.observe.live_run import LiveRun, ObservedValue, unobservable
from hf_fsdp_plugin.observe.readers import READERS, read_setting
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Origin, Problem

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


def observe_settings(run: LiveRun) -> tuple[SettingObservation, ...]:
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
        expected = plan.pre_sharded or row.setting in not_supported
        reason = f" ({row.reason})" if row.reason else ""
        problems.append(
            Problem(
                code="FSDP-W506" if expected else "FSDP-E503",
                setting=row.setting,
                origin=plan.spec.origin(row.setting),
                message=f"{format_value(row.asked)} was requested, but the live model has "
                f"{format_value(row.observed)}{reason}.",
                fix="" if expected else "Do not change the model after prepare(). If nothing changes it, report a bug.",
            )
        )
    return problems


def _shown_settings(plan: FsdpPlan) -> Iterator[str]:
    for name, _, _ in plan.spec.settings():
        by_default = name in READERS and READERS[name].default_shown
        decides_units = name == "wrap.classes" and plan.spec.wrap.policy == "transformer"
        if by_default or decides_units or plan.spec.asked(name):
            yield name


def _observe_setting(name: str, run: LiveRun) -> SettingObservation:
    plan = run.plan
    planned = plan.get(name)
    asked = plan.spec.get(name) if plan.spec.asked(name) else planned
    expected = planned if asked == "auto" else asked
    if not run.units and not name.startswith("launch."):
        found = ObservedValue(value="not sharded", reason="no module of the live model is an FSDP unit", matches=False)
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
