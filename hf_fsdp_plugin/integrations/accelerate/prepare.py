"""``Accelerator.prepare`` for a planned plugin: plans and shards each model, and updates its optimizers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.loading.deferred_weights import check_can_fill
from hf_fsdp_plugin.backends.loading.equal_weights import check_same_weights
from hf_fsdp_plugin.backends.optimizers.known_optimizers import apply_step_mode
from hf_fsdp_plugin.backends.optimizers.parameters import check_groups, foreign_parameters, has_parameters_of
from hf_fsdp_plugin.backends.ranks import agreement
from hf_fsdp_plugin.backends.ranks.cluster import ranks_per_machine
from hf_fsdp_plugin.backends.sharding import shard as sharding
from hf_fsdp_plugin.backends.sharding.script_access import check_parameter_hooks, free_before_step
from hf_fsdp_plugin.devices import get_device
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations import collective_hooks, peft, resuming, saving, script_arguments
from hf_fsdp_plugin.integrations.accelerate import fp8, private, run_report
from hf_fsdp_plugin.integrations.accelerate.accelerator import adopt_models
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, if_planned, planned_plugin
from hf_fsdp_plugin.integrations.accelerate.steps_after_restart import notice_accumulation
from hf_fsdp_plugin.integrations.failure_watch import watch
from hf_fsdp_plugin.integrations.run_metrics import run_metrics
from hf_fsdp_plugin.messages import print_warnings
from hf_fsdp_plugin.observe.first_step import check_added
from hf_fsdp_plugin.observers import observers
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.plan.padding import with_padding_warning
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.plan.units import distributed_config_of
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.torch_private.functions import allow_checkpointed_graphs
from hf_fsdp_plugin.torch_private.modules import compile_call, compiled_module

logger = logging.getLogger(__name__)
_FIX = (
    "Prepare the same objects on all ranks, outside of `if accelerator.is_main_process:`. The Trainer prepares its "
    "model in `train`, `evaluate` and `predict`, which all ranks must call in the same order."
)


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare models, optimizers and other objects, which are ``args``. Collective for a planned plugin.

    The steps for a model are those of :func:`shard_model`. Models and optimizers may be prepared in separate calls, and
    a model without an optimizer (for an evaluation before training, or a frozen teacher). Stock Accelerate refuses both
    under FSDP2.

    Raises:
        SpecError: on all ranks, if a plan cannot be resolved or an optimizer has parameters of no prepared model.
    """
    adopt_models(accelerator, args)
    if planned_plugin(accelerator) is None:
        return original(*args, **kwargs)
    # 1. Models are planned and sharded. The optimizers of this call get the shards instead of the parameters.
    given = [getattr(obj, "optimizer", obj) for obj in args if isinstance(obj, Optimizer)]
    models = iter(_add_models(accelerator, [obj for obj in args if isinstance(obj, nn.Module)], given))
    prepared = [next(models) if isinstance(obj, nn.Module) else obj for obj in args]
    # 2. Accelerate prepares loaders and optimizers by the methods below, then schedulers, which need the optimizers.
    for first_pass in (True, False):
        prepared = [
            obj if isinstance(obj, nn.Module) else private.prepare_one(accelerator, obj, first_pass=first_pass)
            for obj in prepared
        ]
    private.mark_prepared(accelerator, *prepared)
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def prepare_model(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan and shard a model, unless it is prepared for evaluation. Collective for a planned plugin."""
    adopt_models(accelerator, [model])
    if planned_plugin(accelerator) is None:
        return original(model, *args, **kwargs)
    evaluation_mode = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
    # The Trainer prepares a model that from_pretrained has sharded for evaluation, to keep Accelerate from wrapping it.
    if evaluation_mode and distributed_config_of(model) is None:
        if not args and kwargs.get("device_placement") is None:
            # Accelerate leaves the placement to FSDP, which does not shard a model in this mode.
            kwargs["device_placement"] = True
        return original(model, *args, **kwargs)
    return _add_models(accelerator, [model])[0]


@if_planned
def prepare_optimizer(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare an optimizer, and adapt it to the sharded models. Collective."""
    prepared = original(*args, **kwargs)
    private.mark_prepared(accelerator, prepared)
    for model in private.prepared_models(accelerator):
        sharding.rebind_optimizers(model, [prepared.optimizer])
    _prepare_optimizers(accelerator, [prepared.optimizer])
    return prepared


def _optimizers_of(accelerator: Any) -> list[Optimizer]:
    return [wrapper.optimizer for wrapper in private.prepared_optimizers(accelerator)]


def _add_models(
    accelerator: Any, models: Sequence[nn.Module], new_optimizers: Sequence[Optimizer] = ()
) -> list[nn.Module]:
    """Shard models and return them. Optimizers that are prepared, or that ``prepare`` will prepare, get the shards."""
    later: Iterable[Optimizer] = accelerator.state.fsdp_plugin.later_optimizers
    optimizers = [*_optimizers_of(accelerator), *later, *new_optimizers]
    added = [_add_model(accelerator, model, optimizers) for model in models]
    known = private.prepared_models(accelerator)
    for model in known:
        sharding.rebind_optimizers(model, optimizers)
    if models:
        earlier = [each for each in _optimizers_of(accelerator) if not foreign_parameters(each, known)]
        _prepare_optimizers(accelerator, earlier)
    return added


def _add_model(accelerator: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
    """Shard a model, add it to those of the accelerator, and return it. Collective. A prepared model is returned.

    So is a script's own variable, which is the module inside the prepared model under FSDP1.
    """
    models = private.prepared_models(accelerator)
    place = sharding.locate_module(model)
    if place is not None and not place.name:
        model = place.root
    if not private.is_prepared(model):
        model = shard_model(accelerator, model, optimizers, is_first=not models)
    if not any(model is known for known in models):
        models.append(model)
    return model


def shard_model(
    accelerator: Any,
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    is_first: bool = True,
    is_trained: bool = True,
    plan: FsdpPlan | None = None,
) -> nn.Module:
    """Plan and shard one model, and return the sharded model. Collective.

    Args:
        is_first: whether it is the first model of the run. Wrap settings that do not fit a further model are replaced.
        plan: the plan for this model, if there is one already.

    Raises:
        SpecError: on all ranks: the attempts before have failed in the same way,
            the settings do not fit the model, or the ranks have different plans.
    """
    inner = compiled_module(model)
    compiler: Any = model.dynamo_ctx if inner is not None else None
    model = model if inner is None else inner
    name = type(unwrapped(model)).__name__.removeprefix("FSDP")
    with _together(name):
        resuming.attempt().agree(name)
        sharding.rebind_optimizers(model, optimizers)  # gathered parameters would hide the sharding
        # 1. Plan: the settings of this model, and the decisions from them.
        with agreement.on_all_ranks("planning"):
            if plan is None:
                spec = accelerator.state.fsdp_plugin.spec_for(model, is_first=is_first, is_trained=is_trained)
                plan = make_plan(accelerator, spec, model)
            check_can_fill(plan, model)
        # 2. Agree: the same plan and weights on all ranks.
        agreement.same_on_all_ranks("the plan", json.dumps(plan.to_json(), sort_keys=True))
        if (problem := check_same_weights(plan, model, accelerator.device)) is not None:
            plan = replace(plan, problems=(*plan.problems, problem))
        plan = with_padding_warning(plan, model)
        print_warnings(plan.problems)
        if accelerator.is_main_process:
            logger.info("%s", plan)
        # 3. Linear layers are replaced by those of fp8, and attention divides sequences.
        with agreement.on_all_ranks("converting the model to fp8"):
            fp8.convert_model(accelerator, plan, model, optimizers)
            convert_shards = fp8.plain_weights(model)
        if plan.mesh.context > 1:
            private.prepare_context_parallel(accelerator, model)
        # 4. Units are compiled with their checkpoints, and sharded.
        sharded = sharding.shard(plan, model, accelerator.device, optimizers, _unit_compiler(accelerator))
        convert_shards(sharded)
        fp8.apply_autocast(accelerator, plan, sharded)
        # 5. Hooks: the progress, the diagnosis of hangs and the observers of this rank follow the model.
        record().count_forwards(sharded)
        watch().follow_thread()
        collective_hooks.name_units(sharded)
        observers().notify("model_prepared", accelerator, sharded, plan, is_trained=is_trained)
        if is_first and is_trained:
            run_metrics().follow(sharded, plan, partial(run_report.report_folder, accelerator))
        if compiler is not None:
            # torch.compile breaks graphs at a module's FSDP hooks, so the sharded module is compiled again.
            compile_call(sharded, compiler)
    private.mark_prepared(accelerator, sharded)
    return sharded


def make_plan(accelerator: Any, spec: FsdpSpec, model: nn.Module) -> FsdpPlan:
    """Resolve the plan for ``model`` and this accelerator's world size. Raises ``SpecError`` with all problems."""
    if accelerator.verify_device_map(model):
        message = f"{type(model).__name__} was loaded with a device_map over several devices."
        fix = "Load it without device_map: FSDP places the model."
        raise SpecError([Problem(code="FSDP-E605", message=message, fix=fix)])
    peft.check_adapters(model, version=spec.fsdp.version)
    check_parameter_hooks(model)
    kind, world_size = accelerator.device.type, accelerator.num_processes
    local_size = ranks_per_machine(os.environ, world_size, get_device(kind).count())
    plan = resolve(spec, model, world_size=world_size, device_type=kind, local_world_size=local_size)
    for axis in ("tensor", "expert"):
        if (size := getattr(plan.mesh, axis)) > 1 and not plan.sharded_at_load:
            message = f"mesh.{axis}={size}, but {plan.model_class} was loaded whole; from_pretrained divides layers."
            fix = "Load it with from_pretrained, after the launcher or install() has read the config."
            raise SpecError([spec.problem("FSDP-E209", f"mesh.{axis}", message, fix)])
    return plan


def _unit_compiler(accelerator: Any) -> Callable[[nn.Module], None] | None:
    """Return a function that compiles a unit in place; ``None`` if ``dynamo_backend`` is ``no``.

    Equal layers share one compilation, and no graph breaks occur at FSDP hooks inside a layer.
    """
    dynamo = accelerator.state.dynamo_plugin
    if dynamo is None or dynamo.backend.value.lower() == "no":
        return None
    allow_checkpointed_graphs()
    kwargs = {key: value for key, value in dynamo.to_kwargs().items() if key != "use_regional_compilation"}
    return lambda unit: unit.compile(**kwargs)


def _prepare_optimizers(accelerator: Any, optimizers: Sequence[Optimizer]) -> None:
    """Adapt optimizers to the sharded models, once and if there are any, and watch the run. Collective.

    Raises:
        SpecError: an optimizer has parameters of no prepared model, or cannot run on these shards.
    """
    plugin: PlannedFsdpPlugin = accelerator.state.fsdp_plugin
    models = private.prepared_models(accelerator)
    if not any(sharding.plan_of(model) for model in models):
        return
    optimizers = [each for each in optimizers if each not in plugin.adapted_optimizers]
    if optimizers:
        names = " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
        with _together(names), agreement.on_all_ranks("checking the optimizers"):
            _check_parameters(optimizers, models)
        sharding.sharded_optimizers().update(optimizers)
        _adapt_steps(accelerator, optimizers, models)
        plugin.adapted_optimizers.update(optimizers)
        if storage := plugin.spec.checkpoint.storage:
            saving.manager().use_storage(storage)  # its problems are reported before the training
    run_report.track_run(accelerator)


def _adapt_steps(accelerator: Any, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Decide how the steps of optimizers run on the shards of ``models``, and watch the steps. Collective."""
    problems: list[Problem | None] = []
    for optimizer in optimizers:
        plan = next((sharding.plan_of(model) for model in models if has_parameters_of(model, optimizer)), None)
        problems.append(apply_step_mode(optimizer, plan) if plan is not None else None)
        problems += [check_groups(optimizer, model) for model in models]
    script_arguments.print_or_raise([problem for problem in problems if problem is not None])
    for optimizer in optimizers:
        record().count_steps(optimizer)
        notice_accumulation(accelerator, optimizer)
        for model in models:
            free_before_step(model, optimizer)
            if has_parameters_of(model, optimizer):
                fp8.refresh_scales_after_steps(optimizer, model)


def _check_parameters(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Raise ``SpecError`` for an optimizer with parameters of no sharded model, or that were added to one later.

    Training would not change the loss, or each rank would train its own values.
    """
    num_foreign = [(type(optimizer).__name__, foreign_parameters(optimizer, models)) for optimizer in optimizers]
    effect = "belong to no prepared model, so the optimizer would update copies that the model does not use."
    fix = "Pass the optimizer and all of its models to one call of prepare(), or create it after preparing them."
    messages = [f"{number} parameters of {name} {effect}" for name, number in num_foreign if number]
    if messages:
        raise SpecError([Problem(code="FSDP-E604", message=message, fix=fix) for message in messages])
    for optimizer in optimizers:
        for model in models:
            check_added(model, optimizer)


def _together(names: str) -> AbstractContextManager[None]:
    return agreement.collective_preparation(f"Accelerator.prepare of {names}", fix=_FIX)


def prepare_fsdp(original: Callable[..., Any], model: nn.Module, accelerator: Any) -> Any:
    """Shard a reference, teacher or reward model of TRL's Trainers by a plan. Collective."""
    if planned_plugin(accelerator) is None:
        return original(model, accelerator)
    return prepare_for_evaluation(accelerator, model)


def prepare_for_evaluation(accelerator: Any, model: nn.Module) -> nn.Module:
    """Freeze and shard a model that is not trained, and return it in evaluation mode. Collective.

    The accelerator does not save it. The report contains it as a further model.
    """
    if not private.is_prepared(model):
        model.requires_grad_(False)
        model = shard_model(accelerator, model, is_first=False, is_trained=False)
        accelerator.state.fsdp_plugin.evaluated_models[model] = None
    return model.eval()
