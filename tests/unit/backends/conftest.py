"""Plans for one rank."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec


@pytest.fixture
def plan_for() -> Callable[..., FsdpPlan]:
    """``plan_for(model, fsdp_version=1, …)``: the plan for one CPU rank; every ``Linear`` is a unit."""

    def plan(model: nn.Module, **fsdp_config: Any) -> FsdpPlan:
        defaults = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Linear"}
        config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {**defaults, **fsdp_config}}
        return resolve(load_spec(config, environ={}), model, world_size=1)

    return plan
