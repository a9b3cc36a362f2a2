"""Hooks on parameters are refused, and torch's own clipping gives the results of one process, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hf_fsdp_plugin.problems import SpecError
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, NUM_STEPS, parallel_config
from tests.support.training import (
    MAX_NORM,
    adamw,
    assert_same_weights,
    fresh_accelerator,
    loss_of,
)

MAX_VALUE = 1e-3


VERSIONS = pytest.mark.parametrize("version", [1, 2])


def _train_alone(
    model: nn.Module, name: str, clip_gradients: Callable[[nn.Module], torch.Tensor], make: Any = adamw
) -> dict[str, Any]:
    optimizer = make(model)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, name, step)
        loss.backward()
        norm = clip_gradients(model)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def prepare_with_hook(config: dict[str, Any], register: str, *, remove: bool = False) -> list[str]:
    """Prepare a model with a hook on a parameter. Returns the codes of the problems."""
    accelerator = fresh_accelerator(config)
    model: Any = MODELS["llama"]()
    handle = getattr(model.lm_head.weight, register)(lambda tensor: None)
    if remove:
        handle.remove()
    try:
        accelerator.prepare(model)
    except SpecError as error:
        return [problem.code for problem in error.problems]
    return []


@VERSIONS
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_a_parameter_is_refused(two_ranks: Ranks, register: str, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    assert two_ranks.run(prepare_with_hook, config, register) == [["FSDP-E307"]] * 2
    assert two_ranks.run(prepare_with_hook, config, register, remove=True) == [[]] * 2


def clip(kind: str, accelerator: Any, model: nn.Module) -> torch.Tensor:
    """Clip by the norm of all parameters, of some of them, or by value. Returns the norm; 0 for clipping by value."""
    if kind == "all":
        return clip_grad_norm_(model.parameters(), MAX_NORM)
    if kind == "some":
        return clip_grad_norm_([p for n, p in model.named_parameters() if "norm" in n], MAX_NORM / 10)
    if kind == "largest":
        return clip_grad_norm_(model.parameters(), MAX_NORM / 10, norm_type=float("inf"), error_if_nonfinite=True)
    clip_grad_value_(model.parameters(), MAX_VALUE)
    return torch.zeros(())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)  # a large one amplifies rounding from step to step


def train_clipped(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, sgd(model))
    norms = []
    for step in range(NUM_STEPS):
        accelerator.backward(loss_of(model, "llama", step, accelerator.process_index, accelerator.num_processes))
        norm = clip(kind, accelerator, model)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": [], "norms": norms, "weights": accelerator.get_state_dict(model)}


def reference_clipped(kind: str) -> dict[str, Any]:
    return _train_alone(MODELS["llama"]().float(), "llama", lambda model: clip(kind, None, model), sgd)


@VERSIONS
@pytest.mark.parametrize("kind", ["all", "some", "largest", "value"])
def test_clipping_functions_equal_one_process(two_ranks: Ranks, kind: str, version: int) -> None:
    expected = reference_clipped(kind)
    runs = two_ranks.run(train_clipped, kind, parallel_config("full_shard", version, 2))
    assert all(run["norms"] == pytest.approx(expected["norms"], rel=1e-5) for run in runs)
    assert_same_weights(runs[0]["weights"], expected["weights"])


def norm_without_clipping(config: dict[str, Any]) -> dict[str, Any]:
    """The codes or results of ``get_total_norm`` by kind of gradients; results relative to the norm of all."""
    accelerator = fresh_accelerator(config)
    model: Any = MODELS["llama"]()
    model = accelerator.prepare(model)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    accelerator.backward(loss_of(model, "llama", 0, accelerator.process_index, accelerator.num_processes))
    whole = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    kinds = {
        "all": list(model.parameters()),
        "last": [p for name, p in model.named_parameters() if name.endswith("model.norm.weight")],
        "other": list(other.parameters()),
    }
    codes, found = {}, {}
    for kind, parameters in kinds.items():
        try:
            norm: Any = nn.utils.get_total_norm([p.grad.detach() for p in parameters if p.grad is not None])
            found[kind] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm) / float(whole)
        except SpecError as error:
            codes[kind] = error.problems[0].code
    return {"codes": codes, "found": found}


@VERSIONS
def test_get_total_norm_is_whole_or_refused(two_ranks: Ranks, version: int) -> None:
    for run in two_ranks.run(norm_without_clipping, parallel_config("full_shard", version, 2)):
        assert run["codes"] == ({"all": "FSDP-E611", "last": "FSDP-E611"} if version == 1 else {})
        assert "other" in run["found"]
        assert run["found"].get("all", 1.0) == pytest.approx(1.0, rel=1e-5)
        assert run["found"].get("last", 0.5) < 1.0
