"""The optimizer of a model, and the check that it updates the model's parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.observe import report_builder
from hf_fsdp_plugin.observe.weights import check_optimizers, optimizers_of, unwrapped_optimizer
from tests.unit.observe.live_models import make_model, make_plan, make_unit


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def test_optimizer_of_the_model_has_no_problem(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert check_optimizers(model, [], [optimizer]) == check_optimizers(model, [], []) == []


def test_optimizer_of_another_model_is_an_error(model: nn.Module) -> None:
    [problem] = check_optimizers(model, [], [torch.optim.AdamW(make_model().parameters())])
    assert problem.code == "FSDP-E504" and "6 of the 6 parameters of AdamW" in problem.message


def test_trainable_parameters_without_optimizer_are_a_warning(model: nn.Module) -> None:
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([first])
    assert [problem.code for problem in check_optimizers(model, [], [optimizer])] == ["FSDP-W505"]
    assert check_optimizers(model, [], [optimizer, torch.optim.SGD(others, lr=1.0)]) == []
    model.requires_grad_(False)
    assert check_optimizers(model, [], [optimizer]) == []


def test_parameters_removed_from_optimizer_are_an_error(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    prepared = {id(parameter) for parameter in model.parameters()}
    optimizer.param_groups[0]["params"].pop()
    [problem] = check_optimizers(model, [], [optimizer], prepared_ids=prepared)
    assert problem.code == "FSDP-E509" and "1 of 6" in problem.message


def test_optimizer_with_gathered_copies_is_an_error(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copies = frozenset(map(id, list(model.parameters())[:2]))
    [problem] = check_optimizers(model, [make_unit("", copy_ids=copies)], [optimizer])
    assert problem.code == "FSDP-E504" and "2 of the 6 parameters of AdamW are gathered copies" in problem.message


def test_trained_model_is_reported_before_a_teacher(
    model: nn.Module, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_builder, "_find_plan", lambda model: make_plan())
    teacher = nn.Linear(2, 2)
    found = report_builder.build_report_of_trained([teacher, model], [optimizer])
    assert (found.num_params, [other.num_params for other in found.other_models]) == (50, [6])
    untrained = report_builder.build_report_of_trained([teacher], [optimizer])
    assert "FSDP-E504" in [problem.code for problem in untrained.problems] and not untrained.other_models
    assert optimizers_of(teacher, [optimizer]) == []


def test_wrapped_optimizer_is_unwrapped(optimizer: torch.optim.Optimizer) -> None:
    wrapper = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
    assert unwrapped_optimizer(wrapper) is unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(None) is None
