"""Reads the config: a file of Accelerate, an ``fsdp_config`` section alone, a training script's config file, or a dict.

Configs of other programs are read by ``tools.convert.dialects``, which only commands import. Here, they are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, ConfigFileError, Node, config_tree, parse_text
from hf_fsdp_plugin.sources.interface import FSDP_SCOPES, Collector, Sources, SourceSettings, entry_of
from hf_fsdp_plugin.vocabulary import BY_KEY, PROGRAM_KEYS, TRAINING_FILE_MARKS, Scope, plain_key, word_of

SOURCE = "config"
MARKS_OF_ACCELERATE: Final = frozenset({"distributed_type", "compute_environment"})
"""Keys that only Accelerate's file has."""
_WHOLE_FILE: Final[tuple[Scope, ...]] = ("launch", "training")
"""The scopes of the keys at the top level of a file of Accelerate; a config may also be only a section of it."""
FsdpConfig = Mapping[str, Any] | str | Path | None
"""A dict, the path of a JSON or YAML file, or JSON text."""


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.config``; ``None`` if there is none. A config of another program is an error."""
    if (config := sources.config) is None or sources.converted is not None:
        return sources.converted
    out = Collector(config.shown if isinstance(config, ConfigFile) else SOURCE)
    try:
        root = _own_tree(config, out.source, allows_deepspeed=sources.allows_deepspeed)
    except ConfigFileError as error:
        return SourceSettings(problems=[error.problem], family="accelerate")
    is_whole = any(("launch", plain_key(key, "launch")) in BY_KEY for key in _keys_of(root))
    out.add_mapping(root.value, _WHOLE_FILE if is_whole else ("fsdp", "parallelism"))
    return out.result("accelerate")


def marks_of(root: Node, names: Collection[str]) -> list[ConfigEntry]:
    """Return the entries of a config with these names: of the top level, or with a dot of a section of it."""
    found = []
    for entry in root.value:
        key = entry.key.strip().lower()
        inner = entry.value.value if entry.value.is_mapping else ()
        found += [entry] if key in names else [each for each in inner if f"{key}.{each.key.strip()}" in names]
    return found


def is_for_deepspeed(root: Node) -> bool:
    """Whether it is a file of Accelerate that selects DeepSpeed, with a section for it."""
    keys = {entry.key.strip(): entry.value for entry in root.value}
    section = keys.get("deepspeed_config")
    word = word_of(keys["distributed_type"].value) if "distributed_type" in keys else ""
    return word == "deepspeed" and section is not None and not section.is_empty


def _own_tree(config: ConfigFile | Mapping[str, Any] | str, source: str, *, allows_deepspeed: bool = False) -> Node:
    """Return the content of a config of Accelerate. Raises ``ConfigFileError`` for a config of another program.

    Args:
        config: a file, a dict, or JSON text.
        allows_deepspeed: as in :class:`Sources`.
    """
    if isinstance(config, ConfigFile) and config.is_script:
        fix = "Give the config file of the training. In a shell script, write hf-fsdp launch for accelerate launch; it "
        fix += "has the same flags. Write settings of Python code as flags, or in a config file."
        raise ConfigFileError("FSDP-E060", "settings are not read from scripts.", fix, source=source)
    root = parse_text(config, source=source) if isinstance(config, str) else config_tree(config)
    found = [(program, entry) for program, names in PROGRAM_KEYS.items() for entry in marks_of(root, names)]
    if not found and not marks_of(root, MARKS_OF_ACCELERATE):
        found = [("a training script", entry) for entry in marks_of(root, TRAINING_FILE_MARKS)]
    if not found and (allows_deepspeed or not is_for_deepspeed(root)):
        return root
    what, line = "a config of Accelerate for DeepSpeed", None
    if found:
        program, entry = found[0]
        what, line = f"a config of {program}, which the key {entry.key} shows", entry.line
    name = config.shown if isinstance(config, ConfigFile) else "FILE"
    fix = f"Convert it: hf-fsdp convert {name} --out fsdp.yaml. hf-fsdp launch --config_file {name} converts it first."
    raise ConfigFileError("FSDP-E060", f"this is {what}, not a config of FSDP.", fix, source=source, line=line)


def add_fsdp_config(out: Collector, config: FsdpConfig | ConfigFile) -> None:
    """Add an ``fsdp_config``: the content of a section, or of a whole file of Accelerate."""
    try:
        root, source = _parse_fsdp_config(config, out.source)
    except ConfigFileError as error:
        out.problems.append(error.problem)
        return
    inner = Collector(source)
    is_whole = not _keys_of(root).isdisjoint({"fsdp_config", "distributed_type"})
    inner.add_mapping(root.value, _WHOLE_FILE if is_whole else FSDP_SCOPES)
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
            source = f"{source} fsdp_config"
            return _own_tree(text, source), source
        config = ConfigFile.at(config)
    if isinstance(config, Mapping | ConfigFile):
        source = config.shown if isinstance(config, ConfigFile) else source
        return _own_tree(config, source), source
    message = f"fsdp_config is {entry_of('', config).value.shown}; expected a dict, a path or JSON text."
    raise ConfigFileError("FSDP-E055", message, "Pass a dict.", source=source)


def _keys_of(root: Node) -> set[str]:
    return {entry.key.strip().lower() for entry in root.value}
