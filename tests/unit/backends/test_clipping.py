"""The gradient norm of parameters that are not sharded. Sharded parameters are tested on gloo ranks."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.backends.clipping import clip_grad_norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
def test_norm_and_gradients_match_torch(norm_type: float, max_norm: float):
    results = []
    for clip in (partial(clip_grad_norm, []), nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        model(torch.randn(2, 3)).square().sum().backward()
        norm = clip(list(model.parameters()), max_norm, norm_type)
        results.append(torch.cat([norm.reshape(1), *(p.grad.reshape(-1) for p in model.parameters())]))
    torch.testing.assert_close(*results)


def test_parameters_without_gradients_have_norm_zero():
    assert clip_grad_norm([], nn.Linear(2, 2).parameters(), 1.0) == 0
