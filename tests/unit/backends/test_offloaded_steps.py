"""Steps of optimizers whose state is in host memory: every kind of optimizer, and what scripts do between steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.backends.optimizers import offloaded_steps
from hf_fsdp_plugin.backends.optimizers.offloaded_steps import load_on_host, offload_state, windows_of
from hf_fsdp_plugin.backends.optimizers.parameters import StepMode, set_step_mode
from hf_fsdp_plugin.devices import DEVICES

SHAPES = ((4, 8), (3,), (16, 4), (1,), (2, 2, 2), (5, 7))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True}), "adamw": (torch.optim.AdamW, {}),
    "foreach": (torch.optim.AdamW, {"foreach": True}), "fused": (torch.optim.AdamW, {"fused": True}),
    "capturable": (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "maximize": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), "plain": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {}), "adadelta": (torch.optim.Adadelta, {}), "nadam": (torch.optim.NAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}), "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}), "asgd": (torch.optim.ASGD, {}), "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_steps, "WINDOW", 160)


def new(name: str = "adamw", *, offload: bool, mode: StepMode = "unchanged") -> torch.optim.Optimizer:
    """An optimizer of two groups whose parameters are the same each time; the last one has no gradient at first."""
    kind, options = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 2e-3}]
    optimizer = kind(groups, **{"lr": 1e-3, **options})  # type: ignore[call-arg]
    if offload:
        set_step_mode(
            optimizer, mode, lambda: pytest.fail("not divided"),
            lambda inner: offload_state(optimizer, inner, DEVICES["cpu"], pinned=False),
        )  # fmt: skip
    return optimizer


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number + 1)
    for position, parameter in enumerate(parameters_of(optimizer)):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if position == len(SHAPES) - 1 and number < 2 else gradient
    optimizer.step()


def assert_equal(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for own, expected in zip(parameters_of(one), parameters_of(other), strict=True):
        assert torch.equal(own, expected)
    own_state, expected_state = one.state_dict()["state"], other.state_dict()["state"]
    assert own_state.keys() == expected_state.keys()
    for index, entry in expected_state.items():
        assert own_state[index].keys() == entry.keys()
        assert all(torch.equal(torch.as_tensor(own_state[index][key]), torch.as_tensor(v)) for key, v in entry.items())


@pytest.mark.parametrize("name, mode", [*((name, "unchanged") for name in OPTIMIZERS), ("sgd", "local")])
def test_windows_compute_the_same_as_one_step(name: str, mode: StepMode) -> None:
    offloaded, plain = new(name, offload=True, mode=mode), new(name, offload=False)
    for number in range(4):
        for optimizer in (offloaded, plain):
            step(optimizer, number)
    assert_equal(offloaded, plain)


def test_windows_are_limited_by_bytes() -> None:
    assert windows_of([]) == []
    assert windows_of([100, 60, 1, 500, 20, 140, 1]) == [[0, 1], [2], [3], [4, 5], [6]]


def test_state_keeps_its_memory_between_steps() -> None:
    optimizer = new(offload=True)
    step(optimizer, 3)
    first = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    step(optimizer, 4)
    assert [state["exp_avg"].data_ptr() for state in optimizer.state.values()] == first


def test_closure_is_evaluated_once_before_the_update() -> None:
    optimizer, calls = new(offload=True), []
    own = parameters_of(optimizer)
    before = own[0].detach().clone()

    def closure() -> float:
        calls.append(1)
        with torch.enable_grad():
            torch.stack([parameter.square().sum() for parameter in own]).sum().backward()
        return 1.0

    assert optimizer.step(closure) == 1.0 and len(calls) == 1
    assert not torch.equal(own[0], before)


def test_step_works_after_an_error_in_a_window() -> None:
    optimizer = new(offload=True)
    step(optimizer, 2)
    state = optimizer.state[optimizer.param_groups[0]["params"][2]]
    right, state["exp_avg"] = state["exp_avg"], torch.ones(7, 7)
    with pytest.raises(RuntimeError):
        step(optimizer, 3)
    assert len(parameters_of(optimizer)) == len(SHAPES)
    state["exp_avg"] = right
    last = parameters_of(optimizer)[-1].detach().clone()
    step(optimizer, 4)
    assert not torch.equal(parameters_of(optimizer)[-1], last)


def test_new_group_and_schedule_are_used() -> None:
    optimizers = new(offload=True), new(offload=False)
    for optimizer in optimizers:
        step(optimizer, 2)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))], "lr": 0.5})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in (3, 4):
            step(optimizer, number)
            schedule.step()
    assert_equal(*optimizers)


def test_loaded_state_is_used() -> None:
    saved = new(offload=False)
    for number in (2, 3):
        step(saved, number)
    optimizers = new(offload=True), new(offload=True), new(offload=False)
    load_on_host(optimizers[0], copy.deepcopy(saved.state_dict()))
    for optimizer in optimizers[1:]:
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for optimizer in optimizers:
        for own, value in zip(parameters_of(optimizer), parameters_of(saved), strict=True):
            own.data.copy_(value)
        step(optimizer, 5)
    assert_equal(optimizers[0], optimizers[2])
    assert_equal(optimizers[1], optimizers[2])
