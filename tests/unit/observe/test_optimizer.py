"""The optimizer of a model, and the check that it updates the model's parameters."""

from types import SimpleNamespace

import pytest
import torch
from live_models import make_model
from torch import nn

from hf_fsdp_plugin.observe.optimizer import check_optimizer, optimizer_of, trained_pair, unwrapped_optimizer


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def test_optimizer_of_the_model_has_no_problem(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert check_optimizer(model, [], optimizer) == check_optimizer(model, [], None) == []


def test_optimizer_of_another_model_is_an_error(model: nn.Module) -> None:
    [problem] = check_optimizer(model, [], torch.optim.AdamW(make_model().parameters()))
    assert problem.code == "FSDP-E504" and "6 of the 6 parameters of AdamW" in problem.message


def test_trainable_parameters_without_optimizer_are_a_note(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([next(model.parameters())])
    assert [problem.code for problem in check_optimizer(model, [], optimizer)] == ["FSDP-N505"]
    model.requires_grad_(False)
    assert check_optimizer(model, [], optimizer) == []


def test_trained_model_is_reported_before_a_teacher(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    teacher = nn.Linear(2, 2)
    assert trained_pair([teacher, model], [optimizer]) == (model, optimizer)
    assert trained_pair([teacher], []) == (teacher, None)
    assert optimizer_of(teacher, [optimizer]) is None


def test_wrapped_optimizer_is_unwrapped(optimizer: torch.optim.Optimizer) -> None:
    wrapper = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
    assert unwrapped_optimizer(wrapper) is unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(None) is None
