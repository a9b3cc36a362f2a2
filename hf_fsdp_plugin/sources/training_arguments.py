"""Reads the FSDP settings of ``TrainingArguments`` from its keyword arguments. Transformers is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_file import add_fsdp_section
from hf_fsdp_plugin.sources.collector import Collector
from hf_fsdp_plugin.sources.config_file import ConfigFile, ConfigFiles
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import SourceSettings
from hf_fsdp_plugin.sources.tree import Node
from hf_fsdp_plugin.sources.yaml_tree import ConfigFileError, dict_tree, parse_text
from hf_fsdp_plugin.vocabulary import Scope

SOURCE = "TrainingArguments"
KEYS: Mapping[Scope, tuple[str, ...]] = {
    "training": ("bf16", "fp16", "gradient_checkpointing", "activation_checkpointing", "use_cpu", "no_cuda"),
    "fsdp": ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),  # removed from Transformers
}
"""Scope -> FSDP arguments other than ``fsdp`` and ``fsdp_config``."""

FsdpOptions = bool | str | Enum | Sequence[str | Enum] | None
FsdpConfig = Mapping[str, Any] | str | Path | None


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.training_arguments``. Arguments that are not related to FSDP are ignored."""
    arguments = sources.training_arguments
    if not arguments:
        return None
    out = Collector(SOURCE)
    for scope, key in ((scope, key) for scope, keys in KEYS.items() for key in keys):
        if arguments.get(key):  # False is the Trainer's default, not a setting
            out.add_key(scope, key, arguments[key])
    add_fsdp_arguments(out, arguments.get("fsdp"), arguments.get("fsdp_config"), sources.files)
    return out.result("training_arguments")


def add_fsdp_arguments(out: Collector, fsdp: FsdpOptions, fsdp_config: FsdpConfig, files: ConfigFiles) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``.

    Args:
        fsdp: options as text or list, or a bool.
        fsdp_config: a dict, the path of a JSON or YAML file, or JSON text.
    """
    if fsdp is not None:
        out.add_key("training", "fsdp", fsdp)
    if fsdp_config is None or fsdp_config == "" or fsdp_config == {}:
        return
    if fsdp is not None and not out.mentions_fsdp:
        out.problems.append(
            Problem(
                code="FSDP-E033",
                message=f"fsdp={fsdp!r} turns FSDP off, but fsdp_config is given.",
                fix="Set fsdp=True, or remove fsdp_config.",
                origin=Origin(source=out.source, spelling="fsdp", text=str(fsdp)),
            )
        )
    try:
        tree, source = _config_tree(fsdp_config, out.source, files)
    except ConfigFileError as error:
        out.problems.append(error.problem)
        return
    inner = Collector(source)
    add_fsdp_section(inner, tree)
    out.extend(inner)
    out.mentions_fsdp = True


def _config_tree(config: FsdpConfig, source: str, files: ConfigFiles) -> tuple[Node, str]:
    if isinstance(config, Mapping):
        return dict_tree(config, source=source), source
    text = str(config).strip()
    if text.startswith("{"):
        return parse_text(text, source=f"{source} fsdp_config", is_json=True), f"{source} fsdp_config"
    if not isinstance(config, (str, Path)):
        message = f"fsdp_config is {text!r}; expected a dict, a path or JSON text."
        raise ConfigFileError("FSDP-E034", message, "Pass a dict.", source=source)
    file = ConfigFile.at(config)
    return files.tree(file), file.shown
