"""Activation checkpointing wraps the units of the wrap policy and keeps results."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_fsdp_plugin.backends.sharding.activation_checkpointing import ActivationOffload, apply_activation_checkpointing
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.functions import CheckpointWrapper


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_activation_checkpointing": True},
        {"fsdp_activation_checkpointing": "selective"},
        {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
    ],
    ids=["full", "selective", "offload"],
)
def test_units_are_wrapped_and_gradients_are_equal(settings: dict[str, Any], plan_for: Callable[..., FsdpPlan]):
    model = two_layers()
    apply_activation_checkpointing(plan_for(model, **settings), model)
    wrapper = ActivationOffload if "fsdp_activation_checkpointing_offload" in settings else CheckpointWrapper
    assert [isinstance(module, wrapper) for module in model] == [True, False, True]
    assert isinstance(unwrapped(model[0]), nn.Linear)
    for gradient, expected in zip(gradients(model), gradients(two_layers()), strict=True):
        assert torch.equal(gradient, expected)


def test_model_is_unchanged_without_checkpointing(plan_for: Callable[..., FsdpPlan]):
    model = two_layers()
    apply_activation_checkpointing(plan_for(model), model)
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear]


class Layer(GradientCheckpointingLayer):
    """A layer of Transformers that would add to the cache again when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, hidden: torch.Tensor, cache: list | None = None, use_cache: bool = False) -> torch.Tensor:
        if use_cache:
            cache.append(hidden)
        return self.linear(hidden)


def test_checkpointed_layers_get_no_cache_in_training(plan_for: Callable[..., FsdpPlan]) -> None:
    model = nn.Sequential(Layer(), nn.ReLU())
    model.config = SimpleNamespace(use_cache=True)
    settings = {"fsdp_activation_checkpointing": True, "fsdp_transformer_layer_cls_to_wrap": "Layer"}
    apply_activation_checkpointing(plan_for(model, **settings), model)
    cache: list = []
    model[0](torch.ones(1, 2), cache=cache, use_cache=True).sum().backward()
    assert not cache and model.config.use_cache
    with torch.no_grad():
        model[0](torch.ones(1, 2), cache=cache, use_cache=True)
    assert len(cache) == 1


def test_cache_of_other_layers_is_disabled(plan_for: Callable[..., FsdpPlan]):
    model = two_layers()
    model.config = torch.nn.Module()
    model.config.use_cache = True
    model[0].config = SimpleNamespace(use_cache=True)  # such as T5's decoder, which has a copy
    inner = model[0].config
    apply_activation_checkpointing(plan_for(model, fsdp_activation_checkpointing=True), model)
    assert model.config.use_cache is False and inner.use_cache is False
