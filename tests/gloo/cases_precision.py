"""Cases that ranks run: training with ignored modules in bf16, and with a scaled loss, as in fp16 on a GPU.

The scaled cases train in fp32, because CPU ranks have no fp16 training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.torch_private.functions import CollectiveGradScaler
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import fresh_accelerator, train, train_prepared

NUM_STEPS = 3
SCALE = 1024.0


class WithScalar(nn.Module):
    """A llama whose first parameter is a scalar, like CLIP's ``logit_scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.inner: Any = MODELS["llama"]()

    def forward(self, **batch: Any) -> Any:
        output = self.inner(**batch)
        output.loss = output.loss * self.scale
        return output


class OwnForeachDescent(torch.optim.Optimizer):
    """An optimizer that the plugin does not know, with one kernel for all parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            torch._foreach_add_(with_gradient, [p.grad for p in with_gradient], alpha=-group["lr"])


MODELS["with-scalar"] = WithScalar
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def adamw(model: nn.Module, how: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **SETTINGS[how])


def own_foreach(model: nn.Module) -> torch.optim.Optimizer:
    return OwnForeachDescent(model.parameters(), 0.05)


def train_in_bf16(version: int, name: str, ignored: str) -> dict[str, Any]:
    config = parallel_config("full_shard", version, 2, fsdp_ignored_modules=ignored)
    return train(name, {**config, "mixed_precision": "bf16"}, num_steps=NUM_STEPS)


def train_own_foreach(ignored: str) -> dict[str, Any]:
    config = parallel_config("full_shard", 2, 2, fsdp_ignored_modules=ignored)
    return train("llama", config, own_foreach, NUM_STEPS)


def scaled_accelerator(version: int, ignored: str) -> Any:
    """An Accelerator with the scaler that it would have for fp16 on a GPU."""
    accelerator = fresh_accelerator(parallel_config("full_shard", version, 2, fsdp_ignored_modules=ignored))
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator.scaler = CollectiveGradScaler("cpu", init_scale=SCALE)
    return accelerator


def train_scaled(version: int, name: str, ignored: str, how: str) -> dict[str, Any]:
    accelerator = scaled_accelerator(version, ignored)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, adamw(model, how))
    return train_prepared(accelerator, model, optimizer, name, NUM_STEPS)


def step_with_infinite_gradient(version: int, ignored: str, how: str) -> dict[str, Any]:
    """Make one gradient of the last rank infinite, without clipping, and step. The next step is an ordinary one."""
    return _step_with_infinite_gradient(scaled_accelerator(version, ignored), how)


def step_offloaded_with_infinite_gradient(version: int, how: str, clip: bool) -> dict[str, Any]:
    """The same on devices, with shards in host memory."""
    config = parallel_config("full_shard", version, 2, use_cpu=False, fsdp_offload_params=True)
    accelerator = fresh_accelerator({**config, "mixed_precision": "fp16"})
    accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": SCALE})
    return _step_with_infinite_gradient(accelerator, how, clip)


def _step_with_infinite_gradient(accelerator: Any, how: str, clip: bool = False) -> dict[str, Any]:
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, adamw(model, how))
    found: dict[str, Any] = {"changed": [], "scales": []}
    for is_infinite in (True, False):
        ids = torch.ones(2, 4, dtype=torch.long, device=accelerator.device)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        if is_infinite and dist.get_rank() == dist.get_world_size() - 1:
            gradients = (_local(p.grad) for p in model.parameters() if p.grad is not None)
            next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = float("inf")
        before = [_local(parameter.detach()).clone() for parameter in model.parameters()]
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after = [_local(parameter.detach()) for parameter in model.parameters()]
        found["changed"].append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        found["scales"].append(accelerator.scaler.get_scale())
    return found


def load_after_steps(folder: str, version: int) -> list[dict[str, Any]]:
    """Save, step with an infinite gradient, load: the state of the scaler after each, and after a step of a new one."""
    states = []
    for is_new in (False, True):
        accelerator = scaled_accelerator(version, "lm_head")
        model = MODELS["llama"]()
        model, optimizer = accelerator.prepare(model, adamw(model, "plain"))
        if not is_new:
            states.append(_state_after_step(accelerator, model, optimizer))
            accelerator.save_state(folder)
            states.append(_state_after_step(accelerator, model, optimizer, float("inf")))
        accelerator.load_state(folder)
        states += [accelerator.scaler.state_dict(), _state_after_step(accelerator, model, optimizer)]
    return states


def _state_after_step(accelerator: Any, model: nn.Module, optimizer: Any, factor: float = 1.0) -> dict[str, Any]:
    ids = torch.ones(2, 4, dtype=torch.long)
    accelerator.backward(factor * model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    state: dict[str, Any] = accelerator.scaler.state_dict()
    return state


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def scaler_of_accelerator(version: int) -> tuple[str, dict[str, Any]]:
    """The class and the state of the scaler that replaces one of Accelerate, which CPU ranks do not have."""
    from accelerate.utils import GradScalerKwargs

    from hf_fsdp_plugin.integrations.accelerate.accelerator import replace_scaler

    accelerator = fresh_accelerator(parallel_config("full_shard", version, 2))
    accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.scaler_handler = GradScalerKwargs(init_scale=256.0)
    replace_scaler(accelerator)
    return type(accelerator.scaler).__name__, accelerator.scaler.state_dict()
