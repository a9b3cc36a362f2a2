"""What scripts do with a sharded model besides its forward: calls of modules, ``generate``, copies.

Calls: both versions of FSDP gather the root unit in the root's forward only. Libraries also call modules on their own:
``model.get_input_embeddings()(ids)``, ``model.lm_head(hidden)``, ``model.get_image_features(…)``, or the module inside
FSDP1's wrapper. Then the root's parameters are flat shards or ``DTensor`` objects, and the first unit that runs takes
itself for the root. The hooks below run such a call as a forward of the root: with its gather, its casts, and its
hooks for backward.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.ranks.agreement import ON_ALL_RANKS, FirstCalls
from hf_fsdp_plugin.backends.sharding import forwards
from hf_fsdp_plugin.backends.sharding.unused_parameters import discard_backward, num_reduced_backwards
from hf_fsdp_plugin.backends.torch_types import cast_floats, wait_for_reads
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import canonical_name, named_parameters, unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import find_part, own_parts
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import CALLS_FORWARD, gradient_hooks, runs_after_accumulation
from hf_fsdp_plugin.torch_private.modules import local_tensor, registrations

_GATHERS = "_hf_fsdp_gathers"
"""Attribute of a method of a sharded model that gathers the root itself."""
_FIX = f"{ON_ALL_RANKS} Each rank may pass its own prompts."


def support_submodule_calls(model: nn.Module) -> None:
    """Make the modules of a sharded model callable outside the model's forward, and free what calls have gathered.

    This includes all modules of the root unit, and the outermost modules of the other units. A call is collective: all
    ranks must make it. The model's ``generate`` also frees what it has gathered, and ``resize_token_embeddings``
    raises.

    Args:
        model: the root of FSDP. Other models, such as one with ``DTensor`` parameters only, are left unchanged.
    """
    if isinstance(model, FullyShardedDataParallel):
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            unit.forward = _forward_if_sharded(model, unit)  # type: ignore[method-assign]
    elif isinstance(model, FSDPModule):
        for module in _units_of(model):
            module.forward = _forward_of_call(module)
    else:
        return
    calls = _Calls(model)
    own_parts(model).put(calls)
    if isinstance(model, FullyShardedDataParallel):
        object.__setattr__(model, "no_sync", partial(calls.no_sync, model.no_sync))
    # The compiler would skip these hooks in a compiled model.
    model.register_forward_pre_hook(torch.compiler.disable(calls.before), prepend=True, with_kwargs=True)
    model.register_forward_hook(torch.compiler.disable(calls.after), always_call=True)
    outside = dict.fromkeys(_modules_outside(model))
    for module in outside:
        module.register_forward_pre_hook(calls.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(calls.after, always_call=True)
    for module in (model, *outside):
        generate: Any = getattr(module, "generate", None) if hasattr(type(module), "generate") else None
        if generate is not None:
            module.generate = calls.wrap_generate(module, generate)  # type: ignore[assignment]
        if hasattr(type(module), "resize_token_embeddings"):
            module.resize_token_embeddings = _refuse_resize  # type: ignore[assignment]


def _modules_outside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a module that are in no unit inside it, and these units. A shared module may come twice."""
    for child in module.children():
        yield child
        if not isinstance(child, (FullyShardedDataParallel, FSDPModule)):
            yield from _modules_outside(child)


def _forward_of_call(unit: Any) -> Callable[..., Any]:
    """Return the forward of a unit of FSDP2 that calls the unit if a script calls ``unit.forward(x)``, as FSDP1 does.

    The hooks of FSDP2, which gather the parameters, would not run.
    """
    forward = unit.forward

    @functools.wraps(forward)
    def forward_of_call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not fsdp2.is_outside_of_call(unit):
            return forward(*args, **kwargs)
        return unit(*args, **kwargs)

    setattr(forward_of_call, CALLS_FORWARD, True)
    return forward_of_call


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    message = "resize_token_embeddings was called on a sharded model, whose embeddings are shards."
    fix = "Call it before prepare(), or before the Trainer is created."
    raise SpecError([Problem(code="FSDP-E610", message=message, fix=fix)])


def gathers_root_itself(method: Any) -> bool:
    """Return whether a method of a sharded model waits for all ranks and gathers the root itself."""
    return getattr(method, _GATHERS, False)


def free_before_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Free what is still gathered before each step of an optimizer of a sharded model.

    A forward with gradients whose backward has not run leaves the root gathered. The next forward would use this copy
    instead of the updated shards.

    Of offloaded shards, FSDP waits for the copies to the device at the end of a backward only. Those of another forward
    after it may still run, and the step would change what they read.
    """
    calls = find_part(model, _Calls)
    if calls is not None:

        def before_step(*_: Any) -> None:
            check_not_whole(model, "the optimizer was stepped")
            if calls.free():
                wait_for_reads(local_tensor(parameter) for parameter in model.parameters())

        calls.num_per_step = min(calls.num_per_step, 1)
        optimizer.register_step_pre_hook(before_step)


def free_gathered(model: nn.Module) -> None:
    """Free every gathered parameter of a sharded model, so that ``model.parameters()`` are the shards.

    A unit without reshard after forward stays gathered after an evaluation, which has no backward. An optimizer that is
    created then would update the gathered copies. A backward that has failed also leaves units gathered.
    """
    calls = find_part(model, _Calls)
    if calls is not None:
        calls.discard_failed_backward()
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


@dataclass
class Access:
    """How a sharded model is used: whether it is in a block of ``full_parameters``."""

    has_whole_parameters: bool = False


def check_not_whole(root: nn.Module, doing: str) -> None:
    """Raise ``SpecError`` if a sharded model is in a block of ``full_parameters``, where its shards are not in use."""
    if (access := find_part(root, Access)) is not None and access.has_whole_parameters:
        raise misuse_error(f"{doing} inside of a block of full_parameters", "Do it after the block.")


def misuse_error(what: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E308", message=f"{what}.", fix=fix)])


class _Calls:
    """Hooks for one root and its modules. Those of a module run the root's own hooks, if the root is not running.

    Only the outermost call enters the root's forward. The root is not idle during it, so modules inside it do nothing.

    Gathered parameters: FSDP keeps those of the root, and of units without reshard after forward, until the next
    backward. If none follows, they would take memory, and the next forward would use them although the script has
    changed the shards: optimizers that evaluate with other weights do so, averages, TRL's ``sync_ref_model``. So a call
    without a backward frees what it has gathered itself. What it has found gathered belongs to a graph whose backward
    will come, or to an accumulation of gradients.

    Between the last backward of a step and the step, ``parameters()`` have to be the shards, which have the gradients.
    So another forward with gradients frees what it has gathered, too. A backward that follows gathers it again.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._fsdp = forwards.private_api(root)
        self._units = _units_of(root)
        self._entered: nn.Module | None = None
        self._keeps_gathered = False
        self._is_read = False
        """Whether a call without a backward has read the shards since the last step."""
        self._found_gathered: list[nn.Module] = []
        self._changes: dict[int, tuple[int, int]] = {}
        """Id of a unit that stays gathered -> how often its shards and its gathered copies were changed."""
        self._first_calls = FirstCalls()
        self._num_reduced = 0
        """Number of backwards up to the last step whose gradients were reduced."""
        self.num_per_step: float = math.inf
        """Number of such backwards before each step; infinite if no steps are observed."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter the root's forward, unless the root is running. A forward pre-hook."""
        if torch.compiler.is_compiling():
            return None
        self.discard_failed_backward()
        if not self._is_idle():
            # `generate` has entered it, and FSDP moves inputs only then. Transformers prepares the inputs of a forward
            # on the device of the shards, which may be offloaded.
            return self._on_device((args, kwargs)) if self._keeps_gathered and self._entered is None else None
        self._entered = module
        self._free_outdated()
        return None if module is self._root else self._enter(module, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Leave the root's forward if this module has entered it. A forward hook."""
        if self._entered is not module:
            return None
        self._entered = None
        if output is None and sys.exc_info()[0] is not None and self._fsdp.discard_call(self._root, backward=False):
            return None  # the call has failed
        if module is not self._root:
            output = self._fsdp.after_forward(self._root, module, args, output)
            forwards.watch_mappings(self._root, output)
        if not self._keeps_gathered:
            gathered = [unit for unit in self._units if self._fsdp.is_gathered(unit)]
            has_graph = torch.is_grad_enabled() and any(each.requires_grad for each in forwards.float_outputs(output))
            if has_graph and not self._has_gradients_of_step():
                self._changes = {id(unit): self._fsdp.num_unit_changes(unit) for unit in gathered}
            else:
                self._is_read = True
                _free(unit for unit in gathered if unit not in self._found_gathered)
        return output

    def _has_gradients_of_step(self) -> bool:
        """Whether there were as many reduced backwards since the last step of the optimizer as before that step."""
        return num_reduced_backwards(self._root) - self._num_reduced >= self.num_per_step

    def free(self) -> bool:
        """Free everything. Return whether a call without a backward has read the shards since the last time."""
        gathered = [unit for unit in self._units if self._fsdp.is_gathered(unit)]
        was_read, self._is_read = self._is_read or bool(gathered), False
        if (num_reduced := num_reduced_backwards(self._root)) > self._num_reduced:
            self.num_per_step, self._num_reduced = num_reduced - self._num_reduced, num_reduced
        _free(gathered)
        return was_read

    def discard_failed_backward(self) -> None:
        """Let the next forward be a first one after a backward that has raised an error, which the script has caught.

        Otherwise FSDP would not reduce gradients from now on, or would compute with freed parameters.
        """
        if not self._fsdp.backward_has_failed(self._root):
            return
        if not self._fsdp.discard_call(self._root, backward=True):
            message = "the model is called again after an error in its backward, such as torch.OutOfMemoryError. "
            message += f"FSDP of torch {torch.__version__} would not reduce gradients any more."
            fix = "Use torch 2.13 or newer, or start the script again, with a smaller batch size."
            raise SpecError([Problem(code="FSDP-E318", message=message, fix=fix)])
        discard_backward(self._root)

    @contextmanager
    def no_sync(self, original: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """FSDP1's ``no_sync``, which refuses a model whose backward has failed."""
        self.discard_failed_backward()
        with original():
            yield

    def _free_outdated(self) -> None:
        """Find what earlier calls have left gathered, and free it if the script has changed the shards since."""
        self._found_gathered = []
        for unit in self._units:
            if self._fsdp.is_gathered(unit):
                now = self._fsdp.num_unit_changes(unit)
                shards, copies = self._changes.get(id(unit), now)
                if copies != now[1]:
                    message = f"a script changed weights of {type(unwrapped(unit)).__name__} in place after a forward "
                    message += "with gradients without its backward. It changed gathered copies, not the shards."
                    fix = "Run forwards that no backward follows under torch.no_grad(), or call backward before the "
                    fix += "change, or change the weights in hfp.full_parameters(model, modify=True)."
                    raise SpecError([Problem(code="FSDP-E317", message=message, fix=fix)])
                if shards != now[0]:
                    _free([unit])
                else:
                    self._found_gathered.append(unit)

    def wrap_generate(self, module: nn.Module, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``generate`` that gathers the root before the first token, and frees everything at the end."""

        @functools.wraps(generate)
        def gathered(*args: Any, **kwargs: Any) -> Any:
            if self._keeps_gathered or not self._is_idle():
                return generate(*args, **kwargs)
            self._first_calls.wait(f"generate of {type(unwrapped(module)).__name__.removeprefix('FSDP')}", fix=_FIX)
            self._keeps_gathered = True
            try:
                self._free_outdated()
                with torch.no_grad():
                    # It may read the root's own parameters before it calls a module. FSDP2's root leaves its forward
                    # after the first token, and enters it again for each further token.
                    args, kwargs = self._enter_with_tensors(module, args, kwargs)
                return generate(*args, **kwargs)
            finally:
                self._keeps_gathered = False
                self._is_read = True
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

    def _on_device(self, inputs: Any) -> Any:
        """Return inputs with the tensors in plain containers on the device of the forward."""
        if isinstance(inputs, torch.Tensor):
            return inputs.to(self._fsdp.compute_device(self._root))
        if type(inputs) is tuple:
            return tuple(map(self._on_device, inputs))
        return {k: self._on_device(v) for k, v in inputs.items()} if type(inputs) is dict else inputs

    def _is_idle(self) -> bool:
        """Whether the root is neither in a forward nor in a backward."""
        return bool(self._fsdp.is_idle(self._root))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._fsdp.before_forward(self._root, module, *forwards.cast_inputs(self._root, args, kwargs))


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
        args, kwargs = forwards.cast_activations((args, kwargs), unit.mixed_precision.param_dtype)
        return cast_floats(forward(*args, **kwargs), fsdp1.original_dtype(root))

    return forward_if_sharded


def check_parameter_hooks(model: nn.Module) -> None:
    """Raise ``SpecError`` if a parameter has a hook for its gradient.

    FSDP computes with views of a flat parameter, or with gathered copies, so torch would call no hook of a parameter.
    """
    found = [
        name
        for name, parameter in named_parameters(model)
        if parameter.requires_grad and (gradient_hooks(parameter) or runs_after_accumulation(parameter))
    ]
    if found:
        message = f"{format_names(found, 3)} has a hook (register_hook, register_post_accumulate_grad_hook), "
        message += "which torch would not call: FSDP computes with copies, and accumulates the gradients of shards."
        fix = "Change parameter.grad of model.parameters() after prepare(), between the backward and the step."
        raise SpecError([Problem(code="FSDP-E307", message=message, fix=fix)])


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of elements of the parameters of a model, before it was sharded."""

    total: int
    trainable: int


def keep_counts(model: nn.Module) -> ParameterCounts:
    """Let the methods of a model that is not sharded yet always return what they count now. Return the counts."""
    for module in model.modules():
        if hasattr(type(module), "num_parameters"):  # Transformers
            own: Any = module.num_parameters
            kinds = [(only_trained, others) for only_trained in (False, True) for others in (False, True)]
            module.num_parameters = partial(_known_count, {each: own(*each) for each in kinds})  # type: ignore
        if hasattr(type(module), "get_nb_trainable_parameters"):  # PEFT
            counts: Any = module.get_nb_trainable_parameters
            module.get_nb_trainable_parameters = partial(tuple, counts())  # type: ignore[assignment]
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained))


def _known_count(
    counts: Mapping[tuple[bool, bool], int], only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    return counts[only_trainable, exclude_embeddings]


def warn_of_read_shards(model: nn.Module) -> None:
    """Warn once if a loss reads a shard. FSDP1 only."""
    if not isinstance(model, FullyShardedDataParallel):
        return
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


def refuse_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy`` of a sharded model, and of its modules with sharded parameters, raise ``SpecError``.

    A copy would have one rank's shards, and no units. ``torch.optim.swa_utils.AveragedModel`` copies the model, too.
    """
    for module in model.modules():
        parameters: list[Any] = [parameter for _, _, parameter in registrations(module.modules())]
        if any(isinstance(each, DTensor) or fsdp1.is_flattened(each) for each in parameters):
            # Copying looks for this method on the object. fully_shard has set another one on its classes.
            module.__deepcopy__ = partial(_refuse_copy, type(unwrapped(module)).__name__)  # type: ignore[assignment]


def _refuse_copy(name: str, memo: Any) -> NoReturn:
    message = f"copy.deepcopy was called with a {name} that FSDP has sharded, or with an object that contains it."
    fix = "For an average of the weights (AveragedModel), average the shards: model.parameters() after prepare(). For "
    fix += "a snapshot, call accelerator.get_state_dict(model) on all ranks. Copy a second model before prepare()."
    raise SpecError([Problem(code="FSDP-E310", message=message, fix=fix)])
