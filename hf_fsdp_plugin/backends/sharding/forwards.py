"""What is applied to the forwards of a model and of its modules, before and after it is sharded.

Precision: in mixed precision FSDP casts neither the parameters of ignored modules nor those that are gathered in fp32,
but the inputs of units to the compute dtype. torch raises for a matrix product of different dtypes, and a norm with an
fp32 weight returns fp32, with which the next module could not compute. FSDP1 casts inputs and outputs of the module
classes that it excludes from mixed precision in the same way (``_override_module_mixed_precision`` in
``torch/distributed/fsdp/_wrap_utils.py``).

Inputs: FSDP casts every floating-point tensor that its root receives to the compute dtype, and FSDP2 also those of
every other unit. This changes numbers that are not activations: bf16 has 8 significant bits, so a loss is divided by
260 instead of 261 labels, and fp16 ends at 65,504. Here only activations are cast, which have a batch and at least one
other dimension. Tensors with fewer dimensions keep their dtype: counts, weights of samples, time steps.

Outputs: FSDP starts the backward of a unit with hooks on the tensors in its output. It finds them in tensors, dicts,
lists, tuples and dataclasses, but not in other mappings, such as Transformers' ``BatchEncoding``, which
sentence-transformers' modules return. Without these hooks, FSDP1 raises in backward, and an FSDP2 root without inner
units does not reduce its gradients.

Dicts: FSDP copies the containers of its inputs when it moves or casts tensors. Models and losses of
sentence-transformers exchange values through the dict of features, which each module extends. Entries that a model adds
to a dict of its inputs, or removes, are added to the caller's dict, or removed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_plugin.backends.torch_types import cast_floats
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2, functions
from hf_fsdp_plugin.torch_private.functions import tree_leaves, tree_map
from hf_fsdp_plugin.torch_private.modules import Inputs

Forward = Callable[..., Any]


def fp32_forwards(plan: FsdpPlan, model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each fp32 module of a plan with a forward that casts floating-point inputs to fp32, without autocast.

    Outputs are cast back to the compute dtype, except those of the model's head: the loss is computed in fp32.
    """
    compute = torch_dtype(plan.precision.param)
    root: Any = model
    head = None
    with suppress(NotImplementedError, AttributeError):  # there is no accessor, or no head
        head = root.get_output_embeddings()
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


_DTYPE: Final = "_hf_fsdp_input_dtype"
_ACTIVATION_DIMS: Final = 2


def cast_inputs_of(unit: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the activations that a unit receives. FSDP itself must not cast its inputs.

    Args:
        dtype: ``None`` if the unit computes in the dtype of its shards.
    """
    if dtype is not None:
        if _DTYPE not in vars(unit):
            # Before FSDP2's own hook, which looks for tensors that require gradients.
            unit.register_forward_pre_hook(_cast_before_forward, prepend=True, with_kwargs=True)
        setattr(unit, _DTYPE, dtype)


def cast_inputs(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return the inputs of a unit, with its activations in the compute dtype."""
    args, kwargs = cast_activations((args, kwargs), vars(unit).get(_DTYPE))
    return args, kwargs


def cast_activations(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return a tree of inputs with its activations in ``dtype``; unchanged for ``None``."""
    if dtype is None:
        return inputs

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_activation = value.is_floating_point() and value.dim() >= _ACTIVATION_DIMS
            return value.to(dtype) if is_activation else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **cast_activations(fields, dtype))
        return value

    return tree_map(cast, inputs)


def _cast_before_forward(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(unit, FullyShardedDataParallel) and fsdp1.is_summoned(unit):
        return None  # it computes with the summoned parameters, which have the dtype of the shards
    return cast_inputs(unit, args, kwargs)


def float_outputs(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in the output of a model."""
    # torch's pytree supports only some of Transformers' output classes. All of them are mappings.
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def support_mapping_outputs(model: nn.Module) -> None:
    """Make backward work for all units of a sharded model, whatever mapping they return."""
    for module in model.modules():
        if isinstance(module, (FullyShardedDataParallel, FSDPModule)):
            module.register_forward_hook(lambda module, args, output: watch_mappings(module, output))


def watch_mappings(unit: Any, output: Any) -> None:
    """Register the unit's hooks for backward on the tensors of an output in which FSDP does not look for them."""
    if torch.compiler.is_compiling() or isinstance(output, dict) or not isinstance(output, Mapping):
        return
    tensors = [tensor for tensor in float_outputs(output) if tensor.requires_grad]
    if tensors and torch.is_grad_enabled():
        private_api(unit).start_backward_at(unit, tensors)


def private_api(unit: nn.Module) -> Any:
    """Return the file of ``torch_private`` for the FSDP version of a unit."""
    return fsdp1 if isinstance(unit, FullyShardedDataParallel) else fsdp2


def refuse_double_backward(model: nn.Module) -> None:
    """Make a second backward through a forward of the model raise ``SpecError`` on all ranks, if FSDP cannot run it.

    FSDP frees the gathered weights in the backward, and computes gradients of shards without a graph. With
    ``create_graph=True``, a second backward would read freed memory, which ends the process, and FSDP2 returns
    gradients that cannot be differentiated. With ``retain_graph=True``, only FSDP2 gathers the weights again.
    """
    model.register_forward_hook(_watch_backward_of)


def _watch_backward_of(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        backwards: set[int | None] = set()
        for tensor in float_outputs(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: _check_backward(module, backwards))


def _check_backward(model: nn.Module, backwards: set[int | None]) -> None:
    """Check a backward through outputs of a forward, which has begun.

    Args:
        backwards: the earlier ones.
    """
    if torch.is_grad_enabled():  # in a backward: create_graph=True
        message = "a backward through a sharded model has create_graph=True. FSDP has no gradients of gradients."
        fix = "Call backward without create_graph. For a gradient penalty, train without FSDP, or use the difference "
        fix += "of two forwards."
        raise SpecError([Problem(code="FSDP-E313", message=message, fix=fix)])
    backwards.add(functions.current_backward())
    if len(backwards) > 1 and isinstance(model, FullyShardedDataParallel) and fsdp1.has_freed(model):
        message = "a second backward through one forward of the model (retain_graph=True). FSDP1 has freed the weights "
        message += "in the first one, and does not gather them again."
        fix = "Add the losses and call backward once, run a forward for each backward, or set fsdp_version: 2."
        raise SpecError([Problem(code="FSDP-E315", message=message, fix=fix)])


def return_changed_inputs(model: nn.Module) -> None:
    """Apply what the forward of a sharded model changes in dicts of its inputs to the dicts of the caller.

    Must be called after all other hooks are registered.
    """
    changes, inner = _Changes(model), unwrapped(model)
    for module in {model, inner}:  # under FSDP1, the module in the wrapper may be called directly
        module.register_forward_pre_hook(changes.called, prepend=True, with_kwargs=True)
    inner.register_forward_pre_hook(changes.entered, with_kwargs=True)
    inner.register_forward_hook(changes.left, always_call=True)


class _Changes:
    """The dicts of one forward: those of the caller, those of the model, and what these contained before."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._given: list[dict[Any, Any]] = []
        self._seen: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A forward of the root that has failed may have left its dicts.
        if (module is self._root or not self._given) and not torch.compiler.is_compiling():
            self._given = _dicts(args, kwargs)

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen = [(seen, dict(seen)) for seen in _dicts(args, kwargs)] if self._given else []

    def left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given, self._given = self._given, []
        seen, self._seen = self._seen, []
        for caller, (changed, before) in zip(given, seen, strict=False):
            if caller is changed:
                continue
            for key in before.keys() - changed.keys():
                caller.pop(key, None)
            for key, value in changed.items():
                if key not in before or before[key] is not value:
                    caller[key] = value  # outputs of Transformers are dicts that have no update


def _dicts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[Any, Any]]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
