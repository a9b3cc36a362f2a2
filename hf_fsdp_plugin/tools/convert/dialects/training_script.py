"""Reads the configs of training scripts, axolotl, LLaMA-Factory and ms-swift.

Such a config contains arguments of ``TrainingArguments``, and names files: a config of FSDP or of DeepSpeed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.sources.config_tree import (
    ConfigEntry,
    ConfigFile,
    ConfigFileError,
    Node,
    config_tree,
    from_python,
    parse_text,
)
from hf_fsdp_plugin.sources.interface import FSDP_SCOPES
from hf_fsdp_plugin.sources.script_objects import add_distributed_config
from hf_fsdp_plugin.tools.convert.dialects.interface import (
    ConfigDialect,
    DialectDocument,
    DialectReading,
    is_off,
    load_yaml,
    marked_by,
)

_SCOPES: Final[tuple[vocabulary.Scope, ...]] = ("training", "parallelism", "fsdp", "fp8")
_WHOLE_FILE: Final = ("fsdp_config", "distributed_type")
"""Keys of Accelerate's file, which ``fsdp_config`` may name, too."""
Presets = Mapping[str, Mapping[str, Any]]
"""Name of a preset -> the config that it stands for."""


def read_training(
    reading: DialectReading,
    entries: Sequence[tuple[str, ConfigEntry]],
    *,
    config_enables: bool = False,
    presets: Presets | None = None,
) -> None:
    """Read arguments of ``TrainingArguments`` and other keys of the table, and the files that they name.

    Args:
        entries: path in the table and entry of each key.
        config_enables: whether ``fsdp_config`` enables FSDP without ``fsdp``, which Transformers ignores.
        presets: configs of DeepSpeed that have a name.
    """
    table, given = reading.dialect_of.table, {path: entry for path, entry in entries if not is_off(entry.value)}
    fsdp, deepspeed = given.get("fsdp"), given.get("deepspeed")
    if fsdp is not None and deepspeed is not None:
        message = f"{fsdp.key} and {deepspeed.key} are both set."
        reading.report("FSDP-E073", deepspeed, message, f"Remove {deepspeed.key} to train with FSDP.")
    for path, entry in entries:
        if path in ("bf16", "fp16") and "fp8" in given:
            reading.ignore(entry, "With fp8, everything but linear layers computes in bf16.")
        elif table.row(path) is table.rows.get("*", ...) and vocabulary.find_row(path, ("training", "parallelism")):
            reading.path = path  # an argument of a script that is a setting
            reading.add_row(replace(table.rows["*"], path=path, fate="sets", why=""), entry)
        else:
            reading.add_path(path, entry)
    if deepspeed is not None:
        include_deepspeed(reading, deepspeed, given, presets or {})
        return
    if config_enables and any(path.startswith("fsdp_config") for path in given):
        reading.imply("launch.distributed_type", "FSDP")
    if any(s.name == "launch.distributed_type" and s.value == "FSDP" for s in reading.settings):
        return
    # The settings are inactive, because the config does not enable FSDP.
    others = [setting for setting in reading.settings if setting.name != "launch.distributed_type"]
    reading.settings = [replace(setting, inactive=True) for setting in others]
    reading.imply("launch.distributed_type", "NO", fsdp)
    reading.mentions_fsdp = False


def add_known(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add a key that the vocabulary has, or whose row in the table names a setting of the vocabulary."""
    section, _, name = reading.path.rpartition(".")
    is_inner = section in ("fsdp_config", "parallelism_config")
    scopes = FSDP_SCOPES if is_inner else _SCOPES
    if is_inner:
        entry = replace(entry, key=entry.key.rpartition(".")[2])  # as in a file with this section alone
    written = name if is_inner else reading.path
    row = vocabulary.find_row(written, scopes) or vocabulary.BY_NAME.get("".join(reading.row.to[:1]))
    if row is None:
        reading.report_unknown(entry, scopes)
    else:
        reading.add_entry(row, entry)


def add_config_file(reading: DialectReading, entry: ConfigEntry) -> None:
    """Read ``fsdp_config`` as the path of a file, or as JSON text."""
    if entry.value.is_empty:
        return
    text = str(entry.value.value).strip()
    try:
        if text.startswith("{"):
            _add_section(reading, parse_text(text, source=reading.source), entry.line)
        elif (file := find_file(reading, entry)) is not None:
            root = config_tree(file)
            if any(inner.key in _WHOLE_FILE for inner in root.value):
                reading.include(file)
                return
            source, reading.source = reading.source, file.shown
            _add_section(reading, root)
            reading.source = source
    except ConfigFileError as error:
        reading.problems.append(error.problem)


def _add_section(reading: DialectReading, root: Node, line: int | None = None) -> None:
    """Add the keys of ``fsdp_config``, which all have the same line if the section is text in another file."""
    for inner in root.value:
        entry = replace(inner, key=f"fsdp_config.{inner.key}", line=line or inner.line)
        reading.add_path(entry.key, entry)


def include_deepspeed(
    reading: DialectReading, entry: ConfigEntry, given: Mapping[str, ConfigEntry], presets: Presets
) -> None:
    """Read the config of DeepSpeed that a key names or contains.

    Args:
        given: the other keys, whose values replace ``auto`` in that config.
        presets: name -> config.
    """
    scalars = {path: other.value.plain() for path, other in given.items() if "." not in path}
    arguments = {name: value for name, value in scalars.items() if isinstance(value, bool | int | float | str)}
    text = str(entry.value.value)
    config = entry.value.plain() if entry.value.is_mapping else presets.get(text, text)
    is_content = isinstance(config, Mapping) or config.lstrip().startswith("{")
    if is_content:  # as a file, for messages and for its dialect
        data = (config if isinstance(config, str) else json.dumps(config)).encode()
        file = ConfigFile(path=Path(f"{entry.key}.json").absolute(), shown=f"{reading.source} {entry.key}", data=data)
    elif (found := find_file(reading, entry, presets)) is not None:
        file = found
    else:
        return
    reading.include(file, arguments | reading.arguments)


def find_file(reading: DialectReading, entry: ConfigEntry, names: Collection[str] = ()) -> ConfigFile | None:
    """Return the file that an entry names; ``None`` if there is none, which is reported as an error.

    Its path is relative to the working directory of a script: the present one, or a folder that contains the config.

    Args:
        names: names that the entry could have had instead of a path.
    """
    text, other = str(entry.value.value), reading.document.file
    path = Path(text).expanduser()
    folders = [Path(other.shown).parent, *other.path.parent.parents] if other is not None else []
    for candidate in (path, *(folder / path for folder in folders)):
        if os.path.isfile(candidate):  # false for a name that is too long, unlike Path.is_file
            return ConfigFile.at(candidate)
    message = f"{entry.key} names the file {text}, which does not exist."
    fix = "Correct the path; it is relative to the working directory, or to a folder that contains the config."
    nearest = vocabulary.nearest_word(text, list(names)) if "." not in text else ""
    reading.report("FSDP-E001", entry, message, vocabulary.did_you_mean(nearest, fix))
    return None


HANDLERS: Final = {
    "sets": add_known,
    "fsdp": DialectReading.add_options,
    "fsdp_config": add_config_file,
    "deepspeed": lambda reading, entry: None,
}
"""Handlers of the keys of ``TrainingArguments``. :func:`read_training` reads the config of DeepSpeed last."""


TRAINING_SCRIPT: Final = ConfigDialect(
    name="training_script",
    title="a training script",
    marks=marked_by(vocabulary.TRAINING_FILE_MARKS),
    handlers=HANDLERS,
    read=lambda reading: read_training(reading, reading.leaves()),
    own_script=True,
)


def _read_axolotl(reading: DialectReading) -> None:
    entries = reading.leaves()
    if "deepspeed" not in reading.found or is_off(reading.found["deepspeed"].value):
        reading.imply("fsdp.version", "1")  # with DeepSpeed, the version is that of the converted file
    read_training(reading, entries, config_enables=True)


AXOLOTL: Final = ConfigDialect(
    name="axolotl",
    title="axolotl",
    marks=marked_by(vocabulary.PROGRAM_KEYS["axolotl"]),
    read=_read_axolotl,
    handlers=HANDLERS,
    own_script=True,
)


def _read_llama_factory(reading: DialectReading) -> None:
    entries, given = reading.leaves(), reading.found
    if "dist_config.name" in given:
        # The defaults of version 1.
        reading.imply("fsdp.version", "2")
        reading.imply("activation.checkpointing", "full")
        if "bf16" not in given:
            reading.imply("launch.mixed_precision", "bf16")
            reading.imply("precision.param", "bf16")
    read_training(reading, entries)
    file = given.get("dist_config.config_file")
    if file is not None and not file.value.is_empty:
        include_deepspeed(reading, file, given, {})


LLAMA_FACTORY: Final = ConfigDialect(
    name="llama_factory",
    title="LLaMA-Factory",
    marks=marked_by(vocabulary.PROGRAM_KEYS["LLaMA-Factory"]),
    read=_read_llama_factory,
    own_script=True,
    handlers={**HANDLERS, "dist_config.config_file": HANDLERS["deepspeed"]},
)


def _marks_of_swift(document: DialectDocument) -> Sequence[ConfigEntry]:
    keys = {key: entry for key, entry in document.keys().items() if not key.startswith("_")}
    if set(keys) == {"fsdp", "fsdp_config"}:  # the file of a preset
        return list(keys.values())
    return [entry for key, entry in keys.items() if key in vocabulary.PROGRAM_KEYS["ms-swift"]]


def _read_swift(reading: DialectReading) -> None:
    """Read arguments of ms-swift, and its presets: ``fsdp: fsdp2``, ``deepspeed: zero3``."""
    expanded: list[tuple[str, ConfigEntry]] = []
    for path, entry in reading.leaves():
        is_preset = path == "fsdp" and "shard" not in entry.value.text and not entry.value.is_empty
        expanded += _expand_preset(reading, entry) if is_preset else [(path, entry)]
    read_training(reading, expanded, presets=load_yaml("presets", yaml.SafeLoader)["deepspeed_of_swift"])


def _expand_preset(reading: DialectReading, entry: ConfigEntry) -> Iterator[tuple[str, ConfigEntry]]:
    """Yield the keys in the preset or the file that ``fsdp`` names."""
    presets = load_yaml("presets", yaml.SafeLoader)["fsdp_of_swift"]
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


MS_SWIFT: Final = ConfigDialect(
    name="ms_swift",
    title="ms-swift",
    marks=_marks_of_swift,
    handlers=HANDLERS,
    own_script=True,
    read=_read_swift,
)


def _read_distributed_config(reading: DialectReading) -> None:
    entries = reading.document.root.value
    reading.mentions_fsdp = add_distributed_config(reading, entries)
    for entry in entries:
        reading.record_read(entry.key, entry)


DISTRIBUTED_CONFIG: Final = ConfigDialect(
    name="distributed_config",
    title="DistributedConfig",
    marks=marked_by(vocabulary.PROGRAM_KEYS["DistributedConfig"]),
    read=_read_distributed_config,
)
