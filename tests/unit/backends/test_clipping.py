"""The gradient norm of parameters that are not sharded. Sharded parameters are tested on gloo ranks."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.backends.optimizers.clipping import clip_grad_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
def test_norm_and_gradients_match_torch(norm_type: float, max_norm: float, dtype: torch.dtype):
    results = []
    for clip in (partial(clip_grad_norm, []), nn.utils.clip_grad_norm_):
        torch.manual_seed(0)
        model = nn.Linear(3, 3, dtype=dtype)
        model(torch.randn(2, 3, dtype=dtype)).square().sum().backward()
        norm = clip(list(model.parameters()), max_norm, norm_type)
        results.append(torch.cat([norm.reshape(1), *(p.grad.reshape(-1) for p in model.parameters())]))
    torch.testing.assert_close(*results)


def test_parameters_without_gradients_have_norm_zero():
    assert clip_grad_norm([], nn.Linear(2, 2).parameters(), 1.0) == 0


def test_gradient_without_elements_has_no_largest_magnitude():
    empty, other = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2))
    empty.grad, other.grad = torch.empty(0), torch.full((2,), 3.0)
    assert clip_grad_norm([], [empty, other], 1.0, math.inf) == 3
