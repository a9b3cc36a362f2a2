"""Plans for one rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_fsdp_plugin.backends.loading.shared_weights import WeightExchange
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


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WeightExchange]:
    """An exchange of one of two ranks of a machine, in a job of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))
    own = WeightExchange()
    yield own
    own.close()
