"""The arguments of an ``Accelerator`` with FSDP: what is refused or noted, the device mesh, and the process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from accelerate.utils import InitProcessGroupKwargs, KwargsHandler, ParallelismConfig

from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, planned_plugin, with_mixed_precision
from hf_fsdp_plugin.integrations.accelerate.state import adjust_process_group
from hf_fsdp_plugin.integrations.patching import is_true, variables_in_block
from hf_fsdp_plugin.integrations.script_arguments import check_arguments, check_object, print_or_raise
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.presharded import distributed_config_of
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_objects import DATA_SIZES, parallelism_fields
from hf_fsdp_plugin.sources.distributed_config import OTHER_AXES
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess, with_distributed_config
from hf_fsdp_plugin.torch_private.grad_scaler import ShardedGradScaler

SOURCE: Final = "Accelerator()"
_USE_MESH: Final = "ACCELERATE_USE_PARALLELISM_CONFIG"
_SETTINGS: Final = dict(zip(DATA_SIZES, ("mesh.replicate", "mesh.shard"), strict=True))
"""Size of a ``ParallelismConfig`` -> its setting."""


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
    """Yield an error for axes other than data, and for sizes of which a spec that was made without them differs."""
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


def without_stock_mesh() -> AbstractContextManager[None]:
    """Keep Accelerate from making a mesh from variables in the block. It would refuse FSDP1 and replicas alone."""
    return variables_in_block(**{_USE_MESH: None})


def set_mesh(accelerator: Any, config: Any, spec: FsdpSpec) -> None:
    """Set Accelerate's config and mesh for scripts that read them, if they are those of ``spec``. Collective.

    Without a shard axis and under FSDP1, Accelerate would refuse them in the next Accelerator.
    """
    if config is None and is_true(_USE_MESH):
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
    if planned_plugin(accelerator) is not None or not session.installed or private.prepared_models(accelerator):
        return
    config = next((config for obj in objects if (config := distributed_config_of(obj)) is not None), None)
    if config is None or is_left_to_transformers(config):
        return
    check_handlers(vars(accelerator).values())
    given = session.load(parallelism_config=accelerator.parallelism_config)
    spec = with_distributed_config(with_mixed_precision(given, accelerator.mixed_precision), config)
    print_warnings(spec.problems)
    private.set_fsdp(accelerator.state)
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
