"""Each setting asked beside what was observed of it, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_fsdp_plugin.observe.readings import READINGS
from hf_fsdp_plugin.observe.scene import Reading, Scene
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem

Status = Literal["applied", "differs", "unobservable"]

# Shown even where nobody asked: what decides a run's memory, speed and numbers.
_ALWAYS = (
    "fsdp.version",
    "sharding.strategy",
    "mesh.shard",
    "mesh.replicate",
    "wrap.policy",
    "offload.params",
    "precision.param",
    "precision.reduce",
    "prefetch.backward",
    "prefetch.forward",
    "activation.checkpointing",
)
# A difference here is a property of FSDP2 that the plan has warned of, not a failure.
_FORETOLD = {"prefetch.limit_all_gathers", "params.use_orig"}


@dataclass(frozen=True, kw_only=True)
class SettingObservation:
    """One line of the report.

    Attributes:
        asked: the value as the spec has it, or the planned one where nobody asked.
        planned: what ``asked`` came to for this model and world (``auto`` resolved).
        observed: what the live model shows; ``None`` where ``unobservable``.
        origin: where it was written; ``default`` where it was not.
        reason: why it differs or cannot be seen, or what explains an applied value.
    """

    setting: str
    asked: Any
    planned: Any
    observed: Any
    status: Status
    origin: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "asked": _plain(self.asked),
            "planned": _plain(self.planned),
            "observed": _plain(self.observed),
            "status": self.status,
            "origin": self.origin,
            "reason": self.reason,
        }


def observe_settings(scene: Scene) -> tuple[SettingObservation, ...]:
    """Every setting that was asked, and those that matter where it was not, in the order of the spec's sections."""
    return tuple(_observe(name, scene) for name in _names(scene.plan))


def _names(plan: FsdpPlan) -> Iterator[str]:
    for name, _, _ in plan.spec.settings():
        decides = name in _ALWAYS or (name == "wrap.classes" and plan.spec.wrap.policy == "transformer")
        if decides or plan.spec.asked(name):
            yield name


def _observe(name: str, scene: Scene) -> SettingObservation:
    plan = scene.plan
    planned = plan.get(name)
    asked = plan.spec.get(name) if plan.spec.asked(name) else planned
    # What was written down decides; what was left open is what the plan made of it.
    wanted = planned if asked == "auto" else asked
    if not scene.units and not name.startswith("launch."):
        reading = Reading(value="not sharded", reason="no module of the live model is an FSDP unit", matches=False)
    else:
        reading = _read(name, scene)
    if plan.pre_sharded and not plan.spec.asked(name) and not reading.unobservable:
        reading = replace(reading, reason=reading.reason or "the author of the model set it", matches=True)
    if reading.unobservable:
        status: Status = "unobservable"
    else:
        matches = reading.matches if reading.matches is not None else _plain(reading.value) == _plain(wanted)
        status = "applied" if matches else "differs"
    return SettingObservation(
        setting=name,
        # Plain, because rows travel between ranks by pickle, which a mapping proxy refuses.
        asked=_plain(asked),
        planned=_plain(planned),
        observed=_plain(reading.value),
        status=status,
        origin=plan.spec.origin(name).place,
        reason=reading.reason,
    )


def _read(name: str, scene: Scene) -> Reading:
    if name in READINGS:
        return READINGS[name](scene)
    if name.startswith("launch."):
        return Reading(reason="a matter of the launcher, of which the model keeps no trace", unobservable=True)
    if name.startswith("xla."):
        off = not scene.plan.spec.get(name)
        return Reading(value=scene.plan.spec.get(name) if off else False, reason="no XLA device", matches=off)
    return Reading(reason="nothing on the live model shows it", unobservable=True)


def setting_problems(settings: tuple[SettingObservation, ...], plan: FsdpPlan) -> list[Problem]:
    """A problem for each setting that differs; an error, unless the plan has warned that FSDP2 cannot have it, or
    the author's own wrapping was respected."""
    return [
        Problem(
            severity="warning"
            if plan.pre_sharded or (row.setting in _FORETOLD and plan.backend == "fsdp2")
            else "error",
            setting=row.setting,
            origin=plan.spec.origin(row.setting),
            message=f"asked {show(row.asked)}, the live model has {show(row.observed)}"
            + (f" ({row.reason})." if row.reason else "."),
        )
        for row in settings
        if row.status == "differs"
    ]


def _plain(value: Any) -> Any:
    """JSON's own types."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def show(value: Any) -> str:
    """A value as the table and the messages print it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "nothing"
    return "" if value is None else str(value)
