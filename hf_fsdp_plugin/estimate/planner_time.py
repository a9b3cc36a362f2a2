"""Predicted times for the planner, from :mod:`hf_fsdp_plugin.estimate.time`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.planner_units import Units
from hf_fsdp_plugin.estimate.results import TimeEstimate
from hf_fsdp_plugin.estimate.time import TimeModel
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan


@dataclass(slots=True)
class Times:
    """Times of plans of one model. What plans with the same workload share is counted once.

    Attributes:
        machine: the figures of devices and links.
    """

    model: nn.Module
    machine: Machine
    _models: dict[tuple[Workload, Units], TimeModel] = field(default_factory=dict)

    def estimate(self, plan: FsdpPlan, workload: Workload, units: Units) -> TimeEstimate:
        """Return the time of an optimizer step. Plans with equal ``units`` have the same units."""
        key = (workload, units)
        if key not in self._models:
            self._models[key] = TimeModel(plan, self.model, workload)
        return self._models[key].estimate(self.machine, plan)
