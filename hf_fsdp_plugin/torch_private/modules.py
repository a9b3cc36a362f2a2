"""Private attributes of ``torch.nn.Module`` (``torch/nn/modules/module.py``), and names of FSDP units.

Imports no torch, which may be in the middle of its import when hooks import this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.contracts import contracts_in, guard_functions

if TYPE_CHECKING:
    import torch
    from torch import nn

ROOT: Final = "the root unit"
_UNIT_NAME: Final = "_hf_fsdp_unit_name"
CONTRACTS = contracts_in(__file__)
_COMPILED: Final = "_orig_mod"
CHECKPOINTED_ATTRIBUTE: Final = "_checkpoint_wrapped_module"
LOCAL_TENSOR_ATTRIBUTE: Final = "_local_tensor"
"""Attribute of a pickled ``DTensor`` that contains the shard."""
WRAPPER_ATTRIBUTES: Final = ("_fsdp_wrapped_module", CHECKPOINTED_ATTRIBUTE, _COMPILED)
"""Attributes in which wrappers (FSDP1, activation checkpointing, ``torch.compile``) store the wrapped module."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a module's forward."""


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a ``DTensor``, and any other object unchanged.

    A shard that casts itself in the all-gather is returned without its class. The result is its memory: changes of a
    view of it would not be counted.
    """
    if not hasattr(tensor, "to_local"):
        return tensor
    return unconverted(tensor._local_tensor) if casts_itself(tensor._local_tensor) else tensor.to_local()


def plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the local parts of tensors; of a tensor subclass (torchao's quantized state) the tensors inside it."""
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if hasattr(local, "__tensor_flatten__"):
            yield from plain_tensors(getattr(local, name) for name in local.__tensor_flatten__()[0])
        else:
            yield local


def casts_itself(tensor: Any) -> bool:
    """Return whether a tensor casts itself in the all-gather of FSDP2, as torchao's weights for fp8 do."""
    return hasattr(tensor, "fsdp_pre_all_gather")


def unconverted(shard: torch.Tensor) -> torch.Tensor:
    """Return the plain memory of a shard that casts itself in the all-gather of FSDP2; other tensors unchanged."""
    wrapper: Any = shard
    return getattr(shard, wrapper.__tensor_flatten__()[0][0]) if casts_itself(shard) else shard


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the mutable dict attribute -> child. ``named_children`` omits a module's second name."""
    return module._modules


def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the mutable dict attribute -> parameter of the module itself."""
    return module._parameters


def leave_on_meta(module: nn.Module) -> None:
    """Let ``module.to(…)`` cast parameters on the meta device without moving them, for which torch raises an error."""
    module._apply = MethodType(_apply_on_meta, module)  # type: ignore[method-assign]


def _apply_on_meta(module: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    def apply(tensor: Any) -> Any:
        # A function that moves a tensor without elements returns the wanted dtype.
        return tensor.to(function(tensor.new_empty(0, device="cpu")).dtype) if tensor.is_meta else function(tensor)

    return type(module)._apply(module, apply, recurse)


def registrations(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield each place of each parameter: the mutable dict of the module, the attribute in it, and the parameter."""
    for module in modules:
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield module._parameters, attribute, parameter


def buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the mutable dict attribute -> buffer of the module itself."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the attributes of the module's buffers that are not in the state dict."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run before the module's forward."""
    return list(module._forward_pre_hooks.values())


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace ``old`` by ``new`` in every parent in ``model``."""
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[attribute] = new


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper of FSDP1, activation checkpointing or ``torch.compile``."""
    return next((inner for name in WRAPPER_ATTRIBUTES if (inner := module._modules.get(name)) is not None), None)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` wrapped; ``None`` for other modules."""
    return module._modules.get(_COMPILED)


def compile_call(module: nn.Module, compiler: Callable[..., Any]) -> None:
    """Compile the module's call including its hooks with ``compiler``, as ``module.compile()`` does."""
    module._compiled_call_impl = compiler(module._call_impl)


def calls_compiled(module: nn.Module) -> bool:
    """Whether calls of this module run compiled code, by ``torch.compile(module)`` or by ``module.compile()``."""
    return hasattr(module, _COMPILED) or getattr(module, "_compiled_call_impl", None) is not None


def mark_fsdp_managed(model: nn.Module) -> None:
    """Mark every module as managed by FSDP.

    torch.compile reads the mark. Transformers reads it before skipping a layer or ending a generation on one rank only.
    FSDP has marked its own modules, so this marks the modules that it ignores. torch.compile breaks the graph at a
    module that is marked as managed and not as one whose parameters are the original ones.
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        vars(module).setdefault("_fsdp_use_orig_params", True)


def is_fsdp_managed(module: nn.Module) -> bool:
    """Return whether :func:`mark_fsdp_managed`, or torch, has marked this module."""
    return module.__dict__.get("_is_fsdp_managed_module", False) is True


@contextmanager
def entries_in_block(entries: Mapping[str, Any], *mappings: MutableMapping[str, Any]) -> Iterator[None]:
    """Give dicts, or the environment, other entries in the block, which keep their places. New ones are removed."""
    kept = [(mapping, {name: mapping[name] for name in entries if name in mapping}) for mapping in mappings]
    for mapping in mappings:
        mapping.update(entries)
    try:
        yield
    finally:
        for mapping, before in kept:
            mapping.update(before)
            for name in entries.keys() - before.keys():
                mapping.pop(name, None)


def without_forward_hooks(module: nn.Module) -> AbstractContextManager[None]:
    """Call the module and those inside it without their hooks, which gather parameters collectively."""
    none: Any = {"_forward_pre_hooks": OrderedDict(), "_forward_hooks": OrderedDict()}
    return entries_in_block(none, *map(vars, module.modules()))


def with_tensors(module: nn.Module, tensors: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Let the module have other tensors as parameters and buffers, by its own names."""
    from torch.nn.utils.stateless import _reparametrize_module

    return _reparametrize_module(module, tensors)


def set_unit_name(unit: Any, name: str) -> None:
    """Give a unit, which is one of FSDP1's handles or of FSDP2's parameter groups, its name; empty for the root."""
    setattr(unit, _UNIT_NAME, name)


def unit_name(unit: Any, root: str = ROOT) -> str:
    """Return the name of a unit, and ``root`` for the root; without :func:`set_unit_name`, what torch knows of it."""
    name: str | None = getattr(unit, _UNIT_NAME, None)
    if name is None:
        module, name = getattr(unit, "_fully_sharded_module", None), getattr(unit, "_module_fqn", None)
        name = type(module).__name__ if name is None and module is not None else name
        if name is None:
            return ""
        setattr(unit, _UNIT_NAME, name)
    return name or root


guard_functions(globals(), CONTRACTS, off={"unit_name": ""})
