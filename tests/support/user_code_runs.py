"""Cases that ranks run: user code that reads and changes the weights of prepared models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_fsdp_plugin.problems import SpecError
from tests.support.tiny import MODELS, tiny_llama
from tests.support.training import loss_of


def codes_of(function: Callable[[], Any]) -> list[str]:
    """The codes of the problems that a call raises."""
    try:
        function()
    except SpecError as error:
        return sorted({problem.code for problem in error.problems})
    return []


def make_model(name: str) -> Any:
    return tiny_llama(tied=True) if name == "tied" else MODELS[name]()


def step(accelerator: Any, model: nn.Module, optimizer: Any, name: str, number: int) -> None:
    """One step of an unsharded model (without an accelerator), or of a prepared one."""
    name = "llama" if name != "simple" else name
    if accelerator is None:
        loss_of(model, name, number).backward()
    else:
        accelerator.backward(loss_of(model, name, number, accelerator.process_index, accelerator.num_processes))
    optimizer.step()
    optimizer.zero_grad()
