"""Each optimizer has its row in the table, and is refused by what the row needs. Unknown ones are a warning."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.backends.optimizers.known_optimizers import (
    KNOWN_OPTIMIZERS,
    KnownOptimizer,
    check_offload,
    decide_step_mode,
    known_optimizer,
)
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

PROJECTION = {"rank": 2, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
APOLLO = {**PROJECTION, "proj": "random", "scale_type": "channel"}

IMPORTABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "torch.optim.Adam": ("torch.optim.adam.Adam", {}),
    "torch.optim.AdamW": ("torch.optim.adamw.AdamW", {"amsgrad": True}),
    "torch.optim.SGD": ("torch.optim.sgd.SGD", {"momentum": 0.9, "nesterov": True}),
    "torch.optim.Adagrad": ("torch.optim.adagrad.Adagrad", {}),
    "torch.optim.Adadelta": ("torch.optim.adadelta.Adadelta", {}),
    "torch.optim.RMSprop": ("torch.optim.rmsprop.RMSprop", {"centered": True}),
    "torch.optim.NAdam": ("torch.optim.nadam.NAdam", {}),
    "torch.optim.RAdam": ("torch.optim.radam.RAdam", {}),
    "torch.optim.Adamax": ("torch.optim.adamax.Adamax", {}),
    "torch.optim.ASGD": ("torch.optim.asgd.ASGD", {}),
    "torch.optim.Rprop": ("torch.optim.rprop.Rprop", {}),
    "torch.optim.Adafactor": ("torch.optim.Adafactor", {}),
    "torch.optim.Muon": ("torch.optim.Muon", {}),
    "transformers.Adafactor": ("transformers.optimization.Adafactor", {}),
    "lion_pytorch.Lion": ("lion_pytorch", {}),
    "schedulefree.AdamWScheduleFree": ("schedulefree", {}),
    "schedulefree.RAdamScheduleFree": ("schedulefree", {}),
    "schedulefree.SGDScheduleFree": ("schedulefree", {}),
    "bitsandbytes.optim.AdamW32bit": ("bitsandbytes.optim.optimizer.Optimizer8bit", {}),
    "bitsandbytes.optim.PagedLion": ("bitsandbytes.optim.optimizer.Optimizer8bit", {}),
    "bitsandbytes.optim.LAMB32bit": ("bitsandbytes.optim.lamb", {}),
    "galore_torch.GaLoreAdamW": ("galore_torch", {"no_deprecation_warning": True, **PROJECTION}),
    "apollo_torch.APOLLOAdamW": ("apollo_torch", APOLLO),
    "grokadamw.GrokAdamW": ("grokadamw", {}),
}
"""Class -> its row in the table, and settings. Settings of projections belong into the parameter group."""


def make(name: str, settings: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    module, _, cls = name.rpartition(".")
    kind = getattr(pytest.importorskip(module) if "." not in module else importlib.import_module(module), cls)
    settings = dict(IMPORTABLE[name][1] if settings is None else settings)
    group = {key: settings.pop(key) for key in APOLLO if key in settings}
    settings.setdefault("lr", 1e-3)
    if name == "transformers.Adafactor":
        settings |= {"relative_step": False, "scale_parameter": False}
    optimizer: torch.optim.Optimizer = kind([{"params": [nn.Parameter(torch.ones(4, 4))], **group}], **settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def available(name: str) -> str:
    """Skip the test if the optimizer's package is not installed."""
    pytest.importorskip(name.partition(".")[0])
    return name


def row(name: str) -> KnownOptimizer:
    return next(kind for kind in KNOWN_OPTIMIZERS if kind.name == IMPORTABLE[name][0])


@pytest.mark.parametrize("name", IMPORTABLE)
def test_optimizer_has_its_row(name: str) -> None:
    assert known_optimizer(make(available(name))) == row(name)


class SignDescent(torch.optim.Optimizer):
    """An unknown optimizer."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.direction(parameter.grad), alpha=group["lr"])

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


class Wrapper(SignDescent):
    """An unknown optimizer whose groups belong to another optimizer."""

    def __init__(self, params: Any) -> None:
        self.base = torch.optim.SGD(params, lr=0.1)

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups


class OwnAdamW(torch.optim.AdamW):
    """A subclass that inherits the step."""


class ScaledAdamW(torch.optim.AdamW):
    """A subclass with another step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def fsdp1(**changes: Any) -> Any:
    plan = {"backend": "fsdp1", "use_orig": True, "strategy": "full_shard", "mesh": SimpleNamespace(shard=2)}
    return SimpleNamespace(**{**plan, **changes})


def code(optimizer: torch.optim.Optimizer, plan: Any) -> str | None:
    _, problem = decide_step_mode(optimizer, plan)
    return None if problem is None else problem.code


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def test_subclass_with_its_own_step_is_unknown() -> None:
    torch.optim.AdamW(parameters())  # torch wraps the step of each class at its first object
    assert known_optimizer(OwnAdamW(parameters())) == known_optimizer(torch.optim.AdamW(parameters()))
    assert known_optimizer(OwnAdamW(parameters())) is not None
    assert known_optimizer(ScaledAdamW(parameters())) is None


@pytest.mark.parametrize("kind", [SignDescent, ScaledAdamW, Wrapper])
def test_unknown_optimizer_is_a_warning_under_fsdp1(kind: Any) -> None:
    mode, problem = decide_step_mode(kind(parameters()), fsdp1())
    assert problem is not None and (mode, problem.code) == ("unchanged", "FSDP-W324")
    assert problem.message.startswith(f"{kind.__name__} of tests is not in the table")


def test_optimizer_without_parameters_is_no_warning() -> None:
    optimizer = SignDescent(parameters())
    optimizer.param_groups[0]["params"] = []
    assert code(optimizer, fsdp1()) is None


@pytest.mark.parametrize(
    "plan", [fsdp1(strategy="no_shard"), fsdp1(mesh=SimpleNamespace(shard=1))], ids=["no_shard", "one rank"]
)
def test_whole_parameters_accept_any_optimizer(plan: Any) -> None:
    assert code(SignDescent(parameters()), plan) is None
    plan.use_orig = False
    assert code(SignDescent(parameters()), plan) == "FSDP-W324"


def test_known_optimizers_are_refused_by_their_needs() -> None:
    assert code(make("torch.optim.Muon"), fsdp1()) == "FSDP-E320"
    assert code(torch.optim.LBFGS(parameters()), fsdp1(backend="fsdp2")) == "FSDP-E321"
    assert code(torch.optim.LBFGS(parameters()), fsdp1(strategy="no_shard")) == "FSDP-E321"


def test_8bit_optimizer_needs_original_parameters() -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    assert code(optim.AdamW8bit(parameters()), fsdp1()) is None
    assert code(optim.AdamW8bit(parameters()), fsdp1(use_orig=False)) == "FSDP-E322"
    problem = check_offload(optim.AdamW8bit(parameters()), "local", FsdpSpec())
    assert problem is not None and "codes and scales" in problem.message


@pytest.mark.parametrize("name, mode", [
    ("torch.optim.AdamW", "unchanged"), ("torch.optim.SGD", "local"), ("torch.optim.Adafactor", "whole"),
    ("transformers.Adafactor", "whole"), ("lion_pytorch.Lion", "local"),
])  # fmt: skip
def test_state_of_each_parameter_alone_is_offloaded(name: str, mode: Any) -> None:
    assert check_offload(make(name), mode, FsdpSpec()) is None


@pytest.mark.parametrize("name, mode, reason", [
    ("torch.optim.Muon", "divided", "the ranks divide"), ("grokadamw.GrokAdamW", "unchanged", "not known"),
    ("schedulefree.AdamWScheduleFree", "unchanged", "not known"),
])  # fmt: skip
def test_other_state_is_not_offloaded(name: str, mode: Any, reason: str) -> None:
    problem = check_offload(make(name), mode, FsdpSpec())
    assert problem is not None and (problem.code, problem.setting) == ("FSDP-E331", "offload.optimizer")
    assert reason in problem.message


def test_state_of_unknown_optimizer_is_not_offloaded() -> None:
    problem = check_offload(SignDescent(parameters()), "unchanged", FsdpSpec())
    assert problem is not None and problem.code == "FSDP-E331"
