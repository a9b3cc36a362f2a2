"""The only file that reaches into Accelerate and Transformers: what is replaced there, why, and until when.

Read against accelerate 1.15 and transformers 5.17 to 5.23. A process with hooks behaves as one without until
somebody asks for FSDP.

``AcceleratorState.__init__``
    CPU ranks with an FSDP plugin get DDP, and those of ``torchrun``, or a single one, no process group. Until
    Accelerate takes FSDP for ``MULTI_CPU``, and a rank without an accelerator for a CPU rank.
``PartialState.__init__``
    NCCL alone cannot clip or save offloaded parameters. Until Accelerate starts ``cpu:gloo,cuda:nccl`` for plugins too,
    not only for its own environment variables.
``Accelerator.__init__``
    An Accelerator without a plugin gets the session's spec; one with a stock plugin gets what that plugin was given,
    beside what stands around the script. As long as there is ``install``.
``FullyShardedDataParallelPlugin.__init__``
    It refuses much that can be had, and does not tell what was said from what it filled in. As long as scripts build
    it under ``install``.
``Accelerator.prepare``, ``.prepare_model``
    Units, mesh, strategies and prefetch as planned. As long as there are plans.
``Accelerator.get_state_dict``, ``save_fsdp_model`` and its three siblings
    FSDP1's full state dict crashes on CPU ranks, ``local`` is refused under FSDP2. Until torch mends the one and
    Accelerate the other.
``Accelerator.save_state``, ``.load_state``, ``.save_model``
    Checkpoints are written in place, half-written ones load, older ones go before the new one is there, and a whole
    model is gathered on one rank. Until Accelerate stages its checkpoints.
``Accelerator.clip_grad_norm_``
    It goes by the config's version, not the model's, and by whether the parameters are all of a model's: else FSDP1's
    norm is that of one rank's shards, and two models of equal length raise. Until it looks at the parameters.
``Accelerator.end_training``
    The report is due before the process group goes.
``TrainingArguments.__post_init__``
    It refuses bf16 on CPU ranks that a launcher has chosen. Until it reads ``ACCELERATE_USE_CPU`` there.
``TrainingArguments._process_fsdp_args``
    It drops and refuses settings. As long as there is ``install``.
``Trainer.…``
    See :mod:`hf_fsdp_plugin.integrations.transformers.trainer`.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from hf_fsdp_plugin.devices import DEVICES, accelerator_type, available_device
from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.accelerate.fsdp_utils import PATCHED, replace_checkpoint_functions
from hf_fsdp_plugin.integrations.import_hooks import when_imported
from hf_fsdp_plugin.integrations.messages import tell, tell_warnings
from hf_fsdp_plugin.integrations.transformers.arguments import set_loading_environment
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.spec.model import FsdpSpec


def wrap_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, self, *args, **kwargs)``, once; ``original`` comes bound."""
    original = owner.__dict__[name]
    if hasattr(original, PATCHED):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original.__get__(self, type(self)), self, *args, **kwargs)

    setattr(method, PATCHED, original)
    setattr(owner, name, method)


def hook_accelerate() -> None:
    """Hook Accelerate, now or when it is imported."""
    when_imported("accelerate.state", _hook_states)
    when_imported("accelerate.accelerator", _hook_accelerator)
    when_imported("accelerate.utils.dataclasses", _hook_plugin)


def hook_transformers() -> None:
    """Hook the Trainer, now or when it is imported."""
    when_imported("transformers.training_args", _hook_training_arguments)
    when_imported("transformers.trainer", _hook_trainer)


def hook_trainer_checkpoints() -> None:
    """Hook the functions by which the Trainer reads and writes FSDP state, and nothing else of it."""
    when_imported("transformers.trainer", replace_checkpoint_functions)


def _hook_states(state: ModuleType) -> None:
    def init_partial(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.initialized and kwargs.get("backend") is None and not (args and args[0]) and not kwargs.get("cpu"):
            _start_both_backends({k: v for k, v in kwargs.items() if k == "timeout"})
        original(*args, **kwargs)

    def init_state(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin

        kinds = state.DistributedType
        plugin = kwargs.get("fsdp_plugin")
        if not isinstance(plugin, PlannedFsdpPlugin):
            original(*args, **kwargs)
            return
        if _is_cpu_rank(plugin.spec):
            kwargs["cpu"] = True
            if not self._shared_state and state.PartialState._shared_state.get("distributed_type") == kinds.NO:
                state.PartialState._reset_state()
        original(*args, **kwargs)
        if self.distributed_type == kinds.NO:
            raise SpecError([_single_process()])
        if self.distributed_type in (kinds.MULTI_CPU, kinds.FSDP):
            self.distributed_type = kinds.FSDP
            self.fsdp_plugin = plugin
            # Every later AcceleratorState() copies this over its own.
            state.PartialState._shared_state["distributed_type"] = kinds.FSDP

    wrap_method(state.PartialState, "__init__", init_partial)
    wrap_method(state.AcceleratorState, "__init__", init_state)


def _is_cpu_rank(spec: FsdpSpec) -> bool:
    """Whether a launcher started this process as a rank on the CPU, be it the only one.

    Accelerate takes such a rank for a process of its own unless told that the CPU is meant, and its own launcher tells
    a single one neither its rank nor where to meet: that one gets both here.
    """
    import torch.distributed as dist

    if accelerator_type() != "cpu" and not spec.launch.use_cpu:
        return False
    if "RANK" not in os.environ:
        if spec.launch.num_processes != 1 or "ACCELERATE_USE_CPU" not in os.environ:
            return False
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if os.environ.get("WORLD_SIZE") == "1" and not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        dist.init_process_group(DEVICES["cpu"].process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


def _start_both_backends(kwargs: dict[str, Any]) -> None:
    """Start a process group for the accelerator's tensors and for CPU tensors: offloaded gradients and saved states
    are on the CPU.
    """
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", -1))
    if local_rank < 0 or dist.is_initialized() or (device := available_device()).type == "cpu":
        return
    device.set_current(local_rank % device.count())
    dist.init_process_group(device.process_group_backend, **kwargs)


def _hook_plugin(module: ModuleType) -> None:
    cls = module.FullyShardedDataParallelPlugin
    signature = inspect.signature(cls.__init__)

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        if not session.is_installed():
            original(**given)
            return
        # Whatever it refuses here may be had all the same, or is refused with the reason by whoever makes the spec.
        with suppress(ValueError, RuntimeError, KeyError, AttributeError):
            original(**given)
        _given_to_plugin[id(self)] = (given, dict(vars(self)))
        weakref.finalize(self, _given_to_plugin.pop, id(self), None)

    wrap_method(cls, "__init__", init)


# By id: a dataclass with __eq__ is unhashable. What the constructor was given, and what it made of that.
_given_to_plugin: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}


def _spec_of_plugin(plugin: Any) -> FsdpSpec | None:
    """The spec of a stock plugin and the sources around the script; ``None`` for our own plugin, or without install."""
    from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin

    if isinstance(plugin, PlannedFsdpPlugin) or not session.is_installed():
        return None
    if id(plugin) not in _given_to_plugin:
        raise SpecError([_plugin_before_install(plugin)])
    given, made = _given_to_plugin[id(plugin)]
    assigned = {name: value for name, value in vars(plugin).items() if value is not made.get(name)}
    spec = session.current_session().load(plugin_object={**given, **assigned})
    tell_warnings(spec.problems)
    set_loading_environment(spec)
    return spec


def _plugin_before_install(plugin: Any) -> Problem:
    return Problem(
        severity="error",
        message=f"a {type(plugin).__name__} was built before install(): what it was given is not known any more.",
        fix="Call hf_fsdp_plugin.install() first.",
    )


def _hook_accelerator(module: ModuleType) -> None:
    cls = module.Accelerator
    signature = inspect.signature(cls.__init__)

    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, dynamo_plugin

        arguments = signature.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        plugin = arguments.get("fsdp_plugin")
        spec = session.current_spec() if plugin is None else _spec_of_plugin(plugin)
        if spec is not None:
            # A Trainer always says one, "no" where nobody did; its spec has heard its arguments already.
            said = None if session.in_trainer() else arguments.get("mixed_precision")
            plugin = PlannedFsdpPlugin(_with_mixed_precision(spec, said))
        if isinstance(plugin, PlannedFsdpPlugin):
            arguments["fsdp_plugin"] = plugin
            if (dynamo := dynamo_plugin(plugin.spec)) and not arguments.keys() & {"dynamo_plugin", "dynamo_backend"}:
                arguments["dynamo_plugin"] = dynamo
            param = plugin.spec.precision.param
            arguments["mixed_precision"] = param if param in ("bf16", "fp16") else "no"
        original(**arguments)
        if plugin is None and self.num_processes > 1 and session.is_installed():
            tell(
                f"neither the launcher, nor the environment, nor the script asks for FSDP: this Accelerator runs "
                f"{self.distributed_type.value} on {self.num_processes} ranks. Name a config: --config_file CONFIG."
            )

    def prepare(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_fsdp_plugin.integrations.accelerate.prepare import planned_plugin, prepare_objects

        return prepare_objects(self, args) if planned_plugin(self) else original(*args, **kwargs)

    def prepare_model(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_fsdp_plugin.integrations.accelerate import prepare as planned

        evaluation_mode = kwargs.get("evaluation_mode", args[1] if len(args) > 1 else False)
        if planned.planned_plugin(self) is None or evaluation_mode:
            return original(model, *args, **kwargs)
        return planned.prepare_model(self, model, [obj.optimizer for obj in self._optimizers])

    def get_state_dict(original: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_fsdp_plugin.backends.shard import plan_of
        from hf_fsdp_plugin.checkpoint.writing.state_files import full_model_state

        return original(model, *args, **kwargs) if plan_of(model) is None else full_model_state(model)

    def clip_grad_norm(
        original: Callable[..., Any], self: Any, parameters: Any, max_norm: Any, norm_type: Any = 2
    ) -> Any:
        from hf_fsdp_plugin.backends.clipping import clip_grad_norm as clip
        from hf_fsdp_plugin.integrations.accelerate.prepare import planned_plugin

        if planned_plugin(self) is None:
            return original(parameters, max_norm, norm_type)
        self.unscale_gradients()
        parameters = [parameters] if hasattr(parameters, "grad") else list(parameters)
        return clip(self._models, parameters, float(max_norm), float(norm_type))

    def save_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_planned_models(original, self, "save_state", *args, **kwargs)

    def load_state(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_planned_models(original, self, "load_state", *args, **kwargs)

    def save_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_planned_models(original, self, "save_model", *args, **kwargs)

    def end_training(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_fsdp_plugin.integrations.run_report import finish

        finish(self)
        return original(*args, **kwargs)

    wrap_method(cls, "__init__", init)
    wrap_method(cls, "prepare", prepare)
    wrap_method(cls, "prepare_model", prepare_model)
    wrap_method(cls, "get_state_dict", get_state_dict)
    wrap_method(cls, "clip_grad_norm_", clip_grad_norm)
    wrap_method(cls, "save_state", save_state)
    wrap_method(cls, "load_state", load_state)
    wrap_method(cls, "save_model", save_model)
    wrap_method(cls, "end_training", end_training)
    replace_checkpoint_functions(module)


def _with_planned_models(original: Callable[..., Any], accelerator: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Our way of saving and loading, for an accelerator that has a model sharded as planned."""
    from hf_fsdp_plugin.backends.shard import plan_of
    from hf_fsdp_plugin.integrations.accelerate import checkpoints as accelerate_checkpoints
    from hf_fsdp_plugin.integrations.accelerate.prepare import planned_plugin

    if planned_plugin(accelerator) is None or not any(plan_of(model) is not None for model in accelerator._models):
        return original(*args, **kwargs)
    return getattr(accelerate_checkpoints, name)(original, accelerator, *args, **kwargs)


def _with_mixed_precision(spec: Any, said: Any) -> Any:
    """``Accelerator(mixed_precision=…)`` in a script is stronger than the files around it."""
    if said is None or (said == "no" and not spec.asked("precision.param")):
        return spec
    param = said if said in ("bf16", "fp16") else "auto"
    if param == spec.precision.param:
        return spec
    origin = Origin(source="Accelerator()", spelling="mixed_precision", text=str(said))
    lost = Problem(
        severity="warning",
        setting="precision.param",
        origin=spec.origin("precision.param"),
        message=f"{spec.precision.param} is overruled by Accelerator(mixed_precision={said!r}) in the script.",
        fix="Say it in one place only.",
    )
    return replace(
        spec,
        precision=replace(spec.precision, param=param),
        origins={**spec.origins, "precision.param": origin},
        problems=(*spec.problems, lost) if spec.asked("precision.param") else spec.problems,
    )


def _hook_training_arguments(module: ModuleType) -> None:
    def process(original: Callable[..., Any], self: Any) -> Any:
        from hf_fsdp_plugin.integrations.transformers.arguments import process_fsdp_args

        return process_fsdp_args(original, self)

    def validate(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        from hf_fsdp_plugin.integrations.transformers.arguments import follow_launcher

        follow_launcher(self)
        original(*args, **kwargs)

    wrap_method(module.TrainingArguments, "__post_init__", validate)
    wrap_method(module.TrainingArguments, "_process_fsdp_args", process)


def _hook_trainer(module: ModuleType) -> None:
    from hf_fsdp_plugin.integrations.transformers import trainer

    replace_checkpoint_functions(module)
    for name, around in trainer.AROUND.items():

        def method(original: Any, self: Any, *args: Any, _around: Any = around, **kwargs: Any) -> Any:
            # A Trainer with the mixin has been through this already.
            if isinstance(self, trainer.FsdpTrainerMixin):
                return original(*args, **kwargs)
            return _around(original, self, *args, **kwargs)

        wrap_method(module.Trainer, name, method)


def _single_process() -> Problem:
    return Problem(
        severity="error",
        message="FSDP was asked for, but this is a single process without a process group.",
        fix="Start the script with `hf-fsdp launch`, `accelerate launch` or `torchrun`; one rank alone is asked for by "
        "`--num_processes 1`.",
    )
