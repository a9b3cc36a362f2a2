"""Shard one model and its optimizers as planned: the interface of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_plugin.backends.optimizers.parameters import attach_optimizers, detach_optimizers, has_stepped
from hf_fsdp_plugin.backends.sharding.forward_hooks import (
    refuse_double_backward,
    return_changed_inputs,
    support_mapping_outputs,
    watch_buffers,
)
from hf_fsdp_plugin.backends.sharding.fsdp1 import apply_fsdp1
from hf_fsdp_plugin.backends.sharding.fsdp2 import adopt_fsdp2, apply_fsdp2
from hf_fsdp_plugin.backends.sharding.module_forwards import apply_autocast, compute_in_fp32
from hf_fsdp_plugin.backends.sharding.parameter_access import (
    carry_parameter_hooks,
    correct_flat_reads,
    find_parameter_hooks,
    refuse_copies,
)
from hf_fsdp_plugin.backends.sharding.submodule_calls import free_gathered, support_submodule_calls
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.modules import is_fsdp_managed, mark_fsdp_managed

PLAN_ATTRIBUTE = "_hf_fsdp_plan"
"""Attribute of a sharded model that contains its plan."""
_sharded_models: Final[WeakSet[nn.Module]] = WeakSet()
"""The sharded models that are alive. A submodule, or the module in FSDP1's root, has no reference to its model."""
_sharded_optimizers: Final[WeakSet[torch.optim.Optimizer]] = WeakSet()
"""The optimizers of sharded models that are alive."""


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
    plan: FsdpPlan, model: nn.Module, device: torch.device, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> nn.Module:
    """Shard ``model`` in place as planned. Collective.

    Args:
        optimizers: optimizers with parameters of the model, which are replaced by the sharded ones.

    Returns:
        The sharded model: under FSDP1 a new root module.
    """
    if plan.sharded_at_load:
        detached = detach_optimizers([optimizer for optimizer in optimizers if not has_stepped(optimizer)], model)
    else:
        detached = [] if plan.pre_sharded else detach_optimizers(optimizers, model)
    parameter_hooks = find_parameter_hooks(model)
    if not plan.pre_sharded:
        apply_autocast(plan, model)
    compute_in_fp32(plan, model)
    if plan.sharded_at_load:
        sharded = adopt_fsdp2(plan, model, device)
    elif plan.pre_sharded:
        sharded = model
    elif plan.backend == "fsdp2":
        sharded = apply_fsdp2(plan, model, device)
    else:
        sharded = apply_fsdp1(plan, model, device)
    _keep_class_names(sharded)
    watch_buffers(sharded)
    mark_fsdp_managed(sharded)
    support_submodule_calls(sharded)
    support_mapping_outputs(sharded)
    return_changed_inputs(sharded)
    carry_parameter_hooks(sharded, parameter_hooks)
    refuse_copies(sharded)
    correct_flat_reads(sharded)
    refuse_double_backward(sharded)
    attach_optimizers(detached, sharded)
    setattr(sharded, PLAN_ATTRIBUTE, plan)
    _sharded_models.add(sharded)
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


def rebind(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Replace gathered FSDP2 parameters by their shards in optimizers that were created after an evaluation.

    FSDP1 is not affected: its gathered and sharded parameters are the same objects.
    """
    plan = plan_of(model)
    if plan is not None and plan.backend == "fsdp2":
        reshard_and_rebind(model, optimizers)


def reshard_and_rebind(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Free the gathered parameters of FSDP2 units, and replace them by their shards in optimizers without state."""
    detached = detach_optimizers([optimizer for optimizer in optimizers if not has_stepped(optimizer)], model)
    free_gathered(model)
    attach_optimizers(detached, model)


def plan_of(model: nn.Module) -> FsdpPlan | None:
    """Return the plan of a sharded model; ``None`` for any other model."""
    return getattr(model, PLAN_ATTRIBUTE, None)


def has_sharded_models() -> bool:
    return bool(_sharded_models)


def sharded_models() -> list[nn.Module]:
    """Return the sharded models that are alive."""
    return list(_sharded_models)


def remember_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Add optimizers of sharded models to :func:`sharded_optimizers`."""
    _sharded_optimizers.update(optimizers)


def sharded_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of sharded models that are alive."""
    return list(_sharded_optimizers)


def locate_module(module: nn.Module) -> ModuleLocation | None:
    """Return where a sharded model, or a module in one, is; ``None`` for any other module."""
    plan = plan_of(module)
    if plan is not None:
        return ModuleLocation(module, plan, "")
    if not is_fsdp_managed(module):
        return None
    for root in sharded_models():
        for name, other in root.named_modules():
            if other is module and (plan := plan_of(root)) is not None:
                return ModuleLocation(root, plan, canonical_name(name))
    return None
