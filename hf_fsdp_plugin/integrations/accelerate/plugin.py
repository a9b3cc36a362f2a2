"""Accelerate's FSDP plugin, filled from a spec, and the replacement of the stock plugin's constructor.

The fields have torch's types because third-party code reads them; this package does not. TRL's ``prepare_fsdp``,
for example, wraps a reference model with the plugin's fields as arguments of ``FullyShardedDataParallel``.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from hf_fsdp_plugin.backends.ranks.collective_entry import FirstCalls
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, shared_state
from hf_fsdp_plugin.integrations.accelerate.specs import FIELDS, is_of_peft, refused_assignment, spec_with_assignments
from hf_fsdp_plugin.integrations.patching import set_loading_variables
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.plan.presharded import distributed_config_of
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.plan.wrap_policy import spec_of_further_model
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.accelerate_objects import (
    PLUGIN,
    STATE_DICT_CONFIGS,
    state_dict_options,
    unused_options,
)
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec, StateDictKind
from hf_fsdp_plugin.spec.load import with_distributed_config
from hf_fsdp_plugin.strategies import STRATEGIES

_ARGUMENTS = "_hf_fsdp_arguments"
"""Attribute of a stock plugin: the arguments of its constructor, and the fields that the constructor set."""

_STATE_DICTS: dict[StateDictKind, tuple[fsdp.StateDictType, type, type]] = {
    "full": (fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    "sharded": (fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    "local": (fsdp.StateDictType.LOCAL_STATE_DICT, fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}
"""State dict type -> torch's enum member, and torch's options for the state dicts of model and optimizer."""


class PlannedFsdpPlugin(FullyShardedDataParallelPlugin):
    """The FSDP plugin of an Accelerator whose models are sharded by a plan.

    The stock constructor is never called: it reads fifteen environment variables, writes one, and needs a GPU for
        ``sync_module_states``.

    Attributes:
        spec: the settings, from which the plan is resolved when a model is prepared.
        first_calls: the collective calls of the Accelerator whose first call waits for all ranks.
        later_optimizers: optimizers with the parameters of a model that is sharded before they are prepared.
        parallelism_config: the script's ``ParallelismConfig``, whose sizes are in ``spec``.
    """

    later_optimizers: weakref.WeakSet[torch.optim.Optimizer]
    parallelism_config: Any = None

    def __init__(self, spec: FsdpSpec) -> None:
        self.first_calls = FirstCalls()
        self.use_spec(spec)

    @classmethod
    def replacing(cls, plugin: Any, spec: FsdpSpec) -> PlannedFsdpPlugin:
        """Return a plugin with ``spec``. A stock plugin becomes it, so that the script's references stay valid."""
        if type(plugin) is not FullyShardedDataParallelPlugin:
            return cls(spec)
        plugin.__class__ = cls
        plugin.use_spec(spec)
        return cast(PlannedFsdpPlugin, plugin)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, and remember that a script assigned it. Report options of a state dict, which have no effect.

        Raises:
            SpecError: a model has been prepared, so the assignment would have no effect.
        """
        own = self.__dict__
        if name in FIELDS and not own.get("_is_changing", True) and not _equal(own.get(name), value):
            if not own["_is_in_use"]:
                own["_assigned"][name] = value
            elif not (is_of_peft(value) and self.spec.wrap.policy == "transformer"):
                raise refused_assignment(name, "a model has been prepared already", "Assign it before prepare().")
        if name in STATE_DICT_CONFIGS and (options := state_dict_options(value)):
            print_once(Problem(code="FSDP-N136", message=unused_options(name, options), origin=Origin(source=PLUGIN)))
        own[name] = value

    @property
    def assigned(self) -> Mapping[str, Any]:
        """The fields that the script has assigned since the spec was made."""
        return MappingProxyType(self.__dict__["_assigned"])

    def spec_for(self, model: nn.Module, *, is_first: bool = True, is_trained: bool = True) -> FsdpSpec:
        """Return the settings with which a model is planned. Only here, settings change after they were checked.

        Fields that the script has assigned, and the ``DistributedConfig`` with which ``from_pretrained`` has sharded
        the first model, change the settings of the Accelerator. For a further model, wrap settings that do not fit
        are replaced.

        Raises:
            SpecError: an assignment cannot have an effect, or its value is invalid, or the ``DistributedConfig``
                conflicts with the other settings.
        """
        own, config = self.__dict__, distributed_config_of(model)
        spec, assigned = self.spec, self.assigned
        if assigned:
            spec, own["_assigned"] = spec_with_assignments(spec, assigned), {}
        if is_first:
            spec = with_distributed_config(spec, config)
        if spec != self.spec:
            kind = self.state_dict_kind
            self.use_spec(spec)
            self.set_state_dict_type(kind)
            print_warnings(spec.problems)
        own["_is_in_use"] = True
        if is_first:
            return spec
        return with_distributed_config(spec_of_further_model(spec, model, is_trained=is_trained), config)

    def use_spec(self, spec: FsdpSpec) -> None:
        """Set every field from ``spec``, before the first model is prepared."""
        session.uses_fsdp = True
        own = self.__dict__
        own.setdefault("_assigned", {})
        own.setdefault("later_optimizers", weakref.WeakSet())
        own.update(_is_changing=True, _is_in_use=False)
        self._set_fields(spec)
        own["_is_changing"] = False

    def _set_fields(self, spec: FsdpSpec) -> None:
        strategy = STRATEGIES[spec.sharding.strategy]
        version2 = spec.fsdp.version == 2
        self.spec = spec
        self.fsdp_version = spec.fsdp.version
        self.sharding_strategy = fsdp.ShardingStrategy[strategy.torch_name]
        self.reshard_after_forward = strategy.reshards_after_forward if version2 else None
        self.backward_prefetch = (
            None
            if spec.prefetch.backward == "none"
            else fsdp.BackwardPrefetch[f"BACKWARD_{spec.prefetch.backward.upper()}"]
        )
        self.mixed_precision_policy = _mixed_precision(spec)
        self.auto_wrap_policy: Any = None
        self.cpu_offload = _cpu_offload(spec)
        self.ignored_modules: Any = spec.wrap.ignored_modules or None
        self.limit_all_gathers = spec.prefetch.limit_all_gathers
        self.use_orig_params = spec.params.use_orig
        self.param_init_fn = None
        # FSDP1's own broadcast refuses modules in CPU memory. The plan broadcasts on every device.
        self.sync_module_states = spec.loading.sync_module_states and not _runs_on_cpu(spec)
        self.forward_prefetch = spec.prefetch.forward
        self.activation_checkpointing = spec.activation.checkpointing != "none" and not spec.activation.native
        self.activation_checkpointing_offload = spec.activation.offload
        self.cpu_ram_efficient_loading = spec.loading.ram_efficient
        self.transformer_cls_names_to_wrap = list(spec.wrap.classes) or None
        self.min_num_params = spec.wrap.min_num_params or None
        self.set_state_dict_type(spec.checkpoint.state_dict)
        self._evaluated: list[weakref.ref[nn.Module]] = []

    @property
    def evaluated_models(self) -> list[nn.Module]:
        """The models that were sharded for evaluation only and still exist: reference, teacher and reward models."""
        return [model for reference in self._evaluated if (model := reference()) is not None]

    def add_evaluated(self, model: nn.Module) -> None:
        """Add a model to :attr:`evaluated_models`. Only a weak reference is kept, so that it can be deleted."""
        self._evaluated.append(weakref.ref(model))

    @property
    def state_dict_kind(self) -> StateDictKind:
        """Name of the current state dict type. Scripts may change the type before the last save."""
        return _parse_state_dict_type(self.state_dict_type)

    def set_state_dict_type(self, state_dict_type: fsdp.StateDictType | str | int | None = None) -> None:
        """Set the state dict type: torch's enum, its number, or a name with or without ``_STATE_DICT``."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        self.state_dict_type, config, optim_config = _STATE_DICTS[self.state_dict_kind]
        self.__dict__.update(state_dict_config=config(), optim_state_dict_config=optim_config())

    @contextmanager
    def with_state_dict_type(self, state_dict_type: fsdp.StateDictType | str | int | None) -> Iterator[None]:
        """Have another state dict type in the block; the same with ``None``."""
        kind = self.state_dict_kind
        self.set_state_dict_type(state_dict_type)
        try:
            yield
        finally:
            self.set_state_dict_type(kind)

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Do nothing: the spec contains all dtypes. Accelerate calls this method with a single dtype."""

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Set ``auto_wrap_policy`` and, under FSDP1, ``ignored_modules`` to those of ``model``.

        Only code that wraps a model itself reads them. ``prepare`` uses the plan of each model.

        Raises:
            SpecError: the spec does not fit the model.
        """
        spec = spec_of_further_model(self.spec, model, is_trained=True)
        plan = resolve(spec, model, world_size=_world_size(), device_type=_device_type(spec))
        units = {id(model.get_submodule(name)) for unit in plan.units for name in unit.modules if name}
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in units)
        self.__dict__["auto_wrap_policy"] = policy
        if self.fsdp_version == 1:
            self.__dict__["ignored_modules"] = [model.get_submodule(name) for name in plan.ignored_modules] or None


def _equal(before: Any, value: Any) -> bool:
    """Whether a value is the one that a field has. Values that cannot be compared differ."""
    try:
        return value is before or (type(value) is type(before) and bool(value == before))
    except (RuntimeError, TypeError, ValueError):
        return False


def planned_plugin(accelerator: Any) -> PlannedFsdpPlugin | None:
    """Return the accelerator's plugin if it was made from a spec, else ``None``."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, PlannedFsdpPlugin) else None


def has_planned_state() -> bool:
    """Return whether the state that all Accelerators of the process share has a plugin that was made from a spec."""
    return isinstance(shared_state().get("fsdp_plugin"), PlannedFsdpPlugin)


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
    session.start_deferred()
    if not session.installed:
        original(**given)
        return
    session.uses_fsdp = True
    # A setting that this constructor rejects may be supported. If it is not, the spec reports the reason.
    with suppress(ValueError, RuntimeError, KeyError, AttributeError):
        original(**given)
    setattr(plugin, _ARGUMENTS, (given, dict(vars(plugin))))


def spec_of_stock_plugin(plugin: Any, parallelism_config: Any = None) -> FsdpSpec | None:
    """Return the spec of a stock plugin, a ``ParallelismConfig`` and the session's sources.

    Returns ``None`` for a planned plugin, and for any plugin without ``install``.
    """
    if isinstance(plugin, PlannedFsdpPlugin) or not session.installed:
        return None
    if not hasattr(plugin, _ARGUMENTS):
        message = f"a {type(plugin).__name__} was created before install(), so its arguments are unknown."
        raise SpecError([Problem(code="FSDP-E603", message=message, fix="Call hf_fsdp_plugin.install() first.")])
    given, fields = getattr(plugin, _ARGUMENTS)
    assigned = {k: value for k, value in vars(plugin).items() if k != _ARGUMENTS and value is not fields.get(k)}
    spec = session.load(plugin_object={**given, **assigned}, parallelism_config=parallelism_config)
    print_warnings(spec.problems)
    set_loading_variables(spec)
    return spec


def assigned_state_dict_type(plugin: Any) -> Any:
    """Return the state dict type that a script assigned to a stock plugin; ``None`` if it is the constructor's."""
    fields: dict[str, Any] = getattr(plugin, _ARGUMENTS, ({}, {}))[1]
    value = getattr(plugin, "state_dict_type", None)
    return value if value != fields.get("state_dict_type") else None


def dynamo_plugin(spec: FsdpSpec) -> TorchDynamoPlugin | None:
    """Return Accelerate's ``torch.compile`` settings, which launchers set by variables; ``None`` if there are none."""
    given = {str(key).removeprefix("dynamo_"): value for key, value in spec.launch.dynamo_config.items()}
    if not given:
        return None
    return TorchDynamoPlugin(
        backend=str(given.get("backend", "no")),
        mode=given.get("mode"),
        fullgraph=given.get("use_fullgraph"),
        dynamic=given.get("use_dynamic"),
        use_regional_compilation=given.get("use_regional_compilation"),
    )


def _runs_on_cpu(spec: FsdpSpec) -> bool:
    return spec.launch.use_cpu or accelerator_type() == "cpu"


def _device_type(spec: FsdpSpec) -> str:
    return "cpu" if _runs_on_cpu(spec) else accelerator_type()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _mixed_precision(spec: FsdpSpec) -> fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None:
    """Return torch's policy of the spec's precision; ``None`` if FSDP1 casts nothing."""
    dtypes = {
        name: torch_dtype("unchanged" if dtype == "auto" else dtype)
        for name, dtype in asdict(spec.precision).items()
        if name != "fp32_modules"
    }
    param, reduce = dtypes["param"], dtypes["reduce"]
    if spec.fsdp.version == 2:
        return fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=dtypes["output"])
    if param is None and dtypes["buffer"] is None:
        return None
    return fsdp.MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=dtypes["buffer"])


def _cpu_offload(spec: FsdpSpec) -> fsdp.CPUOffload | fsdp.OffloadPolicy:
    if spec.fsdp.version == 1:
        # On the CPU, shards are in CPU memory anyway; with offload, FSDP1 would try to pin them.
        return fsdp.CPUOffload(offload_params=spec.offload.params and not _runs_on_cpu(spec))
    if not spec.offload.params:
        return fsdp.OffloadPolicy()
    return fsdp.CPUOffloadPolicy(pin_memory=spec.offload.pin_memory and not _runs_on_cpu(spec))


def _parse_state_dict_type(value: fsdp.StateDictType | str | int) -> StateDictKind:
    name = (
        (value.name if isinstance(value, fsdp.StateDictType) else str(value))
        .strip()
        .lower()
        .removesuffix("_state_dict")
    )
    for kind, (member, *_) in _STATE_DICTS.items():
        if name in (kind, str(member.value)):
            return kind
    raise ValueError(f"state_dict_type {value!r} is invalid. Use full, sharded or local, or 1, 2 or 3 as in torch.")
