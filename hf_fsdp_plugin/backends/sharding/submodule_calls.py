"""Calls of a sharded model's modules outside the model's own forward, and ``generate``.

Both versions of FSDP gather the root unit in the root's forward only. Libraries also call modules on their own:
``model.get_input_embeddings()(ids)``, ``model.lm_head(hidden)``, ``model.get_image_features(…)``, or the module inside
FSDP1's wrapper. Then the root's parameters are flat shards or ``DTensor`` objects, and the first unit that runs takes
itself for the root. The hooks below run such a call as a forward of the root: with its gather, its casts, and its
hooks for backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_plugin.backends.ranks.collective_entry import FirstCalls
from hf_fsdp_plugin.backends.sharding.forward_hooks import cast_activations, cast_inputs, private_api, watch_mappings
from hf_fsdp_plugin.backends.torch_types import cast_floats
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2

WHOLE_ATTRIBUTE: Final = "_hf_fsdp_has_whole_parameters"
"""Attribute of a sharded model in a block of ``full_parameters``."""
_GATHERS = "_hf_fsdp_gathers"
"""Attribute of a method of a sharded model that gathers the root itself."""
_FIX = "Call it on all ranks, outside of `if accelerator.is_main_process:`. Each rank may pass its own prompts."


def support_submodule_calls(model: nn.Module) -> None:
    """Make the modules of a sharded model callable outside the model's forward.

    This includes all modules of the root unit, and the outermost modules of the other units. A call is collective: all
    ranks must make it. The model's ``generate`` also frees what it has gathered, and ``resize_token_embeddings``
    raises.

    Args:
        model: the root of FSDP. Other models, such as one with ``DTensor`` parameters only, are left unchanged.
    """
    if isinstance(model, FullyShardedDataParallel):
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            unit.forward = _forward_if_sharded(model, unit)  # type: ignore[method-assign]
    elif not isinstance(model, FSDPModule):
        return
    calls = _SubmoduleCalls(model)
    outermost = list(calls.modules())
    for module in outermost:
        module.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(calls.after, always_call=True)
    for module in (model, *outermost):
        generate: Any = getattr(module, "generate", None) if hasattr(type(module), "generate") else None
        if generate is not None:
            module.generate = calls.wrap_generate(module, generate)  # type: ignore[assignment]
        if hasattr(type(module), "resize_token_embeddings"):
            module.resize_token_embeddings = _refuse_resize  # type: ignore[assignment]


def gathers_root_itself(method: Any) -> bool:
    """Return whether a method of a sharded model waits for all ranks and gathers the root itself."""
    return getattr(method, _GATHERS, False)


def free_before_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Free what is still gathered before each step of an optimizer of a sharded model.

    The root, and units without reshard after forward, stay gathered after a forward without gradients, such as an
    evaluation between backward and step. The next forward would use this copy instead of the updated shards.
    """
    if isinstance(model, (FullyShardedDataParallel, FSDPModule)):
        units = _units_of(model)  # found once: a search in each step takes milliseconds

        def before_step(*_: Any) -> None:
            check_not_whole(model, "the optimizer was stepped")
            _free(units)

        optimizer.register_step_pre_hook(before_step)


def free_after_forward(model: nn.Module) -> None:
    """Free what is still gathered after each forward of a model that is not trained.

    No backward frees it. It would take memory during the training of another model, and it would be outdated if the
    shards are changed, as TRL's ``sync_ref_model`` does.
    """
    model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else free_gathered(model))


def free_gathered(model: nn.Module) -> None:
    """Free every gathered parameter of a sharded model, so that ``model.parameters()`` are the shards.

    A unit without reshard after forward stays gathered after an evaluation, which has no backward. An optimizer that is
    created then would update the gathered copies.
    """
    if isinstance(model, FSDPModule):
        fsdp2.keep_requires_grad(model)
    _free(_units_of(model))


def _units_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (FullyShardedDataParallel, FSDPModule))]


def _free(units: Iterable[nn.Module]) -> None:
    for unit in units:
        if isinstance(unit, FullyShardedDataParallel):
            fsdp1.free_gathered(unit)
        elif isinstance(unit, FSDPModule):
            unit.reshard()


def check_not_whole(root: nn.Module, doing: str) -> None:
    """Raise ``SpecError`` if a sharded model is in a block of ``full_parameters``, where its shards are not in use."""
    if getattr(root, WHOLE_ATTRIBUTE, False):
        raise misuse_error(f"{doing} inside of a block of full_parameters", "Do it after the block.")


def misuse_error(what: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E308", message=f"{what}.", fix=fix)])


class _SubmoduleCalls:
    """Hooks for the modules of one root, which run the root's own hooks.

    Only the outermost call enters the root's forward. The root is not idle during it, so modules inside it do nothing.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._fsdp = private_api(root)
        self._entered: nn.Module | None = None
        self._keeps_gathered = False
        self._first_calls = FirstCalls()

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules of the root unit without the root, and the outermost modules of the other units."""
        pending = list(self._root.children())
        seen: set[int] = set()
        while pending:
            module = pending.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield module
                if not isinstance(module, (FullyShardedDataParallel, FSDPModule)):
                    pending.extend(module.children())

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the root's forward, unless the root is running. A forward pre-hook."""
        if torch.compiler.is_compiling() or not self._is_idle():
            return None
        self._entered = module
        return self._enter(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Leave the root's forward if this module has entered it. A forward hook."""
        if self._entered is not module:
            return None
        self._entered = None
        output = self._fsdp.after_forward(self._root, module, args, output)
        watch_mappings(self._root, output)
        if not torch.is_grad_enabled() and not self._keeps_gathered:
            # No backward will free the parameters. An optimizer step would leave the gathered copy outdated.
            free_gathered(self._root)
        return output

    def wrap_generate(self, module: nn.Module, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``generate`` that gathers the root before the first token, and frees everything at the end."""

        @functools.wraps(generate)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            if self._keeps_gathered or not self._is_idle():
                return generate(*args, **kwargs)
            self._first_calls.wait(f"generate of {type(unwrapped(module)).__name__.removeprefix('FSDP')}", fix=_FIX)
            self._keeps_gathered = True
            try:
                with torch.no_grad():
                    # It may read the root's own parameters before it calls a module. FSDP2's root leaves its forward
                    # after the first token, and enters it again for each further token.
                    args, kwargs = self._enter_with_tensors(module, args, kwargs)
                return generate(*args, **kwargs)
            finally:
                self._keeps_gathered = False
                if not self._is_idle():
                    with torch.no_grad():
                        self._fsdp.after_forward(self._root, module, (), None)
                free_gathered(self._root)

        setattr(gathered, _GATHERS, True)
        return gathered

    def _enter_with_tensors(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter with the tensors among the arguments: FSDP would rebuild other objects to look for tensors in them."""
        tensors = tuple(value for value in args if isinstance(value, torch.Tensor))
        named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        entered, entered_named = self._enter(module, tensors, named)
        remaining = iter(entered)
        positional = tuple(next(remaining) if isinstance(value, torch.Tensor) else value for value in args)
        return positional, {**kwargs, **entered_named}

    def _is_idle(self) -> bool:
        """Whether the root is neither in a forward nor in a backward."""
        return bool(self._fsdp.is_idle(self._root))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._fsdp.before_forward(self._root, module, *cast_inputs(self._root, args, kwargs))


def _forward_if_sharded(root: Any, unit: Any) -> Callable[..., Any]:
    """Return the forward of a unit of FSDP1 for sharded and for summoned parameters.

    FSDP1's forward would free parameters that ``summon_full_params`` has gathered. The end of the context would
    then overwrite the weights of every rank but the first with other elements of its shard. If only the root is
    summoned, it computes in the dtype of its shards, and the other units in their compute dtype.
    """
    forward = unit.forward

    @functools.wraps(forward)
    def forward_if_sharded(*args: Any, **kwargs: Any) -> Any:
        if fsdp1.is_summoned(unit):
            return unit.module(*args, **kwargs)
        if unit is root or not fsdp1.is_summoned(root):
            return forward(*args, **kwargs)
        args, kwargs = cast_activations((args, kwargs), unit.mixed_precision.param_dtype)
        return cast_floats(forward(*args, **kwargs), fsdp1.original_dtype(root))

    return forward_if_sharded


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    message = "resize_token_embeddings was called on a sharded model, whose embeddings are shards."
    fix = "Call it before prepare(), or before the Trainer is created."
    raise SpecError([Problem(code="FSDP-E610", message=message, fix=fix)])
