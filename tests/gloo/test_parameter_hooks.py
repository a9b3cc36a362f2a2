"""Hooks on parameters and torch's own clipping give the results of one process, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hf_fsdp_plugin.problems import SpecError
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, NUM_STEPS, OTHER_UNITS, parallel_config
from tests.support.training import (
    MAX_NORM,
    adamw,
    assert_same_training,
    assert_same_weights,
    fresh_accelerator,
    loss_of,
    train_prepared,
)

MAX_VALUE = 1e-3


VERSIONS = pytest.mark.parametrize("version", [1, 2])


def mask_gradients(model: nn.Module) -> None:
    """Train only the last rows of the embeddings, change gradients in place, and add a hook that is removed later."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    mask = torch.zeros_like(embeddings.weight)
    mask[-16:] = 1.0
    embeddings.weight.register_hook(lambda gradient: gradient * mask.to(gradient.device))
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj.weight"):
            columns = torch.arange(parameter.shape[1]) % 3
            parameter.register_hook(lambda gradient, columns=columns: gradient.mul_(columns.to(gradient.device)))


def train_with_hooks(name: str, config: dict[str, Any], *, remove: bool = False) -> dict[str, Any]:
    accelerator = fresh_accelerator(config)
    model = MODELS[name]()
    mask_gradients(model)
    unused = [parameter.register_hook(torch.zeros_like) for parameter in model.parameters()] if remove else []
    model, optimizer = accelerator.prepare(model, adamw(model))
    for handle in unused:
        handle.remove()
    return train_prepared(accelerator, model, optimizer, name, NUM_STEPS)


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


def reference_with_hooks(name: str) -> dict[str, Any]:
    """The same as :func:`train_with_hooks` in one process."""
    model = MODELS[name]().float()
    mask_gradients(model)
    return _train_alone(model, name, lambda model: clip_grad_norm_(model.parameters(), MAX_NORM))


@VERSIONS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        *OTHER_UNITS,
        slow({"fsdp_offload_params": True}),
    ],
    ids=str,
)
def test_parameter_hooks_train_like_one_process(two_ranks: Ranks, settings: dict[str, Any], version: int) -> None:
    config = parallel_config("full_shard", version, 2, **settings)
    run = two_ranks.run(train_with_hooks, "llama", config)[0]
    assert_same_training(run, reference_with_hooks("llama"))


def test_flat_parameters_call_parameter_hooks(two_ranks: Ranks) -> None:
    config = parallel_config("full_shard", 1, 2, fsdp_use_orig_params=False)
    run = two_ranks.run(train_with_hooks, "llama", config)[0]
    assert_same_training(run, reference_with_hooks("llama"))


@VERSIONS
def test_removed_parameter_hook_is_not_called(two_ranks: Ranks, version: int) -> None:
    run = two_ranks.run(train_with_hooks, "llama", parallel_config("full_shard", version, 2), remove=True)[0]
    assert_same_training(run, reference_with_hooks("llama"))


def prepare_with_late_hook(config: dict[str, Any]) -> list[str]:
    """Prepare a model with a hook that runs after accumulation. Returns the codes of the problems."""
    accelerator = fresh_accelerator(config)
    model: Any = MODELS["llama"]()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        accelerator.prepare(model)
    except SpecError as error:
        return [problem.code for problem in error.problems]
    return []


@VERSIONS
def test_hook_after_accumulation_is_refused(two_ranks: Ranks, version: int) -> None:
    config = parallel_config("full_shard", version, 2)
    assert two_ranks.run(prepare_with_late_hook, config) == [["FSDP-E307"]] * 2


def clip(kind: str, accelerator: Any, model: nn.Module) -> torch.Tensor:
    """Clip by the norm of all parameters, of some of them, or by value. Returns the norm; 0 for clipping by value."""
    if kind == "all":
        return clip_grad_norm_(model.parameters(), MAX_NORM)
    if kind == "some":
        return clip_grad_norm_([p for n, p in model.named_parameters() if "norm" in n], MAX_NORM / 10)
    if kind == "largest":
        return clip_grad_norm_(model.parameters(), MAX_NORM / 10, norm_type=float("inf"), error_if_nonfinite=True)
    if kind == "accelerator":
        accelerator.clip_grad_value_(model.parameters(), MAX_VALUE)
    else:
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
    kind = kind if kind != "accelerator" else "value"
    return _train_alone(MODELS["llama"]().float(), "llama", lambda model: clip(kind, None, model), sgd)


@VERSIONS
@pytest.mark.parametrize("kind", ["all", "some", "largest", "value", "accelerator"])
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
