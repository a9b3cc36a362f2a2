"""Predicted times for the planner, from :mod:`hf_fsdp_plugin.estimate.time`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_fsdp_plugin.estimate.results import TimeEstimate
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan


@dataclass(slots=True)
class Times:
    """Times of plans of one model. What plans with the same workload share is counted once.

    Attributes:
        machine: the figures of devices and links.
    """

    model: nn.Module
    machine: Any
    _models: dict[Workload, Any] = field(default_factory=dict)

    def estimate(self, plan: FsdpPlan, workload: Workload) -> TimeEstimate:
        """Return the time of an optimizer step."""
        if workload not in self._models:
            module = importlib.import_module("hf_fsdp_plugin.estimate.time")
            self._models[workload] = module.TimeModel(plan, self.model, workload)
        found: TimeEstimate = self._models[workload].estimate(self.machine, plan)
        return found
