"""Accelerate's FSDP plugin, filled from a spec, and the settings that a script gives to a plugin or an Accelerator.

The fields have torch's types because third-party code reads them; this package does not. TRL's ``prepare_fsdp``,
for example, wraps a reference model with the plugin's fields as arguments of ``FullyShardedDataParallel``.

Stock Accelerate reads ``accelerator.state.fsdp_plugin.min_num_params = …`` when it prepares a model. Here an assignment
changes the spec, from which the plan of the model is resolved (``PlannedFsdpPlugin.spec_for``). An assignment that
cannot have this effect is refused.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from typing import Any, Final, cast, get_args

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from hf_fsdp_plugin.backends.ranks.agreement import FirstCalls
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.patching import set_loading_variables
from hf_fsdp_plugin.integrations.session import attributes_in_block, session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.fsdp_plan import torch_dtype
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.plan.units import distributed_config_of
from hf_fsdp_plugin.plan.wrap_policy import spec_of_further_model
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.script_objects import PLUGIN, STATE_DICT_CONFIGS, is_of_peft, unused_options
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, StateDictKind
from hf_fsdp_plugin.spec.load import with_script_settings
from hf_fsdp_plugin.strategies import STRATEGIES

STATE_DICT_FIELDS: Final = frozenset({"state_dict_type", "state_dict_config", "optim_state_dict_config"})
"""Fields that scripts may change at any time. Each save reads the type; the options of torch have no effect."""
FIELDS: Final = frozenset(field.name for field in fields(FullyShardedDataParallelPlugin)) - STATE_DICT_FIELDS
"""Fields that are settings of the plan."""
_TORCH_TYPES: Final[Mapping[StateDictKind, fsdp.StateDictType]] = {
    kind: fsdp.StateDictType[f"{kind.upper()}_STATE_DICT"] for kind in get_args(StateDictKind)
}
_ARGUMENTS = "_hf_fsdp_arguments"
"""Attribute of a stock plugin: the arguments of its constructor, and the fields that the constructor set."""


class PlannedFsdpPlugin(FullyShardedDataParallelPlugin):
    """The FSDP plugin of an Accelerator whose models are sharded by a plan.

    The stock constructor is never called: it reads fifteen environment variables, writes one, and needs a GPU for
    ``sync_module_states``.

    Attributes:
        spec: the settings, from which the plan is resolved when a model is prepared.
        first_calls: the collective calls of the Accelerator whose first call waits for all ranks.
        adapted_optimizers: optimizers whose steps are adapted to the shards.
        later_optimizers: optimizers with the parameters of a model that is sharded before they are prepared.
        evaluated_models: the models that were sharded for evaluation only and still exist, in the order in which they
            were prepared: reference, teacher and reward models.
        state_dict_reason: why checkpoints have another state dict type than the requested one; empty without a reason.
        assigned: the fields that the script has assigned since the spec was made.
        is_in_use: whether a model has been prepared, so that the settings cannot change any more.
        parallelism_config: the script's ``ParallelismConfig``, whose sizes are in ``spec``.
    """

    parallelism_config: Any = None

    def __init__(self, spec: FsdpSpec) -> None:
        self.first_calls = FirstCalls()
        self.adapted_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.later_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.evaluated_models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.state_dict_reason = ""
        self.assigned: Mapping[str, Any] = {}
        self.is_in_use = False
        session().ask_for_fsdp()
        self.use_spec(spec)

    @classmethod
    def replacing(cls, plugin: Any, spec: FsdpSpec) -> PlannedFsdpPlugin:
        """Return a plugin with ``spec``. A stock plugin becomes it, so that the script's references stay valid."""
        if type(plugin) is not FullyShardedDataParallelPlugin:
            return cls(spec)
        plugin.__class__ = cls
        cls.__init__(plugin, spec)
        return cast(PlannedFsdpPlugin, plugin)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, and remember that a script assigned it. Report options of a state dict, which have no effect.

        Raises:
            SpecError: a model has been prepared, so the assignment would have no effect.
        """
        before = getattr(self, name, None)
        if name in FIELDS and not (value is before or (type(value) is type(before) and value == before)):
            if not self.is_in_use:
                self.assigned = {**self.assigned, name: value}
            elif not (is_of_peft(value) and self.spec.wrap.policy == "transformer"):
                raise refused_assignment(name, "a model has been prepared already", "Assign it before prepare().")
        if name in STATE_DICT_CONFIGS and (message := unused_options(name, value)):
            print_once(Problem(code="FSDP-N136", message=message, origin=Origin(source=PLUGIN)))
        self.__dict__[name] = value

    def spec_for(self, model: nn.Module, *, is_first: bool = True, is_trained: bool = True) -> FsdpSpec:
        """Return the settings with which a model is planned. Only here, settings change after they were checked.

        Fields that the script has assigned, and the ``DistributedConfig`` with which ``from_pretrained`` has sharded
        the first model, change the settings of the Accelerator. For a further model, wrap settings that do not fit
        are replaced.

        Raises:
            SpecError: an assignment cannot have an effect, or its value is invalid, or the ``DistributedConfig``
                conflicts with the other settings.
        """
        config = distributed_config_of(model)
        spec = spec_with_assignments(self.spec, self.assigned) if self.assigned else self.spec
        self.assigned = {}
        if is_first:
            spec = with_script_settings(spec, distributed_config=config)
        if spec != self.spec:
            kind = self.state_dict_kind
            self.use_spec(spec)
            self.set_state_dict_type(kind)
            print_warnings(spec.problems)
        self.is_in_use = True
        if is_first:
            return spec
        spec = spec_of_further_model(spec, model, is_trained=is_trained)
        return with_script_settings(spec, distributed_config=config)

    def use_spec(self, spec: FsdpSpec) -> None:
        """Set every field from ``spec``, as values of the settings and not as assignments of the script."""
        self.spec = spec
        strategy, prefetch, on_cpu = STRATEGIES[spec.sharding.strategy], spec.prefetch.backward, _runs_on_cpu(spec)
        self.__dict__.update(
            fsdp_version=spec.fsdp.version,
            sharding_strategy=fsdp.ShardingStrategy[strategy.torch_name],
            reshard_after_forward=strategy.reshards_after_forward if spec.fsdp.version == 2 else None,
            backward_prefetch=None if prefetch == "none" else fsdp.BackwardPrefetch[f"BACKWARD_{prefetch.upper()}"],
            mixed_precision_policy=_mixed_precision(spec),
            auto_wrap_policy=None,
            cpu_offload=_cpu_offload(spec),
            ignored_modules=spec.wrap.ignored_modules or None,
            limit_all_gathers=spec.prefetch.limit_all_gathers,
            use_orig_params=spec.params.use_orig,
            param_init_fn=None,
            # FSDP1's own broadcast refuses modules in CPU memory. The plan broadcasts on every device.
            sync_module_states=spec.loading.sync_module_states and not on_cpu,
            forward_prefetch=spec.prefetch.forward,
            activation_checkpointing=spec.activation.checkpointing != "none" and not spec.activation.native,
            activation_checkpointing_offload=spec.activation.offload,
            cpu_ram_efficient_loading=spec.loading.ram_efficient,
            transformer_cls_names_to_wrap=list(spec.wrap.classes) or None,
            min_num_params=spec.wrap.min_num_params or None,
        )
        self.set_state_dict_type(spec.checkpoint.state_dict)

    @property
    def state_dict_kind(self) -> StateDictKind:
        """Name of the current state dict type. Scripts may change the type before the last save."""
        kind = _parse_state_dict_type(self.state_dict_type)
        if kind == "full" and self.spec.checkpoint.storage:
            self.state_dict_reason = "in a storage, each rank uploads files of its own"
            return "sharded"
        return kind

    def set_state_dict_type(self, state_dict_type: fsdp.StateDictType | str | int | None = None) -> None:
        """Set the state dict type: torch's enum, its number, or a name with or without ``_STATE_DICT``."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        kind = self.state_dict_kind
        self.__dict__.update(
            state_dict_type=_TORCH_TYPES[kind],
            state_dict_config=getattr(fsdp, f"{kind.title()}StateDictConfig")(),
            optim_state_dict_config=getattr(fsdp, f"{kind.title()}OptimStateDictConfig")(),
        )

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Do nothing: the spec contains all dtypes. Accelerate calls this method with a single dtype."""

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Set ``auto_wrap_policy`` and, under FSDP1, ``ignored_modules`` to those of ``model``.

        Only code that wraps a model itself reads them. ``prepare`` uses the plan of each model.

        Raises:
            SpecError: the spec does not fit the model.
        """
        spec = spec_of_further_model(self.spec, model, is_trained=True)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        device_type = "cpu" if _runs_on_cpu(spec) else accelerator_type()
        plan = resolve(spec, model, world_size=world_size, device_type=device_type)
        units = {id(model.get_submodule(name)) for unit in plan.units for name in unit.modules if name}
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in units)
        self.__dict__["auto_wrap_policy"] = policy
        if self.fsdp_version == 1:
            self.__dict__["ignored_modules"] = [model.get_submodule(name) for name in plan.ignored_modules] or None


def planned_plugin(accelerator: Any) -> PlannedFsdpPlugin | None:
    """Return the accelerator's plugin if it was made from a spec, else ``None``."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, PlannedFsdpPlugin) else None


def has_sharded_model(accelerator: Any) -> bool:
    """Return whether the accelerator has prepared a model by a plan."""
    return planned_plugin(accelerator) is not None and any(plan_of(model) for model in prepared_models(accelerator))


def _replace_if(condition: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for replacements of methods of an Accelerator, or of a Trainer that has one.

    If ``condition(accelerator)`` is false, the original is called.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def replacement(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not condition(getattr(owner, "accelerator", owner)):
                return original(*args, **kwargs)
            return function(original, owner, *args, **kwargs)

        return replacement

    return decorate


if_planned = _replace_if(planned_plugin)
if_sharded = _replace_if(has_sharded_model)


def init_plugin(original: Callable[..., None], plugin: Any, *args: Any, **kwargs: Any) -> None:
    """Record the arguments of a stock plugin and suppress the constructor's errors, if ``install`` was called."""
    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    session().start_deferred()
    if not session().installed:
        original(**given)
        return
    session().ask_for_fsdp()
    # A setting that this constructor rejects may be supported. If it is not, the spec reports the reason.
    with suppress(ValueError, RuntimeError, KeyError, AttributeError):
        original(**given)
    setattr(plugin, _ARGUMENTS, (given, dict(vars(plugin))))


def spec_of_stock_plugin(plugin: Any, parallelism_config: Any = None) -> FsdpSpec | None:
    """Return the spec of a stock plugin, a ``ParallelismConfig`` and the session's sources.

    Returns ``None`` for a planned plugin, and for any plugin without ``install``.
    """
    if isinstance(plugin, PlannedFsdpPlugin) or not session().installed:
        return None
    if not hasattr(plugin, _ARGUMENTS):
        message = f"a {type(plugin).__name__} was created before install(), so its arguments are unknown."
        raise SpecError([Problem(code="FSDP-E603", message=message, fix="Call hf_fsdp_plugin.install() first.")])
    given, fields = getattr(plugin, _ARGUMENTS)
    assigned = {k: value for k, value in vars(plugin).items() if k != _ARGUMENTS and value is not fields.get(k)}
    spec = session().load(plugin_object={**given, **assigned}, parallelism_config=parallelism_config)
    print_warnings(spec.problems)
    set_loading_variables(spec)
    return spec


def with_type_of(planned: PlannedFsdpPlugin, plugin: Any) -> AbstractContextManager[None]:
    """Use the state dict type that a script assigned to a stock plugin in the block, if it assigned one."""
    fields: dict[str, Any] = getattr(plugin, _ARGUMENTS, ({}, {}))[1]
    value = getattr(plugin, "state_dict_type", None)
    is_assigned = value is not None and value != fields.get("state_dict_type")
    return attributes_in_block(planned, state_dict_type=value) if is_assigned else nullcontext()


def dynamo_plugin(spec: FsdpSpec) -> TorchDynamoPlugin | None:
    """Return Accelerate's ``torch.compile`` settings, which launchers set by variables; ``None`` if there are none."""
    given = {str(key).removeprefix("dynamo_"): value for key, value in spec.launch.dynamo_config.items()}
    written = {"mode": "mode", "fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
    written["use_regional_compilation"] = "use_regional_compilation"
    settings: dict[str, Any] = {name: given.get(key) for name, key in written.items()}
    return TorchDynamoPlugin(backend=str(given.get("backend", "no")), **settings) if given else None


def _runs_on_cpu(spec: FsdpSpec) -> bool:
    return spec.launch.use_cpu or accelerator_type() == "cpu"


def _mixed_precision(spec: FsdpSpec) -> fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None:
    """Return torch's policy of the spec's precision; ``None`` if FSDP1 casts nothing."""
    given = (spec.precision.param, spec.precision.reduce, spec.precision.output, spec.precision.buffer)
    param, reduce, output, buffer = (torch_dtype("unchanged" if dtype == "auto" else dtype) for dtype in given)
    if spec.fsdp.version == 2:
        return fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
    casts = param is not None or buffer is not None
    return fsdp.MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=buffer) if casts else None


def _cpu_offload(spec: FsdpSpec) -> fsdp.CPUOffload | fsdp.OffloadPolicy:
    on_cpu = _runs_on_cpu(spec)
    if spec.fsdp.version == 1:
        # On the CPU, shards are in CPU memory anyway; with offload, FSDP1 would try to pin them.
        return fsdp.CPUOffload(offload_params=spec.offload.params and not on_cpu)
    pins = spec.offload.pin_memory and not on_cpu
    return fsdp.CPUOffloadPolicy(pin_memory=pins) if spec.offload.params else fsdp.OffloadPolicy()


def _parse_state_dict_type(value: fsdp.StateDictType | str | int) -> StateDictKind:
    for kind, known in _TORCH_TYPES.items():
        if value is known or str(value).strip().lower() in (kind, f"{kind}_state_dict", str(known.value)):
            return kind
    raise ValueError(f"state_dict_type {value!r} is invalid. Use full, sharded or local, or 1, 2 or 3 as in torch.")


def spec_with_assignments(spec: FsdpSpec, assigned: Mapping[str, Any]) -> FsdpSpec:
    """Return ``spec`` with the fields that a script assigned, which override it with a warning.

    Raises:
        SpecError: a value is not supported, cannot have an effect any more, or conflicts with another setting.
    """
    if "cpu_ram_efficient_loading" in assigned:
        fix = "Set fsdp_cpu_ram_efficient_loading in the config."
        raise refused_assignment("cpu_ram_efficient_loading", "the model is loaded already", fix)
    if (unknown := next((name for name, value in assigned.items() if value is None), None)) is not None:
        raise refused_assignment(unknown, "None is not a value of this setting", "Assign the value that is meant.")
    changed = with_script_settings(spec, plugin_object=assigned)
    if changed.precision.param == "fp16" != spec.precision.param:
        reason = "fp16 needs a gradient scaler, which the Accelerator creates in its constructor"
        raise refused_assignment("mixed_precision_policy", reason, "Set mixed_precision: fp16 in the config.")
    return changed


def refused_assignment(name: str, reason: str, fix: str) -> SpecError:
    """Return the error that an assignment would have no effect."""
    message = f"accelerator.state.fsdp_plugin.{name} was assigned, but {reason}."
    return SpecError([Problem(code="FSDP-E632", message=message, fix=fix)])


def with_mixed_precision(spec: FsdpSpec, given: Any) -> FsdpSpec:
    """Return ``spec`` with the precision of ``Accelerator(mixed_precision=…)``, which overrides the sources.

    Raises:
        SpecError: the precision is fp8, which conflicts with other settings.
    """
    if given is None or (given == "no" and not spec.asked("precision.param")):
        return spec
    name, origin = "precision.param", Origin(source="Accelerator()", spelling="mixed_precision", text=str(given))
    given = str(given).lower()
    param: Any = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(given, "auto")
    values = {name: param}
    if given != spec.launch.mixed_precision and "fp8" in (given, spec.launch.mixed_precision):
        values["launch.mixed_precision"] = given
    elif param == spec.precision.param:
        return spec
    return with_script_settings(spec, values=values, origin=origin)


def update_fsdp_plugin_peft(original: Callable[..., None], model: Any, accelerator: Any) -> None:
    """Assign PEFT's policy, unless a source or the script has set a wrap policy, and report that it is not used.

    Assignments override the sources, but this one is not the user's choice: the Trainer makes it for every PEFT model.
    """
    plugin = planned_plugin(accelerator)
    if plugin is None or not (plugin.spec.asked("wrap.policy") or "auto_wrap_policy" in plugin.assigned):
        original(model, accelerator)
    elif plugin.spec.wrap.policy != "transformer" and "auto_wrap_policy" not in plugin.assigned:
        origin = plugin.spec.origin("wrap.policy")
        message = f"{origin.written} is used instead of PEFT's policy, which makes each layer a unit."
        fix = "Remove it to use PEFT's policy, which the Trainer assigns for models with adapters."
        print_once(Problem(code="FSDP-N680", setting="wrap.policy", origin=origin, message=message, fix=fix))
