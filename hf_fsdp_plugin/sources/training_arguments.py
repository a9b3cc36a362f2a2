"""Reads the FSDP settings of ``TrainingArguments`` from its keyword arguments. Transformers is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.sources.accelerate_file import FsdpConfig, add_fsdp_config
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.interface import ConfigFiles, Sources, SourceSettings

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
    add_fsdp_arguments(out, arguments.get("fsdp"), arguments.get("fsdp_config"), sources.files, old)
    return out.result("training_arguments")


def _is_default(value: Any) -> bool:
    """Whether a value is ``None``, ``False`` or 0, which are defaults of Transformers and not settings."""
    return value is None or (isinstance(value, int) and not value)


def add_fsdp_arguments(
    out: Collector,
    fsdp: FsdpOptions,
    fsdp_config: FsdpConfig,
    files: ConfigFiles,
    old_arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``. As in Transformers, only ``fsdp`` enables FSDP.

    Args:
        old_arguments: the arguments in ``OLD_KEYS``, which are part of ``fsdp_config`` today.
        flags: argument -> the flag as written, for arguments from a command line.
    """
    if fsdp is not None:
        out.add_key("training", "fsdp", fsdp, written=flags.get("fsdp", ""), is_switch="fsdp" in flags and fsdp is True)
    inner = Collector(out.source)
    for key, value in old_arguments.items():
        inner.add_key("fsdp", key, value)
    if isinstance(fsdp_config, str) and not fsdp_config.strip():
        if out.mentions_fsdp:
            written = flags.get("fsdp_config", "fsdp_config")
            message = f"{written} is {fsdp_config!r}, which is not a value."
            out.report("FSDP-E050", entry_of(written, fsdp_config), message, "Write JSON, or the path of a file.")
    elif fsdp_config is not None and fsdp_config != {}:
        add_fsdp_config(inner, fsdp_config, files)
    if out.mentions_fsdp:
        out.extend(inner)
    else:
        out.set_inactive(inner.settings, inner.problems, inner.not_set)
