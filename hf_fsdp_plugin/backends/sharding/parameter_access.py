"""What scripts do with the parameters of a model that is sharded: hooks, numbers of parameters, losses, copies.

FSDP computes with other tensors than the script's parameters: views of a flat parameter, or gathered copies. Hooks of
``weight.register_hook(f)`` are registered on these, so each gets the gradient of the whole parameter from this rank's
backward, before the gradients of the ranks are reduced. DDP calls them with the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import canonical_name, named_parameters, unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import gradient_hooks, runs_after_accumulation
from hf_fsdp_plugin.torch_private.modules import children, wrapped_module
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

_CARRIES_HOOKS: Final = "_hf_fsdp_parameter_hooks"
"""Attribute of a tensor that already calls the hooks of its parameter."""

Hooks = dict[str, tuple[Mapping[int, Any], torch.dtype]]
"""Canonical name of a parameter -> its hooks, which the script may still remove, and its dtype before sharding."""


def check_parameter_hooks(model: nn.Module) -> None:
    """Raise ``SpecError`` if a parameter has a hook that runs after its gradient was accumulated."""
    names = [name for name, parameter in named_parameters(model) if runs_after_accumulation(parameter)]
    if names:
        message = f"register_post_accumulate_grad_hook was called for {format_names(names)}. torch would not call the "
        message += "hook: FSDP accumulates the gradients of shards itself."
        fix = "Use register_hook to change a gradient, and the optimizer's own step instead of steps in the backward."
        raise SpecError([Problem(code="FSDP-E307", message=message, fix=fix)])


def find_parameter_hooks(model: nn.Module) -> Hooks:
    """Return the hooks on the parameters of a model that is not sharded yet."""
    found = ((name, parameter, gradient_hooks(parameter)) for name, parameter in named_parameters(model))
    return {name: (hooks, parameter.dtype) for name, parameter, hooks in found if hooks}


def carry_parameter_hooks(model: nn.Module, found: Hooks) -> None:
    """Call the hooks of :func:`find_parameter_hooks` with the gradients of the tensors that the forward uses.

    FSDP replaces these tensors when it gathers a unit. So every module on the path to the parameter looks for a new
    one before its forward: the unit may be any of them, and other modules may use the parameter of this one.
    """
    for name, (hooks, dtype) in found.items():
        *path, attribute = name.split(".")
        modules = list(_path(model, path))
        wrappers = [index for index, module in enumerate(modules) if isinstance(module, FSDP)]
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
        if not tensor.requires_grad or is_shard or hasattr(tensor, _CARRIES_HOOKS):
            return
        setattr(tensor, _CARRIES_HOOKS, True)
        tensor.register_hook(self._call)

    def _call(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient after the hooks, which get it in the dtype of the script's parameter, have changed it."""
        changed = gradient.to(self._dtype)
        for hook in list(self._hooks.values()):
            result = hook(changed)
            changed = changed if result is None else result
        return changed.to(gradient.dtype)


def correct_flat_reads(model: nn.Module) -> None:
    """Let the methods that count parameters count whole ones, and warn once if a loss reads a shard. FSDP1 only."""
    if not isinstance(model, FSDP):
        return
    for module in model.modules():
        if hasattr(type(module), "num_parameters"):  # Transformers
            module.num_parameters = partial(_num_parameters, model, module)  # type: ignore[assignment]
        if hasattr(type(module), "get_nb_trainable_parameters"):  # PEFT
            module.get_nb_trainable_parameters = partial(_trainable_and_all, model, module)  # type: ignore[assignment]
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    warned: list[str] = []
    for unit, flat in fsdp1.flat_units(model):
        group = fsdp1.shard_group(unit)
        if group is not None and group.size() > 1:
            for member in fsdp1.original_parameters(flat):
                if member.parameter is not None and member.requires_grad:
                    name = f"{names[id(member.module)]}.{member.attribute}".lstrip(".")
                    # FSDP's own gradients do not pass through this parameter, which is a view of the shard.
                    member.parameter.register_hook(partial(_warn_of_read_shard, warned, name))


def _warn_of_read_shard(warned: list[str], name: str, gradient: torch.Tensor) -> None:
    """Warn once for a model, whose parameters share the list ``warned``. A gradient hook of a parameter."""
    if not warned:
        warned.append(name)
        message = f"a loss reads {name} outside of its module's forward. Under FSDP1 this is the rank's own part: a "
        message += "sum over it, such as a penalty, is a part of the sum, and a norm has a wrong gradient."
        fix = "Use FSDP2, where it is a DTensor of the whole, or the optimizer's weight_decay for an L2 penalty."
        print_once(Problem(code="FSDP-W311", message=message, fix=fix))


def _num_parameters(
    root: nn.Module, module: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Return what ``num_parameters`` of Transformers returns for the unsharded model."""
    return sum(
        num_elements
        for owner, num_elements, is_trained in _sizes(root, module)
        if (is_trained or not only_trainable) and not (exclude_embeddings and isinstance(owner, nn.Embedding))
    )


def _trainable_and_all(root: nn.Module, module: nn.Module) -> tuple[int, int]:
    """Return what ``get_nb_trainable_parameters`` of PEFT returns for the unsharded model."""
    return _num_parameters(root, module, only_trainable=True), _num_parameters(root, module)


def _sizes(root: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, int, bool]]:
    """Yield the owner, the number of elements and ``requires_grad`` of each whole parameter, tied ones once.

    The module may be inside a unit, or contain units.
    """
    inside = {id(inner) for inner in module.modules()}
    flattened: set[int] = set()
    for _, flat in fsdp1.flat_units(root):
        flattened.update(map(id, fsdp1.parameter_objects(flat)))
        for member in fsdp1.original_parameters(flat):
            if id(member.module) in inside:
                yield member.module, member.shape.numel(), member.requires_grad
    seen: set[int] = set()
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            if id(parameter) not in flattened | seen and not fsdp1.is_flattened(parameter):
                seen.add(id(parameter))
                yield owner, parameter.numel(), parameter.requires_grad


def refuse_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy`` of a sharded model, and of its modules with sharded parameters, raise ``SpecError``.

    A copy would have one rank's shards, and no units. ``torch.optim.swa_utils.AveragedModel`` copies the model, too.
    """
    for module in model.modules():
        if any(_is_sharded(parameter) for inner in module.modules() for parameter in own_parameters(inner).values()):
            # Copying looks for this method on the object. fully_shard has set another one on its classes.
            module.__deepcopy__ = partial(_refuse_copy, type(unwrapped(module)).__name__)  # type: ignore[assignment]


def _is_sharded(parameter: Any) -> bool:
    return parameter is not None and (isinstance(parameter, DTensor) or fsdp1.is_flattened(parameter))


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    message = f"copy.deepcopy was called with a {name} that FSDP has sharded, or with an object that contains it."
    fix = "For an average of the weights (AveragedModel), use hfp.ExponentialMovingAverage. For a snapshot, call "
    fix += "accelerator.get_state_dict(model) on all ranks. For a second model, copy it before prepare()."
    raise SpecError([Problem(code="FSDP-E310", message=message, fix=fix)])
