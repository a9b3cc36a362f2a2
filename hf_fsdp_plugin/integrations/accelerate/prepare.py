"""``accelerator.prepare`` under a planned FSDP: each model planned, sharded, and its optimizers pointed at the
shards.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks, same_on_all_ranks
from hf_fsdp_plugin.backends.optimizer import foreign_parameters
from hf_fsdp_plugin.backends.shard import plan_of, rebind, shard
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin
from hf_fsdp_plugin.integrations.messages import tell_warnings
from hf_fsdp_plugin.integrations.run_report import begin
from hf_fsdp_plugin.integrations.saving import prepare_memory_after_first_step
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.modules import compile_call, compiled_module

logger = logging.getLogger(__name__)


def planned_plugin(accelerator: Any) -> PlannedFsdpPlugin | None:
    """The accelerator's plugin if it is ours; ``None`` leaves the accelerator to itself."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, PlannedFsdpPlugin) else None


def prepare_objects(accelerator: Any, objects: Sequence[Any]) -> Any:
    """What ``Accelerator.prepare`` promises, for any number of models and optimizers, together or one after the other.

    A model without an optimizer is welcome (an evaluation before training, a frozen teacher); Accelerate refuses it
    under FSDP2. Raises ``SpecError``, on all ranks, where a plan cannot be made or an optimizer's parameters are not
    the models'.
    """
    prepared: list[Any] = [
        obj if isinstance(obj, nn.Module) else accelerator._prepare_one(obj, first_pass=True) for obj in objects
    ]
    # Accelerate's second pass is for the schedulers, which need their optimizers to be prepared.
    prepared = [obj if isinstance(obj, nn.Module) else accelerator._prepare_one(obj) for obj in prepared]
    optimizers: list[torch.optim.Optimizer] = [obj.optimizer for obj in accelerator._optimizers]
    prepared = [prepare_model(accelerator, obj, optimizers) if isinstance(obj, nn.Module) else obj for obj in prepared]
    for model in accelerator._models:
        rebind(model, optimizers)
    with on_all_ranks("checking the optimizers"):
        _check_optimizers([obj.optimizer for obj in prepared if hasattr(obj, "optimizer")], accelerator._models)
    begin(accelerator)
    plugin = planned_plugin(accelerator)
    with_optimizer = any(hasattr(obj, "optimizer") for obj in prepared)
    if plugin is not None and plugin.spec.checkpoint.asynchronous and with_optimizer:
        prepare_memory_after_first_step(accelerator, plugin.state_dict_kind)
    for obj in prepared:
        if any(
            obj is known for known in (*accelerator._dataloaders, *accelerator._optimizers, *accelerator._schedulers)
        ):
            obj._is_accelerate_prepared = True
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def prepare_model(accelerator: Any, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> nn.Module:
    """Plan and shard one model. A model that was prepared before is returned as it is. Collective."""
    if getattr(model, "_is_accelerate_prepared", False):
        if not any(model is known for known in accelerator._models):
            accelerator._models.append(model)
        return model
    plugin = planned_plugin(accelerator)
    assert plugin is not None, "prepare_model is for accelerators with a planned plugin"
    compiled, model = _without_compilation(model)
    with on_all_ranks("planning"):
        plan = make_plan(accelerator, plugin, model)
    same_on_all_ranks("the plan", json.dumps(plan.to_json(), sort_keys=True))
    tell_warnings(plan.problems)
    if accelerator.is_main_process:
        logger.info("%s", plan)
    _compile_units(accelerator, plan, model)
    sharded = shard(plan, model, accelerator.device, optimizers)
    if compiled is not None:
        # FSDP's hooks sit on the module, and torch.compile breaks its graphs at them: compiled again from outside.
        compile_call(sharded, compiled)
    sharded._is_accelerate_prepared = True  # type: ignore[assignment]
    accelerator._models.append(sharded)
    return sharded


def make_plan(accelerator: Any, plugin: PlannedFsdpPlugin, model: nn.Module) -> FsdpPlan:
    """The plan for ``model`` in this accelerator's world. Raises ``SpecError`` with all problems at once."""
    if accelerator.verify_device_map(model):
        raise SpecError([_device_map(model)])
    return resolve(
        plugin.spec,
        model,
        world_size=accelerator.num_processes,
        device_type=accelerator.device.type,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)),
    )


def _compile_units(accelerator: Any, plan: FsdpPlan, model: nn.Module) -> None:
    """``dynamo_backend`` other than ``no``: the layers are compiled one by one, in place, before they are sharded.

    A layer is compiled once for all its copies, and no graph has to break at an FSDP hook inside it.
    """
    dynamo = accelerator.state.dynamo_plugin
    if dynamo is None or dynamo.backend.value.lower() == "no" or plan.pre_sharded:
        return
    kwargs = {key: value for key, value in dynamo.to_kwargs().items() if key != "use_regional_compilation"}
    for unit in plan.units:
        if unit.from_policy:
            for name in unit.modules:
                model.get_submodule(name).compile(**kwargs)


def _without_compilation(model: nn.Module) -> tuple[Callable[..., Any] | None, nn.Module]:
    """The module inside a ``torch.compile`` wrapper, and the compiler as its author set it up."""
    inner = compiled_module(model)
    if inner is None:
        return None, model
    return model.dynamo_ctx, inner  # type: ignore[return-value]


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module]) -> None:
    """The loss that does not move: an optimizer of parameters that the sharded model no longer has."""
    if not any(plan_of(model) for model in models):
        return
    problems = [
        Problem(
            severity="error",
            message=f"{foreign} parameters of {type(optimizer).__name__} belong to no prepared model; it would train "
            "copies that the model does not use.",
            fix="Pass model and optimizer to prepare() together, or make the optimizer after preparing the model.",
        )
        for optimizer in optimizers
        if (foreign := foreign_parameters(optimizer, models))
    ]
    if problems:
        raise SpecError(problems)


def _device_map(model: nn.Module) -> Problem:
    return Problem(
        severity="error",
        message=f"{type(model).__name__} was loaded with a device_map over several devices.",
        fix="Load it without device_map: FSDP places the model itself.",
    )
