"""Losses of models that accept the number of labels in a batch, but do not divide by it.

The Trainer passes ``num_items_in_batch`` to every forward that has ``**kwargs``. It then multiplies the loss by the
number of ranks, and does not divide it by the accumulated batches, because the model is supposed to have divided a sum
by the labels of all of them. Many models return a mean instead: T5, BART, BERT, and most models for classification.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.state import parts_of

_NUM_ITEMS: Final = "num_items_in_batch"
_NEUTRAL: Final = frozenset({"__get__", "to", "detach", "dim", "size", "numel", "is_floating_point", "is_complex"})
"""Functions of a tensor that do not compute with its value. FSDP calls them for all inputs."""


class _Watched:
    """The model whose loss a Trainer watches, as a weak reference."""

    def __init__(self) -> None:
        self.model: Callable[[], nn.Module | None] = lambda: None


def watch_loss(trainer: Any, model: nn.Module) -> None:
    """Let a Trainer scale the loss of a model that ignores ``num_items_in_batch`` as a mean, from its first forward on.

    The first forward with labels gets a tensor that records whether it is used. Compiled models are left unchanged.
    """
    dynamo = trainer.accelerator.state.dynamo_plugin
    compiles = trainer.args.torch_compile or (dynamo is not None and dynamo.backend.value.lower() != "no")
    watched = parts_of(trainer).get(_Watched)
    if compiles or not trainer.model_accepts_loss_kwargs or watched.model() is model:
        return
    watched.model = weakref.ref(model)
    uses: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in _NEUTRAL:
                return super().__torch_function__(func, types, args, kwargs or {})
            uses.append(func.__name__)
            # The result is a plain tensor: FSDP1 does not begin the backward of a loss of another class.
            return nn.Parameter.__torch_function__(func, types, args, kwargs or {})

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(number := kwargs.get(_NUM_ITEMS), torch.Tensor):
            return args, {**kwargs, _NUM_ITEMS: number.as_subclass(Watched)}
        return None

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(kwargs.get(_NUM_ITEMS), Watched) and kwargs.get("labels") is not None and loss is not None:
            for handle in handles:
                handle.remove()
            if not uses:
                _scale_as_mean(trainer, module)

    inner = unwrapped(model)
    handles = [
        inner.register_forward_pre_hook(before, with_kwargs=True),
        inner.register_forward_hook(after, with_kwargs=True),
    ]


def _scale_as_mean(trainer: Any, model: Any) -> None:
    trainer.model_accepts_loss_kwargs = False  # the Trainer reads it after this forward
    ranks = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
    factor = ranks * trainer.args.gradient_accumulation_steps
    if factor > 1:
        name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
        message = (
            f"the forward of {name} accepts {_NUM_ITEMS} and ignores it. Transformers multiplies the loss and the "
            f"gradients of such a model by the ranks and the accumulated batches, here by {factor}. This run does not."
        )
        fix = "Divide losses of runs without this package by that number to compare them."
        print_once(Problem(code="FSDP-N644", message=message, fix=fix))
