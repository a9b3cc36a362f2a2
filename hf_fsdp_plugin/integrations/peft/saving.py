"""Whole adapters of a sharded PEFT model, and PEFT's own saving code on one rank.

PEFT selects the tensors of an adapter from the model's state dict by the names of the modules. Some modules it asks
directly: those of ``modules_to_save`` for their state dict, and prompt encoders for their output. In a sharded model
names contain wrappers, and the answers are collective or parts of tensors. Here, rank 0 asks PEFT which tensors belong
to the adapters, all ranks gather them, and PEFT's code runs on rank 0 with the modules and the tensors of an unsharded
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint import model_shards, trainable_state
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.modules import children, without_forward_hooks, wrapped_module

_PROMPT_ENCODER = "prompt_encoder"
_WITHOUT_TRANSFORM = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds of prompts whose encoder takes only the virtual tokens of one module (``get_prompt_embedding_to_save``)."""


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole tensors that PEFT saves, by canonical names, on the CPU of rank 0; empty elsewhere. Collective.

    These are the trainable parameters, the parameters of inactive adapters, and embeddings that were resized or have an
    adapter.
    """
    shards = model_shards(model)
    names: list[Any] = [None]
    with on_all_ranks("selecting the weights of the adapters"):
        if dist.get_rank() == 0:
            shapes = {held.name: torch.empty(held.shape, dtype=held.dtype, device="meta") for held in shards.tensors}
            aliases = {alias: shapes[name] for alias, name in shards.aliases.items()}
            selected = _selected_by_peft(unwrapped(model), {**shapes, **aliases})
            names = [{name for name, tensor in shapes.items() if id(tensor) in selected}]
    dist.broadcast_object_list(names, src=0)
    state = trainable_state(model, also=names[0])
    return {**state, **{alias: state[name] for alias, name in shards.aliases.items() if name in state}}


def _selected_by_peft(model: Any, state: Mapping[str, torch.Tensor]) -> set[int]:
    """Return the ids of the tensors in ``state`` that PEFT saves for any adapter."""
    from peft import get_peft_model_state_dict

    selected: set[int] = set()
    with warnings.catch_warnings(), as_unsharded(model, state):
        warnings.simplefilter("ignore")  # PEFT repeats its warnings when it saves
        for adapter, config in model.peft_config.items():
            if config.is_prompt_learning:
                prefix = f"{_PROMPT_ENCODER}.{adapter}."
                selected.update(id(tensor) for name, tensor in state.items() if name.startswith(prefix))
                continue
            saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
            selected.update(id(tensor) for tensor in saved.values())
    return selected


@contextmanager
def as_unsharded(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Remove the wrappers in a PEFT model, and answer PEFT's questions to its modules from ``state``. Not collective.

    Args:
        model: the ``PeftModel`` itself, without wrappers around it.
        state: whole tensors by canonical names, at least those of the adapters.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_wrappers(model))
        for name, module in model.named_modules():
            saved = getattr(module, "modules_to_save", None)
            if isinstance(saved, nn.ModuleDict):
                for adapter, inner in saved.items():
                    part = _below(state, f"{name}.modules_to_save.{adapter}.")
                    stack.enter_context(_replaced(inner, "state_dict", partial(dict, part)))
        stack.enter_context(_replaced(model, "get_prompt_embedding_to_save", partial(_prompt, model, state)))
        yield


@contextmanager
def _without_wrappers(model: nn.Module) -> Iterator[None]:
    """Register the wrapped modules instead of their wrappers, so that the names of modules are those without FSDP."""
    replaced = [
        (children(module), attribute, child)
        for module in model.modules()
        if wrapped_module(module) is None
        for attribute, child in children(module).items()
        if child is not None and wrapped_module(child) is not None
    ]
    for registered, attribute, wrapper in replaced:
        registered[attribute] = unwrapped(wrapper)
    try:
        yield
    finally:
        for registered, attribute, wrapper in replaced:
            registered[attribute] = wrapper


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


@contextmanager
def _replaced(module: nn.Module, method: str, replacement: Any) -> Iterator[None]:
    """Replace a method of one module."""
    vars(module)[method] = replacement
    try:
        yield
    finally:
        del vars(module)[method]


def _prompt(model: Any, state: Mapping[str, torch.Tensor], adapter_name: str) -> torch.Tensor:
    """Return the output of a prompt encoder with whole weights, as ``PeftModel.get_prompt_embedding_to_save`` does."""
    config = model.peft_config[adapter_name]
    tokens = model.prompt_tokens[adapter_name]
    if config.peft_type in _WITHOUT_TRANSFORM:
        tokens = tokens[: config.num_virtual_tokens]
    weights = _below(state, f"{_PROMPT_ENCODER}.{adapter_name}.")
    encoder = model.prompt_encoder[adapter_name]
    with torch.no_grad(), without_forward_hooks(encoder):
        prompts = functional_call(encoder, weights, (tokens.unsqueeze(0).cpu(),))
    return prompts[0].detach().cpu()
