"""Cases that two ranks run: linear layers in fp8, which CPU ranks emulate, by a loop and by the Trainer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.support.tiny import MODELS, parallel_config
from tests.support.training import MAX_NORM, adamw, fresh_accelerator, loss_of, train_prepared

NUM_STEPS = 6


def config_of(version: int = 2, *, mixed_precision: str = "fp8", **fp8: Any) -> dict[str, Any]:
    """A config as ``accelerate config`` writes it, with the settings of ``fp8_config``."""
    config = parallel_config("full_shard", version, 2)
    return {**config, "mixed_precision": mixed_precision, "fp8_config": {"backend": "AO", **fp8}}


def reference(name: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Losses, norms and weights of one process that computes the parts of two ranks, with fp32 masters."""
    from accelerate.utils import convert_model_to_fp8_ao
    from torchao.float8 import Float8LinearConfig

    model = MODELS[name]().float()
    optimizer, losses, norms = adamw(model), [], []
    for step in range(num_steps):
        computing = copy.deepcopy(model)
        for parameter in computing.parameters():  # buffers stay in fp32, as under FSDP2
            parameter.data = parameter.data.to(torch.bfloat16)
        convert_model_to_fp8_ao(computing, config=Float8LinearConfig(emulate=True, pad_inner_dim=True))
        parts = [_backward(computing, name, step, part) for part in range(2)]
        for key, parameter in model.named_parameters():
            parameter.grad = sum(gradients[key] for _, gradients in parts) / 2  # type: ignore[assignment]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(sum(loss for loss, _ in parts) / 2)
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def _backward(model: nn.Module, name: str, step: int, part: int) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model, name, step, part, 2)
    loss.backward()
    return loss.item(), {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}


def gathered_dtypes(model: nn.Module) -> set[str]:
    """The dtypes of the weights of layers in fp8 just before their forward, when they are gathered."""
    found: set[str] = set()

    def note(module: Any, *_: Any) -> None:
        weight = module.weight
        found.add(str(getattr(weight, "_data", weight).dtype))

    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            module.register_forward_pre_hook(note)
    return found


def train(config: dict[str, Any], name: str = "llama", **arguments: Any) -> dict[str, Any]:
    accelerator = fresh_accelerator(config, **arguments)
    model = MODELS[name]()
    model, optimizer = accelerator.prepare(model, adamw(model))
    return {"gathered": gathered_dtypes(model), **train_prepared(accelerator, model, optimizer, name, NUM_STEPS)}
