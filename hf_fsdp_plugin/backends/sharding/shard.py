"""Shard one model and its optimizers as planned, find modules in sharded models, and read whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.loading.weight_loader import WeightLoader
from hf_fsdp_plugin.backends.optimizers.parameters import attach_optimizers, detach_optimizers, has_stepped
from hf_fsdp_plugin.backends.ranks.agreement import collective_call, on_all_ranks
from hf_fsdp_plugin.backends.sharding import activation_checkpointing, buffers, forwards, script_access
from hf_fsdp_plugin.backends.sharding.fsdp1 import apply_fsdp1
from hf_fsdp_plugin.backends.sharding.fsdp2 import adopt_fsdp2, apply_fsdp2
from hf_fsdp_plugin.backends.sharding.state_dicts import support_state_dicts
from hf_fsdp_plugin.backends.sharding.unused_parameters import watch_unused_parameters
from hf_fsdp_plugin.backends.torch_types import shard_like, wait_for_reads
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name, named_parameters, unwrapped
from hf_fsdp_plugin.plan.units import sharded_backend
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import find_part, own_parts, parts_of, process
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import num_changes
from hf_fsdp_plugin.torch_private.modules import (
    entries_in_block,
    is_fsdp_managed,
    local_tensor,
    mark_fsdp_managed,
    registrations,
)


class _ShardedModels(WeakSet[nn.Module]):
    """The sharded models that are alive. A submodule, or the module in FSDP1's root, has no reference to its model."""


class _ShardedOptimizers(WeakSet[Optimizer]):
    """The optimizers of sharded models that are alive."""


sharded_models = process.owns(_ShardedModels, kept=True)
"""Return the sharded models of this process, which ``uninstall()`` leaves sharded."""
sharded_optimizers = process.owns(_ShardedOptimizers, kept=True)
"""Return their optimizers."""


@dataclass(frozen=True, slots=True)
class ModuleLocation:
    """Where a module is in a sharded model.

    Attributes:
        root: the sharded model; under FSDP1 its outermost wrapper.
        name: canonical name of the module in ``root``; empty for the whole model.
    """

    root: nn.Module
    plan: FsdpPlan
    name: str

    @property
    def prefix(self) -> str:
        """The prefix of the names of the module's parameters in ``root``."""
        return f"{self.name}." if self.name else ""


def shard(
    plan: FsdpPlan,
    model: nn.Module,
    device: torch.device,
    optimizers: Iterable[Optimizer] = (),
    compile_unit: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Shard ``model`` in place as planned. Collective.

    Args:
        optimizers: optimizers with parameters of the model, which are replaced by the sharded ones.
        compile_unit: compiles a unit of the wrap policy in place, before FSDP's hooks are added around it. Units of a
            model that is sharded already are not compiled.

    Returns:
        The sharded model: under FSDP1 a new root module.
    """
    if plan.sharded_at_load:
        optimizers = [optimizer for optimizer in optimizers if not has_stepped(optimizer)]
    elif plan.pre_sharded:
        optimizers = []
    detached = detach_optimizers(optimizers, model)
    counts = script_access.keep_counts(model)
    if not plan.pre_sharded:
        forwards.apply_autocast(plan, model)
    for module, forward in forwards.fp32_forwards(plan, model):
        module.forward = forward
    if plan.sharded_at_load:
        sharded = adopt_fsdp2(plan, model, device)
        activation_checkpointing.apply_activation_checkpointing(plan, sharded)
    elif plan.pre_sharded:
        sharded = model
    else:
        loader = WeightLoader(plan, model, device)
        activation_checkpointing.apply_activation_checkpointing(plan, model, compile_unit)
        loader.prepare_buffers()
        apply = apply_fsdp2 if plan.backend == "fsdp2" else apply_fsdp1
        sharded = apply(plan, model, device, loader)
        own_parts(sharded).put(loader.record)
    _keep_class_names(sharded)
    buffers.watch_buffers(sharded)
    mark_fsdp_managed(sharded)
    script_access.support_submodule_calls(sharded)
    forwards.support_mapping_outputs(sharded)
    forwards.return_changed_inputs(sharded)
    script_access.refuse_copies(sharded)
    support_state_dicts(plan, sharded)
    script_access.warn_of_read_shards(sharded)
    forwards.refuse_double_backward(sharded)
    watch_unused_parameters(sharded)
    attach_optimizers(detached, sharded)
    own_parts(sharded).put(plan)
    own_parts(sharded).put(counts)
    sharded_models().add(sharded)
    return sharded


def _keep_class_names(model: nn.Module) -> None:
    """Give the classes that ``fully_shard`` has created in a model the names and modules of the original classes.

    ``fully_shard`` replaces the class of a module by a new subclass, ``FSDPGPTNeoXForCausalLM`` in a module of torch.
    Other libraries find by these names what they write: Transformers the stored names of the weights and the files of
    custom code, diffusers ``_class_name``, sentence-transformers ``modules.json``.

    torch itself finds them by the class objects. ``_get_name`` returns the original name, too: by it the Trainer
    decides whether it shifts the labels that it smooths.
    """
    for created in {type(module) for module in model.modules() if isinstance(module, FSDPModule)}:
        original = next(base for base in created.__bases__ if base is not FSDPModule)
        # `torch.compile` has its own rules for the classes of torch, and these are in no file.
        if original.__module__.startswith("torch.") or created.__module__ == original.__module__:
            continue
        created.__name__, created.__qualname__ = original.__name__, original.__qualname__
        created.__module__ = original.__module__


def create_with_original_shapes(model: nn.Module, create: Callable[[], Optimizer]) -> None:
    """Call ``create`` with parameters of the original shapes, and give the optimizer that it returns FSDP1's pieces.

    All pieces of FSDP1 have one dimension, so that groups by the number of dimensions would be wrong. The parameters in
    the call have the memory of one element. Flat parameters without their original ones are left unchanged.
    """
    units = fsdp1.flat_units(model) if isinstance(model, FSDP) else []
    if units:
        script_access.free_gathered(model)
    whole: dict[int, nn.Parameter] = {}
    for _, flat in units:
        for member in fsdp1.original_parameters(flat):
            if (piece := member.parameter) is not None:
                value = torch.empty((), dtype=piece.dtype, device=piece.device).expand(member.shape)
                whole[id(piece)] = nn.Parameter(value, requires_grad=piece.requires_grad)
        for (module, attribute), (first, name) in fsdp1.tied_places(flat):
            if (found := whole.get(id(getattr(first, name, None)))) is not None:
                whole[id(getattr(module, attribute))] = found
    with ExitStack() as stack:
        for registered, attribute, piece in registrations(model.modules()):
            if id(piece) in whole:
                stack.enter_context(entries_in_block({attribute: whole[id(piece)]}, registered))
        optimizer = create()
        detached = detach_optimizers([optimizer], model) if whole else []
    attach_optimizers(detached, model)


def rebind_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Free the gathered parameters of FSDP2 units, and replace them by their shards in optimizers without state.

    After a forward, units that are not freed have gathered parameters, which an optimizer gets that is created then.
    FSDP1 is not affected: its gathered and sharded parameters are the same objects.
    """
    if sharded_backend(model) == "fsdp2":
        detached = detach_optimizers([optimizer for optimizer in optimizers if not has_stepped(optimizer)], model)
        script_access.free_gathered(model)
        attach_optimizers(detached, model)


def plan_of(model: nn.Module) -> FsdpPlan | None:
    """Return the plan of a sharded model; ``None`` for any other model."""
    return find_part(model, FsdpPlan)


def locate_module(module: nn.Module) -> ModuleLocation | None:
    """Return where a sharded model, or a module in one, is; ``None`` for any other module."""
    plan = plan_of(module)
    if plan is not None:
        return ModuleLocation(module, plan, "")
    if not is_fsdp_managed(module):
        return None
    named = ((root, name, other) for root in sharded_models() for name, other in root.named_modules())
    root, name = next(((root, name) for root, name, other in named if other is module), (module, ""))
    plan = plan_of(root)
    return ModuleLocation(root, plan, canonical_name(name)) if plan is not None else None


@contextmanager
def full_parameters(module: nn.Module, modify: bool = False) -> Iterator[dict[str, nn.Parameter]]:
    """Let a prepared model, or a module of it, have its whole parameters in the block. Collective.

    In the block, ``module.weight`` and ``module.parameters()`` are whole tensors in the dtype of the shards, under both
    FSDP versions. The block runs under ``torch.no_grad()``. Each rank holds all parameters of ``module`` in the
    block: pass a module of the model, such as ``model.get_input_embeddings()``, to limit the memory. FSDP1 gathers the
    whole units that contain the module's parameters.

    Gradients and optimizers are not affected; an optimizer continues from the changed values. The model can neither be
    called nor saved in the block. A model that is not sharded has whole parameters already, and is left unchanged.

    Args:
        module: a model that ``accelerator.prepare`` or the Trainer has prepared, or a module of it.
        modify: write rank 0's values to the shards of all ranks at the end of the block. So the ranks may change them
            differently, or only rank 0. If the block raises, nothing is written.

    Yields:
        The whole parameters, by their names in ``module`` without FSDP.

    Raises:
        SpecError: parameters were changed without ``modify``; the model is in a forward, a backward or another such
            block; it is sharded, but not by this package; or some ranks do not make the call.
    """
    place = locate_module(module)
    if place is None:
        check_not_sharded(module)
        with torch.no_grad():
            yield dict(named_parameters(module))
        return
    root = place.root
    with collective_call(f"full_parameters of {type(unwrapped(module)).__name__}"), torch.no_grad():
        check_idle(root, "full_parameters")
        script_access.free_gathered(root)
        with _whole_fsdp1(root, module) if isinstance(root, FSDP) else _whole_fsdp2(module) as write:
            parameters = dict(named_parameters(module))
            with on_all_ranks("running the block of full_parameters"), _in_block(root, module):
                before = {name: num_changes(parameter) for name, parameter in parameters.items()}
                yield parameters
                changed = [name for name, parameter in parameters.items() if num_changes(parameter) != before[name]]
                if changed and not modify:
                    what = f"{format_names(changed, 3)} was changed in a block of full_parameters, which does not keep"
                    raise script_access.misuse_error(f"{what} changes", "Call full_parameters(module, modify=True).")
            if modify:
                for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
                    dist.broadcast(parameter.data, 0)
                write()


def has_shards(model: nn.Module) -> bool:
    """Return whether a module has parameters that FSDP shards, by a plan or not."""
    return any(isinstance(each, (FSDP, DTensor)) for each in (*model.modules(), *model.parameters()))


def check_idle(root: nn.Module, function: str) -> None:
    """Raise ``SpecError`` if a sharded model is in a forward, a backward or a block of ``full_parameters``."""
    script_access.check_not_whole(root, f"{function} was called")
    if isinstance(root, (FSDP, FSDPModule)) and not forwards.private_api(root).is_idle(root):
        raise script_access.misuse_error(
            f"{function} was called while the model is in a forward or a backward",
            "Call it between steps, for example in `on_step_end` of a callback.",
        )


def check_not_sharded(module: nn.Module) -> None:
    """Raise ``SpecError`` for a model that is sharded without a plan."""
    if has_shards(module):
        message = f"{type(module).__name__} is sharded, but was not prepared by an Accelerator or a Trainer."
        fix = "Pass the model to accelerator.prepare(), after hfp.install()."
        raise SpecError([Problem(code="FSDP-E309", message=message, fix=fix)])


@contextmanager
def _in_block(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Refuse what would use the shards, or gather them again, in the block."""
    modules = {id(inner): inner for inner in (root, *module.modules())}

    def before_forward(*_: Any) -> None:
        script_access.check_not_whole(root, "the model was called")

    hooks = [inner.register_forward_pre_hook(before_forward, prepend=True) for inner in modules.values()]
    access = parts_of(root).get(script_access.Access)
    access.has_whole_parameters = True
    try:
        yield
    finally:
        access.has_whole_parameters = False
        for hook in hooks:
            hook.remove()


@contextmanager
def _whole_fsdp1(root: FSDP, module: nn.Module) -> Iterator[Callable[[], None]]:
    """Let the FSDP1 units that contain a parameter of a module have whole parameters in the block. Collective.

    Yields:
        A function that copies this rank's part of the whole parameters to its shards.
    """
    root.check_is_root()  # otherwise a unit that is gathered before the first forward takes itself for the root
    wanted = {id(inner) for inner in module.modules()}
    units = [(unit, flat) for unit, flat in fsdp1.flat_units(root) if wanted & _owners(flat)]

    def write() -> None:
        wait_for_reads(fsdp1.local_shard(flat) for _, flat in units)
        for _, flat in units:
            shard = fsdp1.local_shard(flat)
            for member in fsdp1.original_parameters(flat):
                whole = getattr(member.module, member.attribute).detach().reshape(-1)
                own = whole[member.start : member.stop]
                shard.narrow(0, member.offset, own.numel()).copy_(own)

    with ExitStack() as stack:
        for unit, _ in units:
            stack.enter_context(FSDP.summon_full_params(unit, recurse=False, writeback=False))
        yield write


def _owners(flat: Any) -> set[int]:
    """Return the ids of the modules in which the parameters of a flat parameter are registered."""
    tied = (other for other, _ in fsdp1.tied_places(flat))
    return {id(member.module) for member in fsdp1.original_parameters(flat)} | {id(module) for module, _ in tied}


@contextmanager
def _whole_fsdp2(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Let a module have whole parameters in the block, which are gathered one by one. Collective.

    Yields:
        A function that copies this rank's part of the whole parameters to its shards.
    """
    places = [place for place in registrations(module.modules()) if isinstance(place[2], DTensor)]
    shards = {id(shard): shard for _, _, shard in places}  # a tied parameter is one object
    wholes = {
        key: nn.Parameter(shard.full_tensor(), requires_grad=shard.requires_grad) for key, shard in shards.items()
    }

    def write() -> None:
        wait_for_reads(local_tensor(shard) for shard in shards.values())
        for key, shard in shards.items():
            local_tensor(shard).copy_(shard_like(shard, wholes[key].data).to_local())

    with ExitStack() as stack:
        for registered, name, shard in places:
            stack.enter_context(entries_in_block({name: wholes[id(shard)]}, registered))
        yield write
