"""The gradient norm of parameters that are not sharded. Sharded ones are tested on ranks."""

import math

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.backends.clipping import clip_grad_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
def test_norm_and_gradients_match_torch(norm_type: float, max_norm: float):
    results = []
    for clip in (lambda p: clip_grad_norm([], p, max_norm, norm_type), lambda p: torch_clip(p, max_norm, norm_type)):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        model(torch.randn(2, 3)).square().sum().backward()
        norm = clip(list(model.parameters()))
        results.append(torch.cat([norm.reshape(1), *(p.grad.reshape(-1) for p in model.parameters())]))
    torch.testing.assert_close(*results)


def torch_clip(parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def test_parameters_without_gradients_have_norm_zero():
    assert clip_grad_norm([], nn.Linear(2, 2).parameters(), 1.0) == 0
