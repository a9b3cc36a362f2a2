"""Accelerate's FSDP plugin, filled from a spec, and the replacement of the stock plugin's constructor.

The fields have torch's types because third-party code reads them; this package does not. TRL's ``prepare_fsdp``,
for example, wraps a reference model with the plugin's fields as arguments of ``FullyShardedDataParallel``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.environment import set_loading_variables
from hf_fsdp_plugin.integrations.messages import print_warnings
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.model import FsdpSpec, StateDictKind
from hf_fsdp_plugin.strategies import STRATEGIES

_ARGUMENTS = "_hf_fsdp_arguments"
"""Attribute of a stock plugin: the arguments of its constructor, and the fields that the constructor set."""

_STATE_DICTS: dict[StateDictKind, tuple[StateDictType, type, type]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, ShardedOptimStateDictConfig),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig, LocalOptimStateDictConfig),
}
"""State dict type -> torch's enum member, and torch's options for the state dicts of model and optimizer."""


class PlannedFsdpPlugin(FullyShardedDataParallelPlugin):
    """The FSDP plugin of an Accelerator whose models are sharded by a plan.

    The stock constructor is never called: it reads fifteen environment variables, writes one, and needs a GPU for
        ``sync_module_states``.

    Attributes:
        spec: the settings, from which the plan is resolved when a model is prepared.
    """

    def __init__(self, spec: FsdpSpec) -> None:
        strategy = STRATEGIES[spec.sharding.strategy]
        version2 = spec.fsdp.version == 2
        self.spec = spec
        self.fsdp_version = spec.fsdp.version
        self.sharding_strategy = ShardingStrategy[strategy.torch_name]
        self.reshard_after_forward = strategy.reshards_after_forward if version2 else None
        self.backward_prefetch = (
            None if spec.prefetch.backward == "none" else BackwardPrefetch[f"BACKWARD_{spec.prefetch.backward.upper()}"]
        )
        self.mixed_precision_policy = None
        self.auto_wrap_policy = None
        self.cpu_offload = _cpu_offload(spec)
        self.ignored_modules = spec.wrap.ignored_modules or None
        self.limit_all_gathers = spec.prefetch.limit_all_gathers
        self.use_orig_params = spec.params.use_orig
        self.param_init_fn = None
        self.sync_module_states = spec.loading.sync_module_states
        self.forward_prefetch = spec.prefetch.forward
        self.activation_checkpointing = spec.activation.checkpointing != "none" and not spec.activation.native
        self.activation_checkpointing_offload = spec.activation.offload
        self.cpu_ram_efficient_loading = spec.loading.ram_efficient
        self.transformer_cls_names_to_wrap = list(spec.wrap.classes) or None
        self.min_num_params = spec.wrap.min_num_params or None
        self.set_state_dict_type(spec.checkpoint.state_dict)

    @property
    def state_dict_kind(self) -> StateDictKind:
        """Name of the current state dict type. Scripts may change the type before the last save."""
        return _parse_state_dict_type(self.state_dict_type)

    def set_state_dict_type(self, state_dict_type: StateDictType | str | int | None = None) -> None:
        """Set the state dict type: torch's enum, its number, or a name with or without ``_STATE_DICT``."""
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        self.state_dict_type, config, optim_config = _STATE_DICTS[self.state_dict_kind]
        self.state_dict_config, self.optim_state_dict_config = config(), optim_config()

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Do nothing: the plan contains all dtypes. Accelerate calls this method with a single dtype."""

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing: the plan lists the units. The stock method changes the plugin for the first model."""


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
    if not session.installed:
        original(**given)
        return
    # A setting that this constructor rejects may be supported. If it is not, the spec reports the reason.
    with suppress(ValueError, RuntimeError, KeyError, AttributeError):
        original(**given)
    setattr(plugin, _ARGUMENTS, (given, dict(vars(plugin))))


def spec_of_stock_plugin(plugin: Any) -> FsdpSpec | None:
    """Return the spec of a stock plugin and the session's sources.

    Returns ``None`` for a planned plugin, and for any plugin without ``install``.
    """
    if isinstance(plugin, PlannedFsdpPlugin) or not session.installed:
        return None
    if not hasattr(plugin, _ARGUMENTS):
        message = f"a {type(plugin).__name__} was created before install(), so its arguments are unknown."
        raise SpecError([Problem(code="FSDP-E603", message=message, fix="Call hf_fsdp_plugin.install() first.")])
    given, fields = getattr(plugin, _ARGUMENTS)
    assigned = {k: value for k, value in vars(plugin).items() if k != _ARGUMENTS and value is not fields.get(k)}
    spec = session.load(plugin_object={**given, **assigned})
    print_warnings(spec.problems)
    set_loading_variables(spec)
    return spec


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


def _cpu_offload(spec: FsdpSpec) -> CPUOffload | OffloadPolicy:
    if spec.fsdp.version == 1:
        return CPUOffload(offload_params=spec.offload.params)
    return CPUOffloadPolicy(pin_memory=spec.offload.pin_memory) if spec.offload.params else OffloadPolicy()


def _parse_state_dict_type(value: StateDictType | str | int) -> StateDictKind:
    name = (value.name if isinstance(value, StateDictType) else str(value)).strip().lower().removesuffix("_state_dict")
    for kind, (member, *_) in _STATE_DICTS.items():
        if name in (kind, str(member.value)):
            return kind
    raise ValueError(f"state_dict_type {value!r} is invalid. Use full, sharded or local, or 1, 2 or 3 as in torch.")
