"""One model and its optimizers, sharded as planned: the way through this room."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_fsdp_plugin.backends.fsdp1 import apply_fsdp1
from hf_fsdp_plugin.backends.fsdp2 import apply_fsdp2, reshard
from hf_fsdp_plugin.backends.optimizer import attach_optimizers, detach_optimizers
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.modules import mark_fsdp_managed

# Where the plan hangs on a model that was sharded by it; read by the report and by a second ``prepare``.
PLAN_ATTRIBUTE = "_hf_fsdp_plan"


def shard(
    plan: FsdpPlan, model: nn.Module, device: torch.device, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> nn.Module:
    """Shard ``model`` in place as planned and return what takes its place (under FSDP1 a new root module).

    Optimizers that hold the model's parameters are given the sharded ones. Collective: all ranks of the process group
    enter.
    """
    optimizers = list(optimizers)
    detached = [] if plan.pre_sharded else detach_optimizers(optimizers, model)
    if plan.pre_sharded:
        sharded = model
    elif plan.backend == "fsdp2":
        sharded = apply_fsdp2(plan, model, device)
    else:
        sharded = apply_fsdp1(plan, model, device)
    mark_fsdp_managed(sharded)
    attach_optimizers(detached, sharded)
    setattr(sharded, PLAN_ATTRIBUTE, plan)
    return sharded


def rebind(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Give optimizers that were made from a model with gathered parameters its shards; FSDP1 keeps one set of them."""
    plan = plan_of(model)
    if plan is None or plan.backend != "fsdp2":
        return
    detached = detach_optimizers([optimizer for optimizer in optimizers if not optimizer.state], model)
    reshard(model)
    attach_optimizers(detached, model)


def plan_of(model: nn.Module) -> FsdpPlan | None:
    """The plan by which a model was sharded; ``None`` for any other model."""
    return getattr(model, PLAN_ATTRIBUTE, None)
