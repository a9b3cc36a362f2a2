"""How Accelerate's objects are created, and how an ``Accelerator`` trains: ``accelerator(spec)``, and replacements.

The arguments of an Accelerator with FSDP are checked; some are refused, or noted because they have no effect. The
constructors of ``PartialState`` and ``AcceleratorState`` enable FSDP on CPU ranks, and process groups for both CPU and
accelerator tensors.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate import Accelerator, utils

from hf_fsdp_plugin.backends.device_meshes import world_mesh
from hf_fsdp_plugin.backends.optimizers.clipping import clip_grad_norm
from hf_fsdp_plugin.backends.ranks import agreement, cluster
from hf_fsdp_plugin.backends.sharding.shard import has_shards, locate_module
from hf_fsdp_plugin.backends.sharding.state_dicts import STATE_FIX
from hf_fsdp_plugin.devices import DEVICES, accelerator_type, get_device, select_device
from hf_fsdp_plugin.integrations import patching
from hf_fsdp_plugin.integrations.accelerate import fp8, private
from hf_fsdp_plugin.integrations.accelerate import plugin as plugins
from hf_fsdp_plugin.integrations.accelerate.run_report import report_run
from hf_fsdp_plugin.integrations.saving import call_name, gathered, state_at
from hf_fsdp_plugin.integrations.script_arguments import check_arguments, check_object, print_or_raise
from hf_fsdp_plugin.integrations.session import attributes_in_block, session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.observers import mark_phase
from hf_fsdp_plugin.plan.fsdp_plan import MeshPlan, ProblemCollector, has_replicas
from hf_fsdp_plugin.plan.mesh import resolve_mesh
from hf_fsdp_plugin.plan.units import distributed_config_of
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_local_rank, launched_world_size
from hf_fsdp_plugin.sources.script_objects import DATA_SIZES, FSDP_SIZES
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import with_script_settings
from hf_fsdp_plugin.spec.rules import fsdp_is_off
from hf_fsdp_plugin.torch_private.functions import set_timeout, timeout_of
from hf_fsdp_plugin.torch_private.grad_scaler import CollectiveGradScaler
from hf_fsdp_plugin.torch_private.modules import entries_in_block

SOURCE: Final = "Accelerator()"
_USE_MESH: Final = "ACCELERATE_USE_PARALLELISM_CONFIG"
_SETTINGS: Final = {
    **dict(zip(DATA_SIZES, ("mesh.replicate", "mesh.shard"), strict=True)),
    "cp_size": "mesh.context",
    "tp_size": "mesh.tensor",
}
"""Size of a ``ParallelismConfig`` -> its setting."""
_CLIP_FIX = f"{agreement.ON_ALL_RANKS} It clips by the norm of all shards."


def accelerator(spec: FsdpSpec, **kwargs: Any) -> Accelerator:
    """Return an ``accelerate.Accelerator`` whose ``prepare`` shards models according to ``spec``, on CPU ranks too.

    If ``spec`` does not enable FSDP, this is a stock Accelerator, and a warning is printed.

    Args:
        spec: from :func:`hf_fsdp_plugin.load_spec`.
        kwargs: the other arguments of ``accelerate.Accelerator``. ``fsdp_plugin`` and ``mixed_precision`` come
            from the spec. The sizes of a ``parallelism_config`` override it.

    Raises:
        SpecError: the process is not a rank of a launcher, so there is no process group.
    """
    if spec.launch.use_cpu:
        kwargs.setdefault("cpu", True)
    if not spec.enabled:
        print_warnings([fsdp_is_off(spec)])
        return Accelerator(mixed_precision=spec.launch.mixed_precision, **kwargs)
    patching.changes().install("accelerate")
    patching.changes().set_variables(**cluster.slurm_variables(os.environ))
    patching.set_loading_variables(spec)
    return Accelerator(fsdp_plugin=plugins.PlannedFsdpPlugin(spec), **kwargs)


def init_accelerator(original: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
    """Create the Accelerator with a plugin, a precision and ``torch.compile`` settings from the spec."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    plugin, mesh = arguments.get("fsdp_plugin"), arguments.get("parallelism_config")
    # The mesh of the first Accelerator is that of all Accelerators of the process, as in Accelerate.
    mesh = mesh or getattr(private.shared_state().get("fsdp_plugin"), "parallelism_config", None)
    spec = _spec_of(plugin, mesh)
    if spec is not None:
        # The spec of a Trainer already contains the precision of its arguments.
        given = None if session().trainer_spec is not None else arguments.get("mixed_precision")
        spec = plugins.with_mixed_precision(spec, given)
        spec = fp8.with_handlers(spec, arguments.get("kwargs_handlers") or (), SOURCE)
        plugin = plugins.PlannedFsdpPlugin.replacing(plugin, spec)
    elif isinstance(plugin, plugins.PlannedFsdpPlugin):
        changed = with_script_settings(plugin.spec, parallelism_config=mesh)
        if changed is not plugin.spec:  # otherwise a state dict type that the script has set stays
            plugin.use_spec(changed)
    if not isinstance(plugin, plugins.PlannedFsdpPlugin):
        original(**arguments)
        if plugin is None and accelerator.num_processes > 1 and session().installed:
            message = "neither the launcher, nor the environment, nor the script enables FSDP: this Accelerator runs "
            message += f"{accelerator.distributed_type.value} on {accelerator.num_processes} ranks."
            print_once(Problem(code="FSDP-W602", message=message, fix="Pass a config: --config_file CONFIG."))
        return
    check_accelerator(arguments)
    arguments["fsdp_plugin"] = plugin
    arguments.pop("parallelism_config", None)  # Accelerate would refuse it under FSDP1
    plugin.parallelism_config = mesh
    if (dynamo := plugins.dynamo_plugin(plugin.spec)) and not arguments.keys() & {"dynamo_plugin", "dynamo_backend"}:
        arguments["dynamo_plugin"] = dynamo
    param = plugin.spec.precision.param
    arguments["mixed_precision"] = param if param in ("bf16", "fp16") else "no"
    # Accelerate cannot load parts of fp8 models. Here they are loaded before they get the class of fp8 weights.
    loads_parts: dict[str, Any] = {}
    if plugin.spec.uses_fp8:
        arguments["mixed_precision"], loads_parts = "fp8", {"cpu_ram_efficient_loading": False}
        arguments["kwargs_handlers"] = fp8.handlers_of(plugin.spec, arguments.get("kwargs_handlers") or ())
    # Otherwise Accelerate makes a mesh from variables, and refuses FSDP1 and replicas alone.
    with entries_in_block({_USE_MESH: "false"}, os.environ), attributes_in_block(plugin, **loads_parts):
        original(**arguments)
    set_mesh(accelerator, mesh, plugin.spec)
    replace_scaler(accelerator)


def _spec_of(plugin: Any, mesh: Any) -> FsdpSpec | None:
    """Return the spec of an Accelerator that is created with these arguments; ``None`` for a planned plugin or none."""
    if plugin is not None:
        return plugins.spec_of_stock_plugin(plugin, mesh)
    if session().trainer_spec is not None or session().ambient is None or mesh is None:
        return session().trainer_spec or session().ambient
    spec = session().load(parallelism_config=mesh)
    print_warnings(spec.problems)
    return spec


def get_state_dict(original: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the whole state dict of a sharded model, or of a module in one, on rank 0; empty on other ranks.

    Collective for these. A model that is not sharded, in an Accelerator with FSDP, returns its own state dict.
    """
    if (answer := gathered().state_of(model)) is not None:
        return answer
    if (place := locate_module(model)) is not None:
        with agreement.collective_call(call_name("Accelerator.get_state_dict", model), fix=STATE_FIX):
            return state_at(place)
    if plugins.planned_plugin(accelerator) is not None and not has_shards(model):
        return model.state_dict()
    return original(model, *args, **kwargs)


@plugins.if_planned
@mark_phase("clipping")
def clip_grad_norm_(
    original: Callable[..., Any], accelerator: Any, parameters: Any, max_norm: Any, norm_type: Any = 2
) -> torch.Tensor:
    plugin: plugins.PlannedFsdpPlugin = accelerator.state.fsdp_plugin
    parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
    has_gradients = any(parameter.grad is not None for parameter in parameters)
    limit = agreement.TRAINING_LIMIT if has_gradients else agreement.DEFAULT_LIMIT
    plugin.first_calls.wait("Accelerator.clip_grad_norm_", fix=_CLIP_FIX, limit=limit)
    accelerator.unscale_gradients()
    return clip_grad_norm(private.prepared_models(accelerator), parameters, float(max_norm), float(norm_type))


def find_packed_sequences(original: Callable[..., Any], position_ids: Any) -> Any:
    """Find no packed sequences with a context axis: the two parts that a rank has of a sequence would be two.

    Transformers would make a mask of all pairs of the rank's tokens, which Accelerate does not pass to the attention.
    """
    config = private.shared_state().get("parallelism_config")
    return None if config is not None and config.cp_enabled else original(position_ids)


def end_training(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    report_run(accelerator)
    return original(*args, **kwargs)


def check_accelerator(arguments: Mapping[str, Any]) -> None:
    """Report the arguments of an Accelerator that have no effect, and adjust the process group.

    Raises:
        SpecError: an argument is refused.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    print_or_raise([*check_arguments("Accelerator", given, source=SOURCE)])
    check_handlers(given.get("kwargs_handlers", ()))
    for handler in given.get("kwargs_handlers", ()):
        if isinstance(handler, utils.InitProcessGroupKwargs):
            adjust_process_group(handler.to_kwargs(), source=SOURCE)


def check_handlers(objects: Iterable[Any]) -> None:
    """Report the arguments of the handlers among ``objects``. Raises ``SpecError`` for those that are refused."""
    handlers = [obj for obj in objects if isinstance(obj, utils.KwargsHandler)]
    problems = [problem for handler in handlers for problem in check_object(handler, source=SOURCE)]
    # The Trainer creates a handler in every run.
    print_or_raise([each for each in problems if each.severity == "error" or session().trainer_spec is None])


def set_mesh(accelerator: Any, config: Any, spec: FsdpSpec) -> None:
    """Set Accelerate's config and mesh for scripts that read them, if they are those of ``spec``. Collective.

    Without a shard axis and under FSDP1, Accelerate would refuse them in the next Accelerator.
    """
    if spec.mesh.has_model_axes:
        _set_world_mesh(accelerator, spec)
        return
    if config is None and patching.is_true(_USE_MESH):
        with suppress(ValueError):
            config = utils.ParallelismConfig()
    if config is None or spec.fsdp.version == 1 or config.dp_shard_size == 1:
        return
    is_same = all(getattr(config, name) == spec.get(setting) for name, setting in _SETTINGS.items())
    if is_same and config.total_size == accelerator.num_processes:
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
        accelerator.state.parallelism_config = config


def mesh_of_world(spec: FsdpSpec, world_size: int, device_type: str) -> tuple[MeshPlan, str]:
    """Return the mesh and the strategy of these ranks, before there is a model. Raises ``SpecError``."""
    collector = ProblemCollector(spec)
    local_size = cluster.ranks_per_machine(os.environ, world_size, get_device(device_type).count())
    resolved = resolve_mesh(world_size, local_size, collector)
    print_or_raise([problem for problem in collector.problems if problem.severity == "error"])
    return resolved


def _set_world_mesh(accelerator: Any, spec: FsdpSpec) -> None:
    """Set the mesh of all axes, from which loaders and the Trainer read which ranks train the same samples. Collective.

    Raises:
        SpecError: the sizes do not fit the world.
    """
    kind = accelerator.device.type
    sizes, strategy = mesh_of_world(spec, accelerator.num_processes, kind)
    exchange = utils.TorchContextParallelConfig(cp_comm_strategy=spec.mesh.context_exchange)
    config = utils.ParallelismConfig(
        dp_replicate_size=sizes.replicate,
        dp_shard_size=sizes.shard,
        cp_size=sizes.context,
        tp_size=sizes.tensor,
        sp_size=1,
        cp_handler=exchange if sizes.context > 1 else None,
    )
    mesh = world_mesh(sizes, kind, has_replicas=has_replicas(sizes, strategy))
    config.device_mesh = accelerator.state.device_mesh = mesh
    accelerator.state.parallelism_config = config


def adopt_models(accelerator: Any, objects: Iterable[Any]) -> None:
    """Make the accelerator use FSDP if one of ``objects`` is a model that ``from_pretrained`` has sharded.

    Stock Accelerate would wrap such a model in DistributedDataParallel, which raises, or shard it again. An accelerator
    that has a spec keeps it: ``PlannedFsdpPlugin.spec_for`` adds the settings of the model's ``DistributedConfig``.

    Raises:
        SpecError: the ``DistributedConfig`` conflicts with the other settings.
    """
    is_decided = plugins.planned_plugin(accelerator) is not None or private.prepared_models(accelerator)
    if is_decided or not session().installed:
        return
    config = next((config for obj in objects if (config := distributed_config_of(obj)) is not None), None)
    if config is None or is_left_to_transformers(config):
        return
    check_handlers(vars(accelerator).values())
    spec = session().load(parallelism_config=accelerator.parallelism_config)
    spec = plugins.with_mixed_precision(spec, accelerator.mixed_precision)
    spec = with_script_settings(spec, distributed_config=config)
    print_warnings(spec.problems)
    private.set_in_states(accelerator.state, distributed_type=utils.DistributedType.FSDP)
    accelerator.state.fsdp_plugin = plugins.PlannedFsdpPlugin(spec)
    replace_scaler(accelerator)
    print_once("this Accelerator uses FSDP2 now, because from_pretrained has sharded the model.")


def is_left_to_transformers(config: Any) -> bool:
    """Return whether a ``DistributedConfig`` has no FSDP axis, or a pipeline axis, and report it."""
    sizes = {name: getattr(config, name, None) or 1 for name in (*FSDP_SIZES, "tp_size", "ep_size", "pp_size")}
    used = [f"{name}={size}" for name, size in sizes.items() if size != 1]
    is_left = bool(used) and (sizes["pp_size"] != 1 or all(sizes[name] == 1 for name in FSDP_SIZES))
    if is_left:
        message = f"the model is loaded with {', '.join(used)}, which has no FSDP axis that this package could use."
        fix = "Transformers trains it, without a report and without checkpoints of this package."
        print_once(Problem(code="FSDP-W650", message=message, fix=fix, origin=Origin(source="DistributedConfig")))
    return is_left


def replace_scaler(accelerator: Any) -> None:
    """Replace the scaler of fp16 training, before optimizers are prepared. Does nothing without a scaler.

    Accelerate's scalers raise, or skip a step on some ranks only, for parameters that FSDP does not shard and for fused
    optimizers.
    """
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, CollectiveGradScaler):
        handler = accelerator.scaler_handler
        settings = handler.to_kwargs() if handler is not None else {}
        accelerator.scaler = CollectiveGradScaler(accelerator.device.type, **settings)


def init_partial_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """On ranks with an accelerator, first start a process group for its tensors and for CPU tensors.

    Offloaded gradients, for example, are CPU tensors. If ``cpu`` or a backend is given, Accelerate starts its own
    process group instead. The time-out is that of the ``TrainingArguments``, on CPU ranks too.
    """
    is_given = kwargs.get("backend") is not None or (args and args[0]) or kwargs.get("cpu")
    was_started = dist.is_initialized()
    if not state.initialized and not was_started:
        _prepare_network()
        is_rank = "LOCAL_RANK" in os.environ
        if not is_given and is_rank and (device := select_device(launched_local_rank())).type != "cpu":
            timeout = {name: value for name, value in kwargs.items() if name == "timeout"}
            dist.init_process_group(device.process_group_backend, **timeout)
    if session().group_timeout is not None:
        kwargs.setdefault("timeout", session().group_timeout)
    if was_started and not state.initialized:
        _check_backend(kwargs.get("backend"), source="TrainingArguments")
    if "timeout" in kwargs and _is_early_group():
        set_timeout(kwargs["timeout"])
    original(*args, **kwargs)
    if not was_started and dist.is_initialized() and "timeout" not in kwargs:
        session().early_group = dist.group.WORLD
    _remove_index_of_cpu(state)
    own = getattr(state, "device", None)
    if own is not None and own.index is not None and own.index != state.local_process_index:
        # Accelerate passes the local rank to barriers, which is no device if each rank sees only its own. All objects
        # of `PartialState` share their attributes.
        state.wait_for_everyone = functools.partial(dist.barrier, device_ids=[own.index])


def _prepare_network() -> None:
    """Prepare this process for the connections of gloo, which every process group has."""
    if (world_size := launched_world_size()) == 1:
        return
    patching.changes().set_variables(**cluster.gloo_variables(os.environ))
    interface, problem = cluster.gloo_interface(os.environ)
    if interface:
        patching.changes().set_variables(GLOO_SOCKET_IFNAME=interface)
    cluster.raise_file_limit(world_size)
    print_warnings([problem] if problem is not None else [])


def _is_early_group() -> bool:
    return session().early_group is not None and session().early_group is dist.group.WORLD


def adjust_process_group(given: Mapping[str, Any], *, source: str) -> None:
    """Apply the arguments for a process group to the one that is started already. Does nothing if none is.

    Raises:
        SpecError: the group has another backend.
    """
    if not dist.is_initialized():
        return
    _check_backend(given.get("backend"), source=source)
    timeout = given.get("timeout")
    if timeout is not None and _is_early_group():
        set_timeout(timeout)
    elif timeout not in (None, timeout_of()):
        message = f"timeout={timeout} has no effect: the process group is started already, with {timeout_of()}."
        fix = "Pass it where the group is started: init_process_group, PartialState or TrainingArguments(ddp_timeout)."
        print_once(Problem(code="FSDP-W614", message=message, fix=fix, origin=Origin(source=source)))


def _check_backend(backend: str | None, *, source: str) -> None:
    """Raise ``SpecError`` if the process group has another backend for the tensors of a model."""
    if backend is None:
        return
    device = accelerator_type()
    asked, found = (
        dict(pair.split(":") for pair in text.split(",")).get(device) if ":" in text else text
        for text in (backend, str(dist.get_backend_config()))
    )
    if asked != found:
        message = f"backend={backend}, but the process group is started already, with {found} for {device}."
        fix = "Remove it, or start the group with it: torch.distributed.init_process_group(BACKEND) before install()."
        raise SpecError([Problem(code="FSDP-E612", message=message, fix=fix, origin=Origin(source=source))])


def _remove_index_of_cpu(state: Any) -> None:
    """Make the device of a CPU rank ``cpu``. Accelerate sets ``cpu:0``, which FSDP1 treats as another device."""
    device = getattr(state, "device", None)
    if device is not None and device.type == "cpu":
        state.device = torch.device("cpu")


def init_accelerator_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """Use FSDP on CPU ranks too. Raises ``SpecError`` for a process without a process group."""
    plugin = kwargs.get("fsdp_plugin")
    if not isinstance(plugin, plugins.PlannedFsdpPlugin):
        original(*args, **kwargs)
        return
    if _is_cpu_rank(plugin.spec):
        kwargs["cpu"] = True
        private.reset_single_process_state(state)
    original(*args, **kwargs)
    if state.distributed_type == utils.DistributedType.NO:
        message = "FSDP is configured, but this is a single process without a process group."
        fix = "Start the script with `hf-fsdp launch`, `accelerate launch`, `torchrun`, or several tasks of `srun`; "
        fix += "a single rank with `--num_processes 1`."
        raise SpecError([Problem(code="FSDP-E601", message=message, fix=fix)])
    if state.distributed_type in (utils.DistributedType.MULTI_CPU, utils.DistributedType.FSDP):
        _remove_index_of_cpu(state)  # PartialState may have been created before it was hooked
        private.set_in_states(state, distributed_type=utils.DistributedType.FSDP)
        state.fsdp_plugin = plugin


def _is_cpu_rank(spec: FsdpSpec) -> bool:
    """Return whether a launcher started this process as a rank on the CPU. Starts the process group of a single rank.

    Accelerate treats a CPU rank as a process without a launcher unless ``cpu`` is set, and ``accelerate launch`` sets
    neither rank nor address for a single rank.
    """
    if accelerator_type() != "cpu" and not spec.launch.use_cpu:
        return False
    if "RANK" not in os.environ:
        if spec.launch.num_processes != 1 or "ACCELERATE_USE_CPU" not in os.environ:
            return False
        patching.changes().set_variables(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if os.environ.get("WORLD_SIZE") == "1" and not dist.is_initialized():
        patching.changes().set_variables(LOCAL_RANK=str(launched_local_rank()))
        dist.init_process_group(DEVICES["cpu"].process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    return True
