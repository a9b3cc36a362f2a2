"""Accelerate's FSDP plugin, filled from a spec: complete, so that nothing is left for the environment to decide."""

from __future__ import annotations

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

from hf_fsdp_plugin.spec.model import FsdpSpec, StateDictKind
from hf_fsdp_plugin.strategies import STRATEGIES

_STATE_DICT_TYPES: dict[StateDictKind, StateDictType] = {
    "full": StateDictType.FULL_STATE_DICT,
    "sharded": StateDictType.SHARDED_STATE_DICT,
    "local": StateDictType.LOCAL_STATE_DICT,
}
_STATE_DICT_CONFIGS: dict[StateDictType, tuple[type, type]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


class PlannedFsdpPlugin(FullyShardedDataParallelPlugin):
    """What Accelerate and the Trainer ask an FSDP plugin for, answered from a spec.

    The stock constructor reads fifteen environment variables for what it was not given, writes one, and needs a GPU for
    ``sync_module_states``. This one does none of that: it never calls it.

    Attributes:
        spec: what was asked. The plan is made from it when a model is prepared, not before.
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
        self.set_state_dict_type(_STATE_DICT_TYPES[spec.checkpoint.state_dict])

    @property
    def state_dict_kind(self) -> StateDictKind:
        """How checkpoints are written now; scripts change it before the last save (``set_state_dict_type``)."""
        return next(kind for kind, kind_type in _STATE_DICT_TYPES.items() if kind_type is self.state_dict_type)

    def set_state_dict_type(self, state_dict_type: StateDictType | str | int | None = None) -> None:
        """Choose how checkpoints are written: torch's enum, its number, or a name with or without ``_STATE_DICT``."""
        if state_dict_type is not None:
            self.state_dict_type = _read_state_dict_type(state_dict_type)
        config, optim_config = _STATE_DICT_CONFIGS[self.state_dict_type]
        self.state_dict_config, self.optim_state_dict_config = config(), optim_config()

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Nothing: the plan decides each dtype. Accelerate calls it with one dtype for all of them."""

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing: the plan lists the units. The stock method rewrites the plugin for the first model it sees."""


def dynamo_plugin(spec: FsdpSpec) -> TorchDynamoPlugin | None:
    """Accelerate's settings of ``torch.compile``, where the spec has any; a launcher says the same by environment."""
    said = {str(key).removeprefix("dynamo_"): value for key, value in spec.launch.dynamo_config.items()}
    if not said:
        return None
    return TorchDynamoPlugin(
        backend=str(said.get("backend", "no")),
        mode=said.get("mode"),
        fullgraph=said.get("use_fullgraph"),
        dynamic=said.get("use_dynamic"),
        use_regional_compilation=said.get("use_regional_compilation"),
    )


def _cpu_offload(spec: FsdpSpec) -> CPUOffload | OffloadPolicy:
    if spec.fsdp.version == 1:
        return CPUOffload(offload_params=spec.offload.params)
    return CPUOffloadPolicy(pin_memory=spec.offload.pin_memory) if spec.offload.params else OffloadPolicy()


def _read_state_dict_type(value: StateDictType | str | int) -> StateDictType:
    if isinstance(value, StateDictType):
        return value
    text = str(value).strip().upper()
    if text.isdigit() and int(text) in {kind.value for kind in StateDictType}:
        return StateDictType(int(text))
    try:
        return StateDictType[text if text.endswith("_STATE_DICT") else f"{text}_STATE_DICT"]
    except KeyError:
        raise ValueError(
            f"state_dict_type {value!r} is none of full, sharded, local (or 1, 2, 3 as in torch)."
        ) from None
