"""What is applied to the forwards of modules before a model is sharded: their precision, activation checkpointing.

In mixed precision FSDP casts neither the parameters of ignored modules nor those that are gathered in fp32, but the
inputs of units to the compute dtype. torch raises for a matrix product of different dtypes, and a norm with an fp32
weight returns fp32, with which the next module could not compute. FSDP1 casts inputs and outputs of the module classes
that it excludes from mixed precision in the same way (``_override_module_mixed_precision`` in
``torch/distributed/fsdp/_wrap_utils.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hf_fsdp_plugin.backends.torch_types import cast_floats, torch_dtype
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.torch_private import functions
from hf_fsdp_plugin.torch_private.modules import replace_module

Forward = Callable[..., Any]
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_CACHE_ARGUMENTS = frozenset({"cache", "past_key_values", "layer_past"})
"""Names of the key-value cache in the layers of Transformers 5.17 to 5.24."""


def compute_in_fp32(plan: FsdpPlan, model: nn.Module) -> None:
    """Make the forwards of the plan's fp32 modules compute in fp32."""
    for module, forward in fp32_forwards(plan, model):
        module.forward = forward


def fp32_forwards(plan: FsdpPlan, model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each fp32 module of a plan with a forward that casts floating-point inputs to fp32, without autocast.

    Outputs are cast back to the compute dtype, except those of the model's head: the loss is computed in fp32.
    """
    compute = torch_dtype(plan.precision.param)
    head = _head(model)
    for module in map(model.get_submodule, plan.fp32_modules):
        output_dtype = None if module is head else compute
        yield module, _computing_in(torch.float32, module.forward, plan.device_type, output_dtype)


def fp32_ids(plan: FsdpPlan, model: nn.Module, names: Iterable[str] | None = None) -> frozenset[int]:
    """Return the ids of the parameters that are gathered in fp32, while the model contains these objects.

    Args:
        names: only these parameters. Default: all.
    """
    selected = plan.fp32_parameters if names is None else set(names).intersection(plan.fp32_parameters)
    return frozenset(id(model.get_parameter(name)) for name in selected)


def _head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def apply_autocast(plan: FsdpPlan, model: nn.Module) -> None:
    """Run the forward of each ignored module under autocast, and cast its output to the compute dtype.

    This includes modules with a weight that is tied to an ignored one. Autocast alone returns fp32 from operations that
    it does not cast, such as norms. The next module, whose weights FSDP casts, could not compute with it. Stock
    Accelerate runs the whole model under autocast.
    """
    dtype = torch_dtype(plan.precision.param)
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for module in _outermost(plan, model):
        module.forward = _computing_in(dtype, module.forward, plan.device_type, dtype)


def _outermost(plan: FsdpPlan, model: nn.Module) -> list[nn.Module]:
    """Return the ignored modules that are not in another one, and other modules that have a parameter of them."""
    ignored = [model.get_submodule(name) for name in plan.ignored_modules]
    inner = {id(module) for outer in ignored for module in outer.modules() if module is not outer}
    outermost = [module for module in ignored if id(module) not in inner]
    parameters = {id(parameter) for outer in ignored for parameter in outer.parameters()}
    others = (module for module in model.modules() if id(module) not in inner and module not in outermost)
    tied = [module for module in others if any(id(p) in parameters for p in module.parameters(recurse=False))]
    return outermost + tied


def _computing_in(dtype: torch.dtype, forward: Forward, device_type: str, output_dtype: torch.dtype | None) -> Forward:
    """Return a forward that runs under autocast to ``dtype``; for fp32, without autocast and with inputs in fp32."""
    is_fp32 = dtype is torch.float32

    @functools.wraps(forward)
    def computing(*args: Any, **kwargs: Any) -> Any:
        if is_fp32:
            args, kwargs = cast_floats((args, kwargs), dtype)
        with torch.autocast(device_type, None if is_fp32 else dtype, enabled=not is_fp32):
            output = forward(*args, **kwargs)
        return cast_floats(output, output_dtype)

    return computing


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
            return functions.checkpointed_module(self)(*args, **kwargs)


def save_every_second_matmul() -> Any:
    """Context of selective checkpointing: save attention and every second matmul, and recompute everything else.

    Matmuls are the expensive part of a recompute. Saving half of them is the usual compromise (as in torchtitan).
    """
    seen = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in functions.ATTENTION_OPS:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            # Forward and recompute have separate counters, so that both make the same decision for each matmul.
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_activation_checkpointing(plan: FsdpPlan, model: nn.Module) -> None:
    """Wrap each unit of the wrap policy in place, before sharding.

    ``FSDP(checkpoint(layer))`` gathers a unit's parameters once for recompute and backward; ``checkpoint(FSDP(layer))``
    gathers them twice. The random state is restored for the recompute. Accelerate does not restore it under FSDP2, so
    dropout draws different random numbers in the forward and in the recompute.
    """
    activation = plan.activation
    if activation.native or activation.checkpointing == "none":
        return
    wrap: Callable[[nn.Module], nn.Module] = functools.partial(functions.checkpoint_wrapper, preserve_rng_state=True)
    if activation.checkpointing == "selective":
        wrap = functools.partial(functions.checkpoint_wrapper, context_fn=save_every_second_matmul)
    can_drop_cache = True
    for name in [name for unit in plan.units if unit.from_policy for name in unit.modules]:
        module = model.get_submodule(name)
        wrapped = wrap(module)
        wrapped.register_forward_pre_hook(_without_cache, with_kwargs=True)
        can_drop_cache &= checkpoints_itself(module)  # it gets the cache under a known name
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
