"""Cases that ranks run: forwards outside of training steps, and weights that scripts change after them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_plugin.integrations.torch_functions import add_remedy
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import SpecError
from tests.gloo.collective_counter import CollectiveCounter
from tests.support.tiny import global_batch, tiny_llama
from tests.support.training import adamw, fresh_accelerator, loss_of

Change = Callable[[Any, Any], None]


def by_optimizer(model: Any, optimizer: Any) -> None:
    """Change the weights as optimizers do that evaluate with other weights than they train (schedule-free)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(0.9)


def by_parameters(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)


def by_data(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


CHANGES: dict[str, Change] = {"optimizer": by_optimizer, "parameters": by_parameters, "data": by_data}


def no_forward(model: Any) -> None:
    pass


def without_gradients(model: Any) -> None:
    with torch.no_grad():
        loss_of(model, "llama", 7)


def in_evaluation_mode(model: Any) -> torch.Tensor:
    """The loss has a graph, but the model is in evaluation mode."""
    loss = loss_of(model.eval(), "llama", 7)
    model.train()
    return loss


def only_logged(model: Any) -> torch.Tensor:
    """The loss has a graph, and stays alive."""
    return loss_of(model, "llama", 7)


FORWARDS: dict[str, Callable[[Any], Any]] = {
    "none": no_forward,
    "no_grad": without_gradients,
    "eval": in_evaluation_mode,
    "logged": only_logged,
}


def losses_with(config: dict[str, Any], forward: str, change: str | None) -> list[float]:
    """Train two steps, call the model, change the weights, call it again, train on. Return the losses of this rank."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for step in range(4):
        if step == 2:
            kept = FORWARDS[forward](model)
            if change is not None:
                with torch.no_grad():
                    CHANGES[change](model, optimizer)
            FORWARDS[forward](model)
            del kept
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_around_failure(config: dict[str, Any], where: str | None, then: str = "") -> list[float]:
    """Train with a call that fails in the third step, and whose error is caught. Return the losses of this rank.

    Args:
        where: a step that fails: ``forward``, ``submodule`` (of a call of the base model), ``backward`` or ``None``.
        then: what follows: a ``save`` of the weights, or a batch whose gradients are only ``accumulated``.
    """
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    inner = accelerator.unwrap_model(model)
    mlp = unwrapped(inner.model.layers[1]).mlp
    losses = []
    for step in range(5):
        if step == 2 and where is not None:
            hook = mlp.register_full_backward_pre_hook if where == "backward" else mlp.register_forward_pre_hook
            handle = hook(_run_out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                if where == "submodule":
                    inner.model(global_batch(0)["input_ids"].to(inner.device))
                accelerator.backward(loss_of(model, "llama", 9))
            handle.remove()
        if step == 2 and then == "save":
            accelerator.get_state_dict(model)
        if step == 2 and then == "accumulated":
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, "llama", 7, accelerator.process_index, 2))
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _run_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def refused(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the codes of the problems that a case raises."""
    with pytest.raises(SpecError) as caught:
        function(*args)
    return [problem.code for problem in caught.value.problems]


def losses_after_failure_with_older_torch(config: dict[str, Any]) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state")
        return losses_around_failure(config, "backward")


def count_all_gathers(config: dict[str, Any]) -> dict[str, int]:
    """Count the all-gathers of a training step, of forwards without gradients, and of such a forward in a step."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    counter = CollectiveCounter()

    def step(between: Callable[[Any], Any]) -> None:
        loss = loss_of(model, "llama", 0)
        between(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, Callable[[], None]] = {
        "step": lambda: step(no_forward),
        "evaluation": lambda: without_gradients(model),
        "next evaluation": lambda: without_gradients(model),
        "step after it": lambda: step(no_forward),
        "step with a forward": lambda: step(without_gradients),
    }
    step(no_forward)  # the first one prefetches nothing
    for name, call in calls.items():
        with counter, counter.during(name):
            call()
    gathers: Counter[str] = Counter()
    for (kind, _, _, phase), number in counter.calls.items():
        gathers[phase] += number if kind == "all_gather" else 0
    return dict(gathers)


def losses_with_forward_before_step(config: dict[str, Any], forward: str) -> list[float]:
    """Train with another forward between the backward and the step. Return the losses of this rank."""
    accelerator = fresh_accelerator(config)
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for step in range(3):
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        kept = FORWARDS[forward](model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del kept
    return losses


CLIPS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda accelerator, parameters: accelerator.clip_grad_norm_(parameters, 0.1),
    "torch": lambda accelerator, parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "value": lambda accelerator, parameters: accelerator.clip_grad_value_(parameters, 1e-4),
    "by hand": lambda accelerator, parameters: [p.grad.mul_(0.1) for p in parameters if p.grad is not None],
}


def losses_with_forward_before_clip(
    config: dict[str, Any], forward: str, clip: str, before_optimizer: str = "none"
) -> list[float]:
    """Train with a forward ``before_optimizer`` is made, and another one between the backward and the clipping."""
    accelerator = fresh_accelerator(config)
    model: Any = accelerator.prepare_model(tiny_llama())
    kept = FORWARDS[before_optimizer](model)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    del kept
    losses = []
    for step in range(3):
        loss = loss_of(model, "llama", step, accelerator.process_index, 2)
        accelerator.backward(loss)
        kept = FORWARDS[forward](model)
        CLIPS[clip](accelerator, model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del kept
    return losses


def generate_on_device(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens that a model with offloaded shards generates after a forward, and those of the bare model."""
    accelerator = fresh_accelerator(config)
    prompt, arguments = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 3, "do_sample": False}
    bare: Any = tiny_llama().eval()
    expected = bare.generate(prompt, **arguments)
    model: Any = accelerator.prepare(tiny_llama())
    without_gradients(model)
    tokens = accelerator.unwrap_model(model).generate(prompt.to(accelerator.device), **arguments)
    return tokens.tolist(), expected.tolist()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Caller(nn.Module):
    """Calls ``forward`` of its blocks, as SqueezeBERT does, or a module inside a block, as DiT of diffusers does."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.error == "inside a unit":
            x = self.blocks[0].inner(x)
        for block in self.blocks:
            x = block.forward(x)
        if self.error == "shape":  # 8 and 16 are sizes of shards under FSDP1
            x = x + torch.zeros(1, 8)
        if self.error == "shape in a layer":
            x = self.blocks[0](torch.cat([x, x], -1))
        return self.head(x)


def blocks_as_units(config: dict[str, Any]) -> dict[str, Any]:
    fsdp = {**config["fsdp_config"], "fsdp_transformer_layer_cls_to_wrap": "Block"}
    return {**config, "fsdp_config": fsdp}


def train_with_direct_calls(config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the losses of a model that calls ``block.forward``, and those of one process. Hooks run once."""
    accelerator = fresh_accelerator(blocks_as_units(config))
    model: Any = Caller()
    found, calls = [], [0]
    losses = [_steps(Caller(), lambda loss: loss.backward())]
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses.insert(0, _steps(model, accelerator.backward, optimizer))
    found.append(calls[0])
    assert found == [3]
    return losses[0], losses[1]


def _steps(model: Any, backward: Callable[[torch.Tensor], Any], optimizer: Any = None) -> list[float]:
    optimizer = optimizer or adamw(model)
    losses = []
    for step in range(3):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def codes_of_error(config: dict[str, Any], error: str) -> list[str]:
    """Return the codes of the notes on an error in the forward of :class:`Caller`."""
    accelerator = fresh_accelerator(blocks_as_units(config))
    model = accelerator.prepare(Caller(error))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4, 16))
    add_remedy(caught.value)
    return re.findall(r"FSDP-\w+", " ".join(getattr(caught.value, "__notes__", ())))
