"""Reads the FSDP settings of ``TrainingArguments`` from its keyword arguments. Transformers is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.sources.accelerate_file import FsdpConfig, add_fsdp_config
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.sources.tree import ConfigEntry

SOURCE = "TrainingArguments"
KEYS = ("bf16", "fp16", "fp8", "gradient_checkpointing", "activation_checkpointing", "use_cpu", "no_cuda")
"""Arguments that are settings whether or not FSDP is enabled."""
OLD_KEYS = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
"""Arguments of Transformers 4 that Transformers 5 removed."""

FsdpOptions = bool | str | Enum | Sequence[str | Enum] | None
"""Options as text or list, or a bool."""


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.training_arguments``. Arguments that are not related to FSDP are ignored."""
    arguments = sources.training_arguments
    if not arguments:
        return None
    out = Collector(SOURCE)
    given = {key: value for key, value in arguments.items() if not _is_default(value)}
    for key in KEYS:
        if key in given:
            out.add_key("training", key, given[key])
    old = {key: given[key] for key in OLD_KEYS if key in given}
    fsdp = entry_of("fsdp", arguments["fsdp"]) if arguments.get("fsdp") is not None else None
    add_fsdp_arguments(out, fsdp, arguments.get("fsdp_config"), old)
    return out.result("training_arguments")


def _is_default(value: Any) -> bool:
    """Whether a value is ``None``, ``False`` or 0, which are defaults of Transformers and not settings."""
    return value is None or (isinstance(value, int) and not value)


def add_fsdp_arguments(
    out: Collector,
    fsdp: ConfigEntry | None,
    fsdp_config: FsdpConfig,
    old_arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    config_key: str = "fsdp_config",
) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``. As in Transformers, only ``fsdp`` enables FSDP.

    Args:
        old_arguments: the arguments in ``OLD_KEYS``, which are part of ``fsdp_config`` today.
        config_key: the key or flag of ``fsdp_config`` as written.
    """
    if fsdp is not None:
        out.add_options(fsdp)
    inner = Collector(out.source)
    for key, value in old_arguments.items():
        inner.add_key("fsdp", key, value)
    if isinstance(fsdp_config, str) and not fsdp_config.strip():
        if out.mentions_fsdp:
            message = f"{config_key} is {fsdp_config!r}, which is not a value."
            out.report("FSDP-E050", entry_of(config_key, fsdp_config), message, "Write JSON, or the path of a file.")
    elif fsdp_config is not None and fsdp_config != {}:
        add_fsdp_config(inner, fsdp_config)
    out.extend(inner, active=out.mentions_fsdp)
