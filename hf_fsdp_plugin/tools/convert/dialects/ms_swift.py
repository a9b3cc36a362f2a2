"""Reads the arguments of ms-swift in YAML or JSON, and its presets: ``fsdp: fsdp2``, ``deepspeed: zero3``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.sources.tree import ConfigEntry, ConfigFileError, config_tree, from_python
from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectDocument, DialectReading
from hf_fsdp_plugin.tools.convert.dialects.training_script import HANDLERS, find_file, load_presets, read_training
from hf_fsdp_plugin.vocabulary import PROGRAM_KEYS


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    keys = {key: entry for key, entry in document.keys().items() if not key.startswith("_")}
    if set(keys) == {"fsdp", "fsdp_config"}:  # the file of a preset
        return list(keys.values())
    return [entry for key, entry in keys.items() if key in PROGRAM_KEYS["ms-swift"]]


def read_arguments(reading: DialectReading, entries: Sequence[tuple[str, ConfigEntry]]) -> None:
    """Read arguments of ms-swift, in a file or on a command line."""
    expanded: list[tuple[str, ConfigEntry]] = []
    for path, entry in entries:
        is_preset = path == "fsdp" and "shard" not in entry.value.text and not entry.value.is_empty
        expanded += _expand_preset(reading, entry) if is_preset else [(path, entry)]
    read_training(reading, expanded, presets=load_presets()["deepspeed_of_swift"])


def _expand_preset(reading: DialectReading, entry: ConfigEntry) -> Iterator[tuple[str, ConfigEntry]]:
    """Yield the keys in the preset or the file that ``fsdp`` names."""
    presets = load_presets()["fsdp_of_swift"]
    if (config := presets.get(entry.value.text)) is None:
        if (file := find_file(reading, entry, presets)) is None:
            return
        try:
            config = config_tree(file).plain()
        except ConfigFileError as error:
            reading.problems.append(error.problem)
            return
    yield "fsdp", replace(entry, value=from_python(config.get("fsdp", "full_shard auto_wrap")))
    for key, value in {"fsdp_version": 2, **config.get("fsdp_config", {})}.items():
        inner = ConfigEntry(key=f"{entry.key}.{key}", line=entry.line, value=from_python(value))
        yield f"fsdp_config.{key}", inner


DIALECT: Final = ConfigDialect(
    name="ms_swift",
    title="ms-swift",
    marks=_marks,
    handlers=HANDLERS,
    own_script=True,
    read=lambda reading: read_arguments(reading, reading.leaves()),
)
