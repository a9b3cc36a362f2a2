"""A model, its plan and its units, without ranks and without FSDP."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin import load_spec, resolve
from hf_fsdp_plugin.observe.live_run import LiveRun
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.live_unit import LiveUnit


class Block(nn.Linear):
    pass


def make_model() -> nn.Module:
    return nn.Sequential(Block(4, 4), Block(4, 4), nn.Linear(4, 2))


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def make_plan() -> Callable[..., FsdpPlan]:
    """The plan of the model on two ranks, for these keys of ``fsdp_config``."""

    def make(**settings: Any) -> FsdpPlan:
        config = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block", **settings}
        spec = load_spec({"distributed_type": "FSDP", "fsdp_config": config}, environ={})
        return resolve(spec, make_model(), world_size=2, device_type="cpu")

    return make


@pytest.fixture
def make_unit() -> Callable[..., UnitObservation]:
    """A unit of 20 parameters; arguments that :class:`UnitObservation` lacks are those of its :class:`LiveUnit`."""

    def make(name: str = "0", **facts: Any) -> UnitObservation:
        unit = UnitObservation(
            name=name,
            class_name="Block" if name else "Sequential",
            num_params=20,
            num_local_params=10,
            num_frozen=0,
            param_dtype="fp32",
            reduce_dtype="fp32",
            master_dtype="fp32",
            reshard_after_forward=True,
            offloaded=False,
            checkpointed=False,
            version=2,
            is_root=not name,
            live=LiveUnit(version=2, modules=(), is_root=not name, num_params=20, shard_size=2),
        )
        own = {key: value for key, value in facts.items() if hasattr(unit, key)}
        live = {key: value for key, value in facts.items() if key not in own}
        return replace(unit, **own, live=replace(unit.live, **live))

    return make


@pytest.fixture
def make_run(
    model: nn.Module, make_plan: Callable[..., FsdpPlan], make_unit: Callable[..., UnitObservation]
) -> Callable[..., LiveRun]:
    """A run on two CPU ranks with two units and a root."""

    def make(plan: FsdpPlan | None = None, **facts: Any) -> LiveRun:
        units = (make_unit("0"), make_unit("1"), make_unit(""))
        defaults: dict[str, Any] = {"model": model, "units": units, "world_size": 2, "device_type": "cpu"}
        return LiveRun(**{"plan": plan or make_plan(), **defaults, **facts})

    return make


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())
