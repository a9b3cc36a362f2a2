"""Cases that ranks run: loops whose optimizer steps change nothing, or add up gradients, and loops that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.tiny import MODELS, global_batch, my_part
from tests.support.training import fresh_accelerator

NUM_STEPS = 3


def _backward(accelerator: Any, model: nn.Module, step: int, before: Callable[[], None] = lambda: None) -> None:
    loss = model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss
    before()
    accelerator.backward(loss)


def _prepared(accelerator: Any) -> tuple[Any, Any]:
    model: Any = MODELS["llama"]()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def unprepared_optimizer(accelerator: Any) -> None:
    """The optimizer is created before ``prepare`` and not passed to it."""
    model: Any = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = accelerator.prepare(model)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of_shards(accelerator: Any) -> None:
    """The optimizer is created after ``prepare``."""
    model = accelerator.prepare(MODELS["llama"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


def no_step(accelerator: Any) -> None:
    model, _ = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)


def evaluation(accelerator: Any) -> None:
    model, _ = _prepared(accelerator)
    model.eval()
    with torch.no_grad():
        model(**my_part(global_batch(0), dist.get_rank(), dist.get_world_size()))


def never_zeroed(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)
        optimizer.step()


def zeroed_before_backward(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step, optimizer.zero_grad)
        optimizer.step()


def zeroed_in_place(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        _backward(accelerator, model, step)
        optimizer.step()


def accumulated_by_hand(accelerator: Any) -> None:
    model, optimizer = _prepared(accelerator)
    for step in range(2 * NUM_STEPS):
        _backward(accelerator, model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def discriminator(accelerator: Any) -> None:
    """Another backward passes through the model before its gradients are zeroed."""
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)  # the generator's loss: only its own optimizer would step
        optimizer.zero_grad(set_to_none=False)
        _backward(accelerator, model, step + 1)
        optimizer.step()


def penalty_on_shards(accelerator: Any) -> None:
    """A penalty on weights, whose gradients exist when the backward of the model begins."""
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        loss = model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss
        norm: Any = model.model.layers[0].input_layernorm.weight
        accelerator.backward(loss + 1e-3 * norm.square().sum().full_tensor())
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers(accelerator: Any) -> None:
    """Every second step updates the layers, with the gradients of two backwards; the others update the rest."""
    model: Any = MODELS["llama"]()
    layers = [p for name, p in model.named_parameters() if "layers" in name]
    others = [p for name, p in model.named_parameters() if "layers" not in name]
    model, often, seldom = accelerator.prepare(
        model, torch.optim.SGD(others, lr=1e-2), torch.optim.SGD(layers, lr=1e-2)
    )
    for step in range(2 * NUM_STEPS):
        _backward(accelerator, model, step)
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()


def optimizer_in_backward(accelerator: Any) -> None:
    """Each parameter has an optimizer that steps and sets the gradient to ``None`` during the backward."""
    model = accelerator.prepare(MODELS["llama"]())
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)

        def step_and_zero(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_and_zero)
    for step in range(NUM_STEPS):
        _backward(accelerator, model, step)


def with_frozen_reference(accelerator: Any) -> None:
    """A reference model and an unrelated optimizer that trains something else."""
    other = nn.Linear(2, 2)
    unrelated = torch.optim.SGD(other.parameters(), lr=1e-2)
    model, optimizer = _prepared(accelerator)
    for step in range(NUM_STEPS):
        unrelated.step()  # without gradients
        _backward(accelerator, model, step)
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {
    loop.__name__: loop
    for loop in (
        unprepared_optimizer, optimizer_of_shards, no_step, evaluation, never_zeroed, zeroed_before_backward,
        zeroed_in_place, accumulated_by_hand, discriminator, penalty_on_shards, two_optimizers, with_frozen_reference,
        optimizer_in_backward,
    )
}  # fmt: skip


def run_loop(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the codes of the problems, the part ``training`` of the report, and its summary."""
    accelerator = fresh_accelerator(config)
    try:
        LOOPS[name](accelerator)
    except SpecError as error:
        return {"codes": [problem.code for problem in error.problems], "raised": True}
    report = hfp.report(accelerator)
    codes = [problem.code for problem in report.problems if problem.severity == "error"]
    return {"codes": codes, "raised": False, "report": report.to_json(), "summary": report.summary()}
