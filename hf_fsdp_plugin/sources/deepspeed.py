"""Recognizes configs of DeepSpeed, and names the FSDP settings that have the same effect.

A config of DeepSpeed is not a source of settings. It is a JSON file, or the ``deepspeed_config`` section of
Accelerate's file, which has other keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

_MARKS: Final = frozenset(
    {
        "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "steps_per_print", "wall_clock_breakdown", "deepspeed_config_file", "zero_stage",
        "zero3_init_flag", "zero3_save_16bit_model",
    }
)  # fmt: skip
"""Keys that no config of FSDP has."""
_STRATEGIES: Final[Mapping[str, str]] = {"0": "NO_SHARD", "1": "SHARD_GRAD_OP", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}
"""ZeRO stage -> FSDP strategy. FSDP has no strategy that shards the optimizer state only."""


def is_deepspeed(keys: Iterable[str]) -> bool:
    """Whether a mapping with these keys is a config of DeepSpeed."""
    return not _MARKS.isdisjoint(key.strip().lower() for key in keys)


def equivalent_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the FSDP settings with the effect of a config of DeepSpeed, as lines of Accelerate's file."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    settings = []
    stage = str(zero.get("stage", config.get("zero_stage", ""))).strip()
    if stage in _STRATEGIES:
        settings.append(f"fsdp_sharding_strategy: {_STRATEGIES[stage]}")
    offloads = (_device(zero, "offload_optimizer"), _device(zero, "offload_param"))
    devices = (*offloads, config.get("offload_optimizer_device"), config.get("offload_param_device"))
    if any(str(device).strip().lower() in ("cpu", "nvme") for device in devices) or zero.get("cpu_offload") is True:
        settings.append("fsdp_offload_params: true")
    settings += [f"mixed_precision: {dtype}" for dtype in ("bf16", "fp16") if _is_enabled(config.get(dtype))]
    if zero.get("stage3_gather_16bit_weights_on_model_save") or _is_true(config.get("zero3_save_16bit_model")):
        settings.append("fsdp_state_dict_type: FULL_STATE_DICT")
    if isinstance(config.get("activation_checkpointing"), Mapping):
        settings.append("fsdp_activation_checkpointing: true")
    return settings


def _device(zero: Mapping[str, Any], key: str) -> Any:
    section = zero.get(key)
    return section.get("device") if isinstance(section, Mapping) else None


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and _is_true(section.get("enabled", False))


def _is_true(value: Any) -> bool:
    return value is True or str(value).strip().lower() == "true"
