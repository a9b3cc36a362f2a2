"""A run as it is observed: the live model with facts about its training, the value of a setting, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import hf_fsdp_plugin.text as text
from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.units import StructureComparison, UnitObservation
from hf_fsdp_plugin.observe.weights import WeightComparison
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem


@dataclass(frozen=True)
class ObservedValue:
    """The value of one setting on the live model.

    Attributes:
        value: the canonical value; ``None`` if ``unobserved``.
        reason: why the setting is unobservable, or an explanation of the value.
        matches: whether the value matches the request; ``None`` if the caller compares them for equality.
        unobservable: whether the setting cannot be read from the live model.
    """

    value: Any = None
    reason: str = ""
    matches: bool | None = None
    unobservable: bool = False


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """The live model, facts about its run, and the plan.

    Attributes:
        rank: this rank.
        structure: the comparison of the units with the plan's; nothing differs in a model that the script sharded.
        num_hosts: number of distinct host names of the ranks.
        first_step: what was recorded while the model was trained.
        state_dict: state dict type of the last or the next checkpoint; ``None`` if unknown.
        state_dict_reason: why checkpoints have another type than the requested one; empty if they should not.
        saved_asynchronously: whether the last checkpoint was written asynchronously; ``None`` if there is none.
        storage: URL of the storage of the checkpoints; ``None`` if no checkpoint was saved to one.
        weights: the comparison of weights across ranks; ``None`` if they were not compared.
    """

    model: nn.Module
    plan: FsdpPlan
    units: Sequence[UnitObservation]
    world_size: int
    device_type: str
    rank: int = 0
    structure: StructureComparison = field(default_factory=StructureComparison)
    num_hosts: int = 1
    first_step: FirstStep = field(default_factory=FirstStep)
    state_dict: str | None = None
    state_dict_reason: str = ""
    saved_asynchronously: bool | None = None
    storage: str | None = None
    weights: WeightComparison | None = None

    @property
    def units_with_params(self) -> list[UnitObservation]:
        """The units that own parameters. A root may own none."""
        return [unit for unit in self.units if unit.num_params]

    @property
    def units_in_policy_dtype(self) -> list[UnitObservation]:
        """The units that own parameters, without those whose parameters are all planned to be gathered in fp32."""
        fp32 = set(self.plan.fp32_parameters)
        planned = {unit.name for unit in self.plan.units if unit.parameters and fp32.issuperset(unit.parameters)}
        return [unit for unit in self.units_with_params if unit.name not in planned] or self.units_with_params

    @property
    def units_below_root(self) -> list[UnitObservation]:
        return [unit for unit in self.units_with_params if not unit.live.is_root]

    @property
    def chosen(self) -> list[str]:
        """The modules that the wrap policy selected."""
        return [name for unit in self.plan.units if unit.from_policy for name in unit.modules]

    @property
    def layers(self) -> list[UnitObservation]:
        """The units that the wrap policy selected. If there are none: all units except the root, or else the root.

        Of the others, those that are freed between forward and backward come first.
        """
        chosen = [unit for unit in self.units_with_params if set(self.chosen).intersection(unit.module_names)]
        freed = [unit for unit in self.units_below_root if not self.is_kept(unit)]
        return chosen or freed or self.units_below_root or self.units_with_params

    def is_kept(self, unit: UnitObservation) -> bool:
        """Whether the plan keeps the gathered parameters of a unit that no policy chose until the backward."""
        planned = {name: each for each in self.plan.units for name in map(canonical_name, each.modules)}
        found = [planned[name] for name in unit.module_names if name in planned]
        return any(not each.from_policy and not each.reshard_after_forward for each in found)


def unobserved(reason: str) -> ObservedValue:
    return ObservedValue(reason=reason, unobservable=True)


def differing(value: Any, reason: str = "") -> ObservedValue:
    """Return a value that is not the requested one, whatever that is."""
    return ObservedValue(value, reason, matches=False)


def common_value(values: Iterable[Any]) -> Any:
    """Return the value if all values are equal, else ``mixed: a, b``; ``None`` if there are no values."""
    if not (distinct := list(dict.fromkeys(values))):
        return None
    return distinct[0] if len(distinct) == 1 else "mixed: " + ", ".join(sorted(map(str, distinct)))


JsonObject = Mapping[str, Any]
"""An object of the report's JSON, such as a setting, a unit, or the memory of a rank."""


def check_settings(settings: Sequence[JsonObject], plan: FsdpPlan) -> list[Problem]:
    """Return a problem for each setting that differs.

    The problem is a warning if FSDP2 supports only the observed value, or if the script wrapped the model.
    """
    not_supported = {problem.setting for problem in plan.problems if problem.code == "FSDP-W148"}
    problems = []
    for row in settings:
        if row["status"] != "differs":
            continue
        reason = f" ({row['reason']})" if row["reason"] else ""
        asked, observed = format_value(row["asked"]), format_value(row["observed"])
        message = f"{asked} was requested, but the live model has {observed}{reason}."
        code, fix = "FSDP-E503", "Do not change the model after prepare(). If nothing changes it, report a bug."
        if plan.pre_sharded or row["setting"] in not_supported:
            code, fix = "FSDP-W506", ""
        origin = plan.spec.origin(row["setting"])
        problems.append(Problem(code=code, setting=row["setting"], origin=origin, message=message, fix=fix))
    return problems


def format_value(value: Any) -> str:
    """Format a value for tables and messages."""
    return "" if value in (None, "") else text.format_value(value, "nothing")
