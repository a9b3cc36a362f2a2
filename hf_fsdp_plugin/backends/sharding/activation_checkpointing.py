"""Activation checkpointing: which units are recomputed in the backward, what is saved, and offload of what is saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.torch_private import functions
from hf_fsdp_plugin.torch_private.modules import replace_module, wrapped_module

_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, functions.SCALED_MM, functions.GROUPED_MM)


_SAVED = (*functions.ATTENTION_OPS, torch.ops.aten.max.default)
"""Operators that are not recomputed. The largest element of a tensor is its scale in fp8."""


_CACHE_ARGUMENTS = frozenset({"cache", "past_key_values", "layer_past"})
"""Names of the key-value cache in the layers of Transformers 5.17 to 5.24."""


class ActivationOffload(functions.ActivationWrapper):
    """Moves what the wrapped module saves for backward to CPU memory until backward needs it.

    A checkpointed unit saves only its input. If the input is in CPU memory, the device memory for activations does not
    grow with the number of layers. torch's ``OffloadWrapper`` always pins memory, which requires an accelerator.
    """

    def __init__(self, module: nn.Module, *, device_type: str) -> None:
        super().__init__(module)
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=self.device_type != "cpu", device_type=self.device_type):
            wrapped: Any = wrapped_module(self)
            return wrapped(*args, **kwargs)


def save_every_second_matmul() -> Any:
    """Context of selective checkpointing: save attention and every second matmul, and recompute everything else.

    Matmuls are the expensive part of a recompute. Saving half of them is the usual compromise (as in torchtitan).
    """
    seen = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _SAVED:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            # Forward and recompute have separate counters, so that both make the same decision for each matmul.
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(
    plan: FsdpPlan, model: nn.Module, compile_unit: Callable[[nn.Module], None] | None = None
) -> None:
    """Wrap each unit of the wrap policy in place, before sharding, and compile it together with its checkpoint.

    ``FSDP(checkpoint(layer))`` gathers a unit's parameters once for recompute and backward; ``checkpoint(FSDP(layer))``
    gathers them twice. The random state is restored for the recompute. Accelerate does not restore it under FSDP2, so
    dropout draws different random numbers in the forward and in the recompute.
    """
    activation = plan.activation
    is_wrapped = not activation.native and activation.checkpointing != "none"
    wrap: Callable[[nn.Module], nn.Module] = functools.partial(functions.checkpoint_wrapper, preserve_rng_state=True)
    if activation.checkpointing == "selective":
        wrap = functools.partial(functions.checkpoint_wrapper, context_fn=save_every_second_matmul)
    can_drop_cache = True
    for name in [name for unit in plan.units if unit.from_policy for name in unit.modules]:
        module = model.get_submodule(name)
        wrapped = wrap(module) if is_wrapped else module
        if compile_unit is not None:
            # The compiler sees the operators that the policy saves. In a checkpoint, it would replace them before.
            compile_unit(wrapped)
        if not is_wrapped:
            continue
        wrapped.register_forward_pre_hook(_without_cache, with_kwargs=True)
        can_drop_cache &= checkpoints_itself(module)  # then `_without_cache` removes the cache from its arguments
        if activation.offload:
            wrapped = ActivationOffload(wrapped, device_type=plan.device_type)
        replace_module(model, module, wrapped)
    if not can_drop_cache:
        for config in configs_with_cache(model):
            config.use_cache = False


def checkpoints_itself(module: nn.Module) -> bool:
    """Whether a layer has Transformers' base class of layers that can checkpoint themselves."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a checkpointed layer without the key-value cache, to which the recompute would append again.

    The model keeps the cache: without one, Transformers reads the position ids in each forward, to find packed
    sequences, and the host waits for the device.
    """
    if not torch.is_grad_enabled():
        return None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs | dict.fromkeys(_CACHE_ARGUMENTS & kwargs.keys())


def configs_with_cache(model: nn.Module) -> list[Any]:
    """Return the configs of a model and of its parts that ask for a key-value cache. T5's decoder has its own."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if getattr(config, "use_cache", False)]
