"""The gradient norm of parameters that are not sharded. Sharded parameters are tested on gloo ranks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_factor_has_the_dtype_of_narrow_gradients() -> None:
    """Otherwise CUDA starts a kernel for each gradient. In fp16 a small factor would be zero."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_foreach_mul_" in str(func):
                seen.append(({gradient.dtype for gradient in args[0]}, args[1].dtype))
            return func(*args, **(kwargs or {}))

    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e3)
    with Watch():
        clip_grad_norm([], parameters, 1e-6)
    other = {torch.float16, torch.float32}
    assert seen == [({torch.bfloat16}, torch.bfloat16), (other, torch.float32)]
    expected = 1e-6 / math.sqrt(6)
    assert [parameter.grad[0].item() for parameter in parameters] == pytest.approx([expected] * 3, rel=0.15)
