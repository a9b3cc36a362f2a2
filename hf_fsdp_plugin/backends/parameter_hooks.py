"""Hooks that a script has registered on parameters before they were sharded: ``weight.register_hook(f)``.

FSDP computes with other tensors than the script's parameters: views of a flat parameter, or gathered copies. The hooks
are registered on these, so each gets the gradient of the whole parameter from this rank's backward, before the
gradients of the ranks are reduced. DDP calls them with the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.plan.names import named_parameters
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.modules import children, wrapped_module
from hf_fsdp_plugin.torch_private.tensor_hooks import gradient_hooks, runs_after_accumulation

_MARK: Final = "_hf_fsdp_parameter_hooks"
"""Attribute of a tensor that already calls the hooks of its parameter."""

Hooks = dict[str, tuple[Mapping[int, Any], torch.dtype]]
"""Canonical name of a parameter -> its hooks, which the script may still remove, and its dtype before sharding."""


def check_parameter_hooks(model: nn.Module) -> None:
    """Raise ``SpecError`` if a parameter has a hook that runs after its gradient was accumulated."""
    names = [name for name, parameter in named_parameters(model) if runs_after_accumulation(parameter)]
    if names:
        message = (
            f"register_post_accumulate_grad_hook was called for {format_names(names)}. torch would not call the hook: "
            "FSDP accumulates the gradients of shards itself."
        )
        fix = "Use register_hook to change a gradient, and the optimizer's own step instead of steps in the backward."
        raise SpecError([Problem(code="FSDP-E307", message=message, fix=fix)])


def find_parameter_hooks(model: nn.Module) -> Hooks:
    """Return the hooks on the parameters of a model that is not sharded yet."""
    return {
        name: (hooks, parameter.dtype)
        for name, parameter in named_parameters(model)
        if (hooks := gradient_hooks(parameter))
    }


def carry_parameter_hooks(model: nn.Module, found: Hooks) -> None:
    """Call the hooks of :func:`find_parameter_hooks` with the gradients of the tensors that the forward uses.

    FSDP replaces these tensors when it gathers a unit. So every module on the path to the parameter looks for a new
    one before its forward: the unit may be any of them, and other modules may use the parameter of this one.
    """
    for name, (hooks, dtype) in found.items():
        *path, attribute = name.split(".")
        modules = list(_path(model, path))
        wrappers = [index for index, module in enumerate(modules) if isinstance(module, FullyShardedDataParallel)]
        modules = modules[max(wrappers, default=-1) + 1 :]  # before FSDP1 gathers the unit, its views are outdated
        carry = _Carry(modules[-1], attribute, hooks, dtype)
        for module in modules:
            module.register_forward_pre_hook(carry.before_forward)


def _path(model: nn.Module, path: list[str]) -> Iterator[nn.Module]:
    """Yield the modules from the root to the one with a canonical name, wrappers included."""
    yield (module := model)
    for part in path:
        while part not in children(module) and (inner := wrapped_module(module)) is not None:
            yield (module := inner)
        yield (module := module.get_submodule(part))
    while (inner := wrapped_module(module)) is not None:
        yield (module := inner)


class _Carry:
    """The hooks of one parameter."""

    def __init__(self, owner: nn.Module, attribute: str, hooks: Mapping[int, Any], dtype: torch.dtype) -> None:
        self._owner, self._attribute, self._hooks, self._dtype = owner, attribute, hooks, dtype

    @torch.compiler.disable
    def before_forward(self, *_: Any) -> None:
        """Register the hooks on a tensor that FSDP has gathered since the last call. A forward pre-hook."""
        tensor = getattr(self._owner, self._attribute)
        # A parameter that is sharded, or that FSDP ignores, still has the script's hooks.
        is_shard = isinstance(tensor, DTensor) or gradient_hooks(tensor) is self._hooks
        if not tensor.requires_grad or is_shard or hasattr(tensor, _MARK):
            return
        setattr(tensor, _MARK, True)
        tensor.register_hook(self._call)

    def _call(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the hooks make of a gradient, which they get in the dtype of the script's parameter."""
        changed = gradient.to(self._dtype)
        for hook in list(self._hooks.values()):
            result = hook(changed)
            changed = changed if result is None else result
        return changed.to(gradient.dtype)
