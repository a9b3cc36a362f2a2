"""Reads the config: finds its dialect, or reads it as a config of Accelerate or of a training script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources import accelerate_file
from hf_fsdp_plugin.sources.dialects import (
    accelerate,
    axolotl,
    deepspeed,
    distributed_config,
    lightning,
    llama_factory,
    ms_swift,
    shell_script,
    training_script,
)
from hf_fsdp_plugin.sources.dialects.interface import ConfigDialect, DialectDocument, DialectReading, is_script
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources, SourceSettings
from hf_fsdp_plugin.sources.tree import ConfigEntry, ConfigFileError
from hf_fsdp_plugin.spellings import word_of

DIALECTS: Final[tuple[ConfigDialect, ...]] = (
    accelerate.DIALECT,
    deepspeed.DIALECT,
    axolotl.DIALECT,
    llama_factory.DIALECT,
    ms_swift.DIALECT,
    lightning.DIALECT,
    distributed_config.DIALECT,
    shell_script.DIALECT,
    training_script.DIALECT,
)
_MAX_DEPTH: Final = 4
_MARKS_OF_ACCELERATE: Final = ("distributed_type", "compute_environment")


def read(sources: Sources) -> SourceSettings | None:
    """Read ``sources.config``; ``None`` if there is none. A file of a dialect gives a ``DialectReading``."""
    read = _read_config(sources)
    if isinstance(read, DialectReading):
        read.finish()
    return read


def _read_config(sources: Sources, depth: int = 0) -> SourceSettings | None:
    """Read a config. ``depth``: the number of configs that include it."""
    if depth > _MAX_DEPTH:
        shown = sources.config.shown if isinstance(sources.config, ConfigFile) else "config"
        message, fix = f"more than {_MAX_DEPTH} configs include each other.", "Check the files that they name."
        problem = Problem(code="FSDP-E012", message=message, fix=fix, origin=Origin(source=shown))
        return SourceSettings(problems=[problem])
    if sources.config is None or sources.dialects == "off":
        return accelerate_file.read(sources)
    try:
        document = DialectDocument.of(sources)
    except ConfigFileError as error:
        return SourceSettings(problems=[error.problem], dialect="accelerate")
    found = {dialect.title: marks for dialect in DIALECTS if (marks := dialect.marks(document))}
    known = [dialect for dialect in DIALECTS if dialect.title in found]
    if known and not any(dialect.is_accelerate for dialect in known):
        found |= _marks_of_accelerate(document)
    if len(found) > 1:
        general = {dialect.title for dialect in known if dialect.is_general}
        known = [dialect for dialect in known if not dialect.is_general]
        found = {title: marks for title, marks in found.items() if title not in general}
    if len(found) > 1:
        return SourceSettings(problems=[_mixed(document, found)], dialect="accelerate")
    if not known and is_script(document.file):
        return SourceSettings(problems=[_nothing_found(document)], dialect="accelerate")
    if not known:
        return accelerate_file.read(sources)
    reading = DialectReading(
        source=document.shown, dialect_of=known[0], document=document, read_other=partial(_read_config, depth=depth + 1)
    )
    reading.mentions_fsdp = True
    known[0].read(reading)
    reading.result(reading.defaults)
    return reading


def _marks_of_accelerate(document: DialectDocument) -> dict[str, Sequence[ConfigEntry]]:
    entries = [entry for name, entry in document.keys().items() if word_of(name) in _MARKS_OF_ACCELERATE]
    return {"Accelerate": entries} if entries else {}


def _nothing_found(document: DialectDocument) -> Problem:
    message = "the script has no command or call that sets FSDP or DeepSpeed."
    fix = (
        "Give a shell script with accelerate launch, torchrun, deepspeed, swift, trl, axolotl or llamafactory-cli, or "
        "a Python script with FSDPStrategy, ModelParallelStrategy or DistributedConfig."
    )
    return Problem(code="FSDP-E075", message=message, fix=fix, origin=Origin(source=document.shown))


def _mixed(document: DialectDocument, found: Mapping[str, Sequence[ConfigEntry]]) -> Problem:
    """Return the error that a file has keys of several dialects."""
    firsts = sorted(((title, marks[0]) for title, marks in found.items()), key=lambda first: first[1].line or 0)
    places = [
        f"{entry.key} of {title}{f' in line {entry.line}' if entry.line is not None else ''}" for title, entry in firsts
    ]
    message = f"the file mixes configs of several programs: {', '.join(places)}."
    origin = Origin(source=document.shown, line=firsts[-1][1].line)
    return Problem(code="FSDP-E064", message=message, fix="Write one file for each of them.", origin=origin)
