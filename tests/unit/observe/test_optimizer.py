"""The optimizer must hold the parameters of the model."""

import torch
from torch import nn

from hf_fsdp_plugin.observe.optimizer import check_optimizer, optimizer_of, trained_pair, unwrapped_optimizer


class Wrapper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def codes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    return [problem.code for problem in check_optimizer(model, [], optimizer)]


def test_optimizer_of_the_model_has_no_problem(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert codes(model, optimizer) == codes(model, None) == []


def test_optimizer_of_other_parameters_is_an_error(model: nn.Module) -> None:
    others = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    [problem] = check_optimizer(model, [], torch.optim.AdamW(others))
    assert problem.code == "FSDP-E504" and "6 of the 6 parameters of AdamW" in problem.message


def test_parameters_without_optimizer_are_a_note(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([next(model.parameters())])
    assert codes(model, optimizer) == ["FSDP-N505"]
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    assert codes(model, optimizer) == []


def test_trained_model_is_reported_before_a_teacher(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    teacher = nn.Linear(2, 2)
    assert trained_pair([teacher, model], [optimizer]) == (model, optimizer)
    assert trained_pair([teacher], []) == (teacher, None)
    assert optimizer_of(teacher, [optimizer]) is None


def test_wrapped_optimizer_is_unwrapped(optimizer: torch.optim.Optimizer) -> None:
    assert unwrapped_optimizer(Wrapper(optimizer)) is unwrapped_optimizer(optimizer) is optimizer
    assert unwrapped_optimizer(None) is None
