"""What a reading looks at, and what it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.observe.units import UnitObservation, owning
from hf_fsdp_plugin.observe.weights import WeightComparison
from hf_fsdp_plugin.plan.model import FsdpPlan


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen of one setting.

    Attributes:
        value: in the setting's own words; meaningless where ``unobservable``.
        reason: why nothing can be seen, or what explains the value.
        unobservable: nothing on the live model shows this setting.
        matches: the verdict where equality with the asked value is not the question; ``None`` leaves it to equality.
    """

    value: Any = None
    reason: str = ""
    unobservable: bool = False
    matches: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything that readings look at: live objects, and the plan to know where to look."""

    model: nn.Module
    plan: FsdpPlan
    units: Sequence[UnitObservation]
    world_size: int
    device_type: str
    hosts: int = 1
    output_dtype: torch.dtype | None = None
    state_dict: str | None = None
    saved_asynchronously: bool | None = None
    weights: WeightComparison | None = None

    @property
    def owners(self) -> list[UnitObservation]:
        return owning(self.units)

    @property
    def layers(self) -> list[UnitObservation]:
        """The units that the wrap policy asked for; where there are none, all below the root, or the root."""
        planned = {name for unit in self.plan.units if unit.from_policy for name in unit.modules}
        chosen = [unit for unit in self.owners if planned.intersection(unit.module_names)]
        return chosen or [unit for unit in self.owners if not unit.is_root] or self.owners


def unobservable(reason: str) -> Reading:
    return Reading(reason=reason, unobservable=True)


def uniform(values: Iterable[Any]) -> Any:
    """The one value that all share, or ``mixed: a, b``."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else "mixed: " + ", ".join(sorted(map(str, distinct)))
