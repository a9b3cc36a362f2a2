"""``accelerator(spec)``, and the replacements of the methods of ``Accelerator`` that prepare and train."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from hf_fsdp_plugin.backends.optimizers.clipping import clip_grad_norm
from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.backends.ranks.collective_entry import DEFAULT_LIMIT, TRAINING_LIMIT, collective_call
from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.integrations.accelerate import prepare as planned
from hf_fsdp_plugin.integrations.accelerate.arguments import (
    adopt_models,
    check_accelerator,
    replace_scaler,
    set_mesh,
    without_stock_mesh,
)
from hf_fsdp_plugin.integrations.accelerate.plugin import (
    PlannedFsdpPlugin,
    dynamo_plugin,
    if_planned,
    planned_plugin,
    spec_of_stock_plugin,
    with_mixed_precision,
)
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers, shared_state
from hf_fsdp_plugin.integrations.patching import install_hooks, set_loading_variables, set_variables
from hf_fsdp_plugin.integrations.profiling.marking import marked
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.integrations.saving import gathered, state_at
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.torch_functions import FIX, has_shards
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.plan.presharded import distributed_config_of
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.rules import fsdp_is_off

_CLIP_FIX = "Call it on all ranks, outside of `if accelerator.is_main_process:`. It clips by the norm of all shards."


def accelerator(spec: FsdpSpec, **kwargs: Any) -> Accelerator:
    """Return an ``accelerate.Accelerator`` whose ``prepare`` shards models according to ``spec``, on CPU ranks too.

    If ``spec`` does not enable FSDP, this is a stock Accelerator, and a warning is printed.

    Args:
        spec: from :func:`hf_fsdp_plugin.load_spec`.
        kwargs: the other arguments of ``accelerate.Accelerator``. ``fsdp_plugin``, ``mixed_precision`` and the sizes of
            ``parallelism_config`` come from the spec.

    Raises:
        SpecError: the process is not a rank of a launcher, so there is no process group.
    """
    if spec.launch.use_cpu:
        kwargs.setdefault("cpu", True)
    if not spec.enabled:
        print_warnings([fsdp_is_off(spec)])
        return Accelerator(mixed_precision=spec.launch.mixed_precision, **kwargs)
    install_hooks("accelerate")
    set_variables(**slurm_variables(os.environ))
    set_loading_variables(spec)
    return Accelerator(fsdp_plugin=PlannedFsdpPlugin(spec), **kwargs)


def init_accelerator(original: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """Create the Accelerator with a plugin, a precision and ``torch.compile`` settings from the spec."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    plugin, mesh = arguments.get("fsdp_plugin"), arguments.get("parallelism_config")
    # The mesh of the first Accelerator is that of all Accelerators of the process, as in Accelerate.
    mesh = mesh or getattr(shared_state().get("fsdp_plugin"), "parallelism_config", None)
    spec = _spec_of(plugin, mesh)
    if spec is not None:
        # The spec of a Trainer already contains the precision of its arguments.
        given = None if session.trainer_spec is not None else arguments.get("mixed_precision")
        plugin = PlannedFsdpPlugin.replacing(plugin, with_mixed_precision(spec, given))
    if not isinstance(plugin, PlannedFsdpPlugin):
        original(**arguments)
        if plugin is None and accelerator.num_processes > 1 and session.installed:
            message = (
                "neither the launcher, nor the environment, nor the script enables FSDP: this Accelerator runs "
                f"{accelerator.distributed_type.value} on {accelerator.num_processes} ranks."
            )
            print_once(Problem(code="FSDP-W602", message=message, fix="Pass a config: --config_file CONFIG."))
        return
    check_accelerator(arguments, plugin.spec)
    arguments["fsdp_plugin"] = plugin
    arguments.pop("parallelism_config", None)  # Accelerate would refuse it under FSDP1
    plugin.parallelism_config = mesh
    if (dynamo := dynamo_plugin(plugin.spec)) and not arguments.keys() & {"dynamo_plugin", "dynamo_backend"}:
        arguments["dynamo_plugin"] = dynamo
    param = plugin.spec.precision.param
    arguments["mixed_precision"] = param if param in ("bf16", "fp16") else "no"
    with without_stock_mesh():
        original(**arguments)
    set_mesh(accelerator, mesh, plugin.spec)
    replace_scaler(accelerator)


def _spec_of(plugin: Any, mesh: Any) -> FsdpSpec | None:
    """Return the spec of an Accelerator that is created with these arguments; ``None`` for a planned plugin or none."""
    if plugin is not None:
        return spec_of_stock_plugin(plugin, mesh)
    if session.trainer_spec is not None or session.ambient is None or mesh is None:
        return session.trainer_spec or session.ambient
    spec = session.load(parallelism_config=mesh)
    print_warnings(spec.problems)
    return spec


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    adopt_models(accelerator, args)
    if planned_plugin(accelerator) is None:
        return original(*args, **kwargs)
    return planned.prepare_objects(accelerator, args)


def prepare_model(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
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
    optimizers = [wrapper.optimizer for wrapper in prepared_optimizers(accelerator)]
    return planned.prepare_model(accelerator, model, optimizers)


def get_state_dict(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the whole state dict of a sharded model, or of a module in one, on rank 0; empty on other ranks.

    Collective for these. A model that is not sharded, in an Accelerator with FSDP, returns its own state dict.
    """
    answer = gathered.state_of(model)
    if answer is not None:
        return answer
    place = locate_module(model)
    if place is not None:
        with collective_call(f"Accelerator.get_state_dict of {type(unwrapped(model)).__name__}", fix=FIX):
            return state_at(place)
    if planned_plugin(accelerator) is not None and not has_shards(model):
        return model.state_dict()
    return original(model, *args, **kwargs)


@if_planned
@marked("clipping")
def clip_grad_norm_(
    original: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: Any, norm_type: Any = 2
) -> torch.Tensor:
    plugin = planned_plugin(accelerator)
    assert plugin is not None
    parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
    has_gradients = any(parameter.grad is not None for parameter in parameters)
    limit = TRAINING_LIMIT if has_gradients else DEFAULT_LIMIT
    plugin.first_calls.wait("Accelerator.clip_grad_norm_", fix=_CLIP_FIX, limit=limit, before_step=True)
    accelerator.unscale_gradients()
    return clip_grad_norm(prepared_models(accelerator), parameters, float(max_norm), float(norm_type))


@if_planned
@marked("clipping")
def clip_grad_value_(original: Callable[..., Any], accelerator: Any, parameters: Any, clip_value: Any) -> None:
    accelerator.unscale_gradients()
    torch.nn.utils.clip_grad_value_(parameters, clip_value)


def end_training(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    report_run(accelerator)
    return original(*args, **kwargs)
