"""Reads the config: Accelerate's file, only its ``fsdp_config`` section, a training script's config file, or a dict.

Configs of other programs are read by ``sources.dialects``. Here, one of DeepSpeed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.collector import FSDP_SCOPES, Collector, entry_of
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources, SourceSettings, config_tree
from hf_fsdp_plugin.sources.tree import ConfigFileError, Node, parse_text
from hf_fsdp_plugin.vocabulary import WORDS, Scope, find_row, plain_key

SOURCE = "config"
FsdpConfig = Mapping[str, Any] | str | Path | None
"""A dict, the path of a JSON or YAML file, or JSON text."""


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.config``; ``None`` if there is none. Raises ``ConfigFileError``."""
    if (config := sources.config) is None:
        return None
    root = config_tree(config)
    out = Collector(config.shown if isinstance(config, ConfigFile) else SOURCE)
    _add_config(out, root, is_whole=any(map(_is_top_level, _keys_of(root))), scopes=("fsdp", "parallelism"))
    return out.result("accelerate")


def add_fsdp_config(out: Collector, config: FsdpConfig | ConfigFile) -> None:
    """Add an ``fsdp_config``: the content of a section, or of a whole file of Accelerate."""
    try:
        root, source = _parse_fsdp_config(config, out.source)
    except ConfigFileError as error:
        out.problems.append(error.problem)
        return
    inner = Collector(source)
    is_whole = not _keys_of(root).isdisjoint({"fsdp_config", "distributed_type"})
    _add_config(inner, root, is_whole=is_whole, scopes=FSDP_SCOPES)
    out.extend(inner)


def read_fsdp_config(config: FsdpConfig) -> dict[str, Any]:
    """Return the content of a valid ``fsdp_config``, without reading its settings."""
    if not config:
        return {}
    content = config if isinstance(config, Mapping) else _parse_fsdp_config(config, "")[0].plain()
    inner = content.get("fsdp_config")  # a whole file of Accelerate
    return dict(inner if isinstance(inner, Mapping) else content)


def _parse_fsdp_config(config: FsdpConfig | ConfigFile, source: str) -> tuple[Node, str]:
    """Return the content and the name of its source."""
    if isinstance(config, str | Path):
        text = str(config).strip()
        if text.startswith("{"):
            return parse_text(text, source=f"{source} fsdp_config", is_json=True), f"{source} fsdp_config"
        config = ConfigFile.at(config)
    if isinstance(config, Mapping | ConfigFile):
        return config_tree(config), config.shown if isinstance(config, ConfigFile) else source
    message = f"fsdp_config is {entry_of('', config).value.shown}; expected a dict, a path or JSON text."
    raise ConfigFileError("FSDP-E034", message, "Pass a dict.", source=source)


def _add_config(out: Collector, root: Node, *, is_whole: bool, scopes: tuple[Scope, ...]) -> None:
    """Add a whole file of Accelerate, or only a section, whose keys are in `scopes`. Refuse a config of DeepSpeed."""
    if WORDS["deepspeed_keys"] & _keys_of(root):
        message = "this is a config of DeepSpeed, not of FSDP."
        fix = "Convert it with hf-fsdp convert, or pass it to hf-fsdp launch --config_file, which trains with FSDP."
        out.problems.append(Problem(code="FSDP-E060", message=message, fix=fix, origin=Origin(source=out.source)))
    elif is_whole:
        out.add_mapping(root.value, ("launch", "training"), misplaced=("fsdp", "parallelism"))
    else:
        out.add_mapping(root.value, scopes)


def _keys_of(root: Node) -> set[str]:
    return {entry.key.strip().lower() for entry in root.value}


def _is_top_level(key: str) -> bool:
    row = find_row(key, ("launch",))
    return row is not None and row.scope == "launch" and plain_key(key, "launch") in row.spellings
