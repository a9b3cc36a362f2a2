"""``accelerator(spec)``, and the replacements of the methods of ``Accelerator`` that create it, prepare and train.

The arguments of an Accelerator with FSDP are checked; some are refused, or noted because they have no effect.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, KwargsHandler, ParallelismConfig

from hf_fsdp_plugin.backends.optimizers.clipping import clip_grad_norm
from hf_fsdp_plugin.backends.ranks.cluster import slurm_variables
from hf_fsdp_plugin.backends.ranks.collective_entry import DEFAULT_LIMIT, TRAINING_LIMIT, collective_call
from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.integrations import patching
from hf_fsdp_plugin.integrations.accelerate import prepare as planned
from hf_fsdp_plugin.integrations.accelerate.plugin import (
    PlannedFsdpPlugin,
    dynamo_plugin,
    if_planned,
    planned_plugin,
    spec_of_stock_plugin,
    with_mixed_precision,
)
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers, set_fsdp, shared_state
from hf_fsdp_plugin.integrations.accelerate.state import adjust_process_group
from hf_fsdp_plugin.integrations.profiling.marking import mark_phase
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.integrations.saving import gathered, state_at
from hf_fsdp_plugin.integrations.script_arguments import check_arguments, check_object, print_or_raise
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.torch_functions import FIX, has_shards
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.plan.presharded import distributed_config_of
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_objects import DATA_SIZES, parallelism_fields
from hf_fsdp_plugin.sources.distributed_config import OTHER_AXES
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess, with_distributed_config
from hf_fsdp_plugin.spec.rules import fsdp_is_off
from hf_fsdp_plugin.torch_private.functions import ShardedGradScaler

SOURCE: Final = "Accelerator()"
_USE_MESH: Final = "ACCELERATE_USE_PARALLELISM_CONFIG"
_SETTINGS: Final = dict(zip(DATA_SIZES, ("mesh.replicate", "mesh.shard"), strict=True))
"""Size of a ``ParallelismConfig`` -> its setting."""
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
    patching.install_hooks("accelerate")
    patching.set_variables(**slurm_variables(os.environ))
    patching.set_loading_variables(spec)
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
    # Otherwise Accelerate makes a mesh from variables, and refuses FSDP1 and replicas alone.
    with patching.variables_in_block(**{_USE_MESH: None}):
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
@mark_phase("clipping")
def clip_grad_norm_(
    original: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: Any, norm_type: Any = 2
) -> torch.Tensor:
    plugin: PlannedFsdpPlugin = accelerator.state.fsdp_plugin
    parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
    has_gradients = any(parameter.grad is not None for parameter in parameters)
    limit = TRAINING_LIMIT if has_gradients else DEFAULT_LIMIT
    plugin.first_calls.wait("Accelerator.clip_grad_norm_", fix=_CLIP_FIX, limit=limit, before_step=True)
    accelerator.unscale_gradients()
    return clip_grad_norm(prepared_models(accelerator), parameters, float(max_norm), float(norm_type))


@if_planned
@mark_phase("clipping")
def clip_grad_value_(original: Callable[..., Any], accelerator: Any, parameters: Any, clip_value: Any) -> None:
    accelerator.unscale_gradients()
    torch.nn.utils.clip_grad_value_(parameters, clip_value)


def end_training(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    report_run(accelerator)
    return original(*args, **kwargs)


def check_accelerator(arguments: Mapping[str, Any], spec: FsdpSpec) -> None:
    """Report the arguments of an Accelerator that have no effect on ``spec``, and adjust the process group.

    Args:
        spec: contains ``parallelism_config``, unless it was made without the Accelerator.

    Raises:
        SpecError: an argument is refused.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    mesh = given.get("parallelism_config")
    print_or_raise([*check_arguments("Accelerator", given, source=SOURCE), *_check_mesh(mesh, spec)])
    handlers = given.get("kwargs_handlers", ())
    check_handlers(handlers)
    for handler in handlers:
        if isinstance(handler, InitProcessGroupKwargs):
            adjust_process_group(handler.to_kwargs(), source=SOURCE)


def check_handlers(objects: Iterable[Any]) -> None:
    """Report the arguments of the handlers among ``objects``. Raises ``SpecError`` for those that are refused."""
    handlers = [obj for obj in objects if isinstance(obj, KwargsHandler)]
    problems = [problem for handler in handlers for problem in check_object(handler, source=SOURCE)]
    if session.trainer_spec is not None:  # the Trainer creates a handler in every run
        problems = [problem for problem in problems if problem.severity == "error"]
    print_or_raise(problems)


def _check_mesh(config: Any, spec: FsdpSpec) -> Iterator[Problem]:
    """Yield an error for axes other than data, and for sizes that differ from a spec that was made without them."""
    if config is None:
        return
    alone = assess(Sources(config={"distributed_type": "FSDP"}, parallelism_config=config, environ={}))
    if not alone.ok:
        yield from (problem for problem in alone.problems if problem.severity == "error")
        return
    sizes = parallelism_fields(config)
    # The session has read a config, and has reported the sources that override it.
    reported = {each.setting for each in spec.problems if each.origin and each.origin.source == "ParallelismConfig"}
    for name, setting in _SETTINGS.items():
        size = sizes.get(name)
        if size not in (None, spec.get(setting)) and setting not in reported:
            message = f"{name} is {size}, but the spec of this Accelerator has {setting}={spec.get(setting)}."
            fix = "Pass it to load_spec: load_spec(config, parallelism_config=…)."
            origin = Origin(source=SOURCE, spelling="parallelism_config", text=f"{name}={size}")
            yield Problem(code="FSDP-E612", setting=setting, message=message, fix=fix, origin=origin)


def set_mesh(accelerator: Any, config: Any, spec: FsdpSpec) -> None:
    """Set Accelerate's config and mesh for scripts that read them, if they are those of ``spec``. Collective.

    Without a shard axis and under FSDP1, Accelerate would refuse them in the next Accelerator.
    """
    if config is None and patching.is_true(_USE_MESH):
        with suppress(ValueError):
            config = ParallelismConfig()
    if config is None or spec.fsdp.version == 1 or config.dp_shard_size == 1:
        return
    is_same = all(getattr(config, name) == spec.get(setting) for name, setting in _SETTINGS.items())
    if is_same and config.total_size == accelerator.num_processes:
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
        accelerator.state.parallelism_config = config


def adopt_models(accelerator: Any, objects: Iterable[Any]) -> None:
    """Make the accelerator use FSDP if one of ``objects`` is a model that ``from_pretrained`` has sharded.

    Stock Accelerate would wrap such a model in DistributedDataParallel, which raises, or shard it again. An accelerator
    that has a spec keeps it: ``PlannedFsdpPlugin.spec_for`` adds the settings of the model's ``DistributedConfig``.

    Raises:
        SpecError: the ``DistributedConfig`` conflicts with the other settings.
    """
    if planned_plugin(accelerator) is not None or not session.installed or prepared_models(accelerator):
        return
    config = next((config for obj in objects if (config := distributed_config_of(obj)) is not None), None)
    if config is None or is_left_to_transformers(config):
        return
    check_handlers(vars(accelerator).values())
    given = session.load(parallelism_config=accelerator.parallelism_config)
    spec = with_distributed_config(with_mixed_precision(given, accelerator.mixed_precision), config)
    print_warnings(spec.problems)
    set_fsdp(accelerator.state)
    accelerator.state.fsdp_plugin = PlannedFsdpPlugin(spec)
    replace_scaler(accelerator)
    print_once("this Accelerator uses FSDP2 now, because from_pretrained has sharded the model.")


def is_left_to_transformers(config: Any) -> bool:
    """Return whether a ``DistributedConfig`` uses tensor, pipeline or expert parallelism, and report it."""
    sizes = {name: getattr(config, name, None) or 1 for name in OTHER_AXES}
    used = [f"{name}={size}" for name, size in sizes.items() if size != 1]
    if used:
        message = f"the model is loaded with {', '.join(used)}, which this package does not support."
        fix = "Transformers trains it, without a report and without checkpoints of this package."
        print_once(Problem(code="FSDP-W650", message=message, fix=fix, origin=Origin(source="DistributedConfig")))
    return bool(used)


def replace_scaler(accelerator: Any) -> None:
    """Replace the scaler of fp16 training, before optimizers are prepared. Does nothing without a scaler.

    Accelerate's scalers raise, or skip a step on some ranks only, for parameters that FSDP does not shard and for fused
    optimizers.
    """
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, ShardedGradScaler):
        handler = accelerator.scaler_handler
        settings = handler.to_kwargs() if handler is not None else {}
        accelerator.scaler = ShardedGradScaler(accelerator.device.type, **settings)
