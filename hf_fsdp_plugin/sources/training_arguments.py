"""Reads the FSDP settings of ``TrainingArguments`` from its keyword arguments. Transformers is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.sources.accelerate_file import add_fsdp_section
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.config_file import ConfigFile, ConfigFiles
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import SourceSettings
from hf_fsdp_plugin.sources.tree import Node
from hf_fsdp_plugin.sources.yaml_tree import ConfigFileError, dict_tree, parse_text

SOURCE = "TrainingArguments"
KEYS = ("bf16", "fp16", "fp8", "gradient_checkpointing", "activation_checkpointing", "use_cpu", "no_cuda")
"""Arguments that are settings whether or not FSDP is enabled."""
OLD_KEYS = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
"""Arguments of Transformers 4 that Transformers 5 removed."""

FsdpOptions = bool | str | Enum | Sequence[str | Enum] | None
FsdpConfig = Mapping[str, Any] | str | Path | None


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
    old_arguments: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``. As in Transformers, only ``fsdp`` enables FSDP.

    Args:
        fsdp: options as text or list, or a bool.
        fsdp_config: a dict, the path of a JSON or YAML file, or JSON text.
        old_arguments: the arguments in ``OLD_KEYS``, which are part of ``fsdp_config`` today.
        flags: argument -> the flag as written, for arguments from a command line.
    """
    if fsdp is not None:
        out.add_key("training", "fsdp", fsdp, written=flags.get("fsdp", ""), is_switch="fsdp" in flags and fsdp is True)
    inner = Collector(out.source)
    for key, value in (old_arguments or {}).items():
        inner.add_key("fsdp", key, value)
    if isinstance(fsdp_config, str) and not fsdp_config.strip():
        if out.mentions_fsdp:
            written = flags.get("fsdp_config", "fsdp_config")
            message = f"{written} is {fsdp_config!r}, which is not a value."
            out.report("FSDP-E050", entry_of(written, fsdp_config), message, "Write JSON, or the path of a file.")
    elif fsdp_config is not None and fsdp_config != {}:
        _add_config(inner, fsdp_config, files)
    if out.mentions_fsdp:
        out.extend(inner)
    else:
        out.set_inactive(inner.settings, inner.problems, inner.not_set)


def _add_config(out: Collector, fsdp_config: FsdpConfig, files: ConfigFiles) -> None:
    try:
        tree, source = _config_tree(fsdp_config, out.source, files)
    except ConfigFileError as error:
        out.problems.append(error.problem)
        return
    inner = Collector(source)
    add_fsdp_section(inner, tree)
    out.extend(inner)


def read_config(config: FsdpConfig) -> dict[str, Any]:
    """Return the content of a valid ``fsdp_config``: a dict, the path of a file, or JSON text."""
    if not config:
        return {}
    content = config if isinstance(config, Mapping) else _config_tree(config, "", ConfigFiles())[0].plain()
    inner = content.get("fsdp_config")  # a whole file of Accelerate
    return dict(inner if isinstance(inner, Mapping) else content)


def _config_tree(config: FsdpConfig, source: str, files: ConfigFiles) -> tuple[Node, str]:
    if isinstance(config, Mapping):
        return dict_tree(config, source=source), source
    if not isinstance(config, (str, Path)):
        message = f"fsdp_config is {entry_of('', config).value.shown}; expected a dict, a path or JSON text."
        raise ConfigFileError("FSDP-E034", message, "Pass a dict.", source=source)
    text = str(config).strip()
    if text.startswith("{"):
        return parse_text(text, source=f"{source} fsdp_config", is_json=True), f"{source} fsdp_config"
    file = ConfigFile.at(config)
    return files.tree(file), file.shown
