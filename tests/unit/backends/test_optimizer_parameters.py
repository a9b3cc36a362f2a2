"""Optimizers that are built before sharding receive the sharded parameters, or are refused."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter

from hf_fsdp_plugin.backends.optimizers.parameters import (
    attach_optimizers,
    detach_optimizers,
    foreign_parameters,
)
from hf_fsdp_plugin.backends.sharding.shard import plan_of, shard
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import SpecError

CPU = torch.device("cpu")


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1)


def test_attached_optimizer_has_parameters_of_same_names():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = two_groups(model)
    detached = detach_optimizers([optimizer], model)
    assert [group["params"] for group in optimizer.param_groups] == [[], []]
    assert detached[0].groups == (("weight",), ("bias",))
    attach_optimizers(detached, other)
    assert [group["params"] for group in optimizer.param_groups] == [[other.weight], [other.bias]]


def test_optimizer_of_other_model_is_unchanged():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    assert detach_optimizers([optimizer], model) == []
    assert foreign_parameters(optimizer, [model]) == 2
    assert foreign_parameters(optimizer, [model, other]) == 0


def test_parameters_of_other_model_keep_their_place():
    model, new, other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad([model.weight, other.bias, model.bias], initial_accumulator_value=0.5)
    detached = detach_optimizers([optimizer], model)
    assert optimizer.param_groups[0]["params"] == [other.bias]
    assert list(optimizer.state) == [other.bias]
    attach_optimizers(detached, new)
    expected = [new.weight, other.bias, new.bias]
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], expected))
    assert all(bool((optimizer.state[each]["sum"] == 0.5).all()) for each in expected)


def test_stepped_optimizer_is_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(SpecError, match="FSDP-E305"):
        detach_optimizers([optimizer], model)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_flat_parameter_in_two_groups_is_refused(one_rank: None, plan_for: Callable[..., FsdpPlan]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = plan_for(model, fsdp_version=1, fsdp_use_orig_params=False)
    with pytest.raises(SpecError, match="FSDP-E306"):
        shard(plan, model, CPU, [two_groups(model)])


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_flat_parameters_in_one_group_are_attached(one_rank: None, plan_for: Callable[..., FsdpPlan]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    plan = plan_for(model, fsdp_version=1, fsdp_use_orig_params=False)
    sharded = shard(plan, model, CPU, [optimizer])
    (group,) = optimizer.param_groups
    assert len(group["params"]) == 2 and all(isinstance(p, FlatParameter) for p in group["params"])
    assert plan_of(sharded) is plan and plan_of(model) is None
