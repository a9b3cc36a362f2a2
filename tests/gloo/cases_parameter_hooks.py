"""Cases that ranks run: training with hooks on parameters, and with torch's own functions that clip gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hf_fsdp_plugin.problems import SpecError
from tests.support.tiny import MODELS, NUM_STEPS
from tests.support.training import MAX_NORM, adamw, fresh_accelerator, loss_of, train_prepared

MAX_VALUE = 1e-3


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


def reference_with_hooks(name: str) -> dict[str, Any]:
    """The same as :func:`train_with_hooks` in one process."""
    model = MODELS[name]().float()
    mask_gradients(model)
    return _train_alone(model, name, lambda model: clip_grad_norm_(model.parameters(), MAX_NORM))


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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)  # a large one amplifies rounding from step to step


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
