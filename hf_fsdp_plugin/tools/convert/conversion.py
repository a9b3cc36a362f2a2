"""Converts a config of another program before a verb reads its settings, and shows what became of its keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from hf_fsdp_plugin.cli.output import text_width
from hf_fsdp_plugin.sources import accelerate_file
from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, ConfigFileError, config_tree
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.text import format_table, printable, wrap_words
from hf_fsdp_plugin.tools.convert.dialects import accelerate, deepspeed, interface, training_script

DIALECTS: Final[tuple[interface.ConfigDialect, ...]] = (
    accelerate.DIALECT,
    deepspeed.DIALECT,
    training_script.AXOLOTL,
    training_script.LLAMA_FACTORY,
    training_script.MS_SWIFT,
    training_script.DISTRIBUTED_CONFIG,
    training_script.TRAINING_SCRIPT,
)
_MAX_DEPTH: Final = 4


def with_converted_config(sources: Sources, script_arguments: Sequence[str] = (), *, converts: bool = False) -> Sources:
    """Return the sources with the settings of ``config``, if it is a config of another program.

    Args:
        script_arguments, converts: as for :func:`read`.
    """
    return replace(sources, converted=read(sources, script_arguments, converts=converts))


def print_conversion(converted: SourceSettings | None) -> None:
    """Print to stderr what each key of a config becomes; nothing for a config of FSDP."""
    if isinstance(converted, interface.DialectReading):
        title = f"hf-fsdp: {converted.source}: the settings of {converted.dialect_of.title} are converted for FSDP"
        print(printable(title), file=sys.stderr)
        print_outcomes(converted.outcomes)


def print_outcomes(outcomes: Sequence[interface.KeyOutcome]) -> None:
    """Print to stderr what each key becomes, and the keys without effect by their reason."""
    rows, without = [("place", "key", "becomes")], dict[str, list[str]]()
    for outcome in outcomes:
        if outcome.becomes:
            rows.append((outcome.origin.source_line, outcome.origin.written, ", ".join(outcome.becomes)))
        else:
            without.setdefault(outcome.why, []).append(outcome.origin.spelling)
    width = text_width(sys.stderr)
    lines = [format_table(rows, width=width)]
    for why, keys in without.items():
        lines += wrap_words(printable(f"no effect: {', '.join(keys)}. {why}"), width)
    print("\n".join(lines), end="\n\n", file=sys.stderr, flush=True)


def read(sources: Sources, script_arguments: Sequence[str] = (), *, converts: bool = False) -> SourceSettings | None:
    """Read ``sources.config``; ``None`` if there is none, or if it is one of FSDP.

    Args:
        script_arguments: words of the command line of the script. They replace ``auto`` in a config of DeepSpeed.
        converts: whether all values of ``auto`` must be known, and a config of DDP is read too.

    Returns:
        A :class:`DialectReading`, or the errors of a config that cannot be read.
    """
    reading = _read_config(sources, script_arguments, converts=converts)
    if isinstance(reading, interface.DialectReading):
        reading.finish()
    return reading


def _read_config(
    sources: Sources, script_arguments: Sequence[str], *, converts: bool, depth: int = 0
) -> SourceSettings | None:
    """Read a config. ``depth``: the number of configs that include it, each of which may be one of FSDP, too."""
    try:
        if sources.config is None:
            return None
        if isinstance(sources.config, ConfigFile) and sources.config.is_script:
            return accelerate_file.read(sources) if depth else None  # which refuses it
        document = interface.DialectDocument(
            root=config_tree(sources.config), sources=sources, script_arguments=script_arguments, converts=converts
        )
        dialect = _dialect_of(document)
        if depth > _MAX_DEPTH:
            message, fix = f"more than {_MAX_DEPTH} configs include each other.", "Check the files that they name."
            raise ConfigFileError("FSDP-E004", message, fix, source=document.shown)
        if dialect is None:
            return accelerate_file.read(sources) if depth else None
    except ConfigFileError as error:
        return SourceSettings(problems=[error.problem], family="accelerate")
    reading = interface.DialectReading(
        source=document.shown,
        dialect_of=dialect,
        document=document,
        mentions_fsdp=True,
        read_other=partial(_read_config, script_arguments=script_arguments, converts=converts, depth=depth + 1),
    )
    dialect.read(reading)
    return reading.result(reading.defaults)


def _dialect_of(document: interface.DialectDocument) -> interface.ConfigDialect | None:
    """Return the dialect of a config; ``None`` for Accelerate's own. Raises ``ConfigFileError`` if it is not clear."""
    found = {dialect.title: marks for dialect in DIALECTS if (marks := dialect.marks(document))}
    known = [dialect for dialect in DIALECTS if dialect.title in found]
    of_accelerate = interface.marked_by(accelerate_file.MARKS_OF_ACCELERATE)(document)
    if known and of_accelerate and accelerate.DIALECT not in known:
        found["Accelerate"] = of_accelerate
    general = training_script.TRAINING_SCRIPT  # its marks are also those of other dialects, which have precedence
    if len(found) > 1 and general in known:
        known.remove(general)
        del found[general.title]
    if len(found) > 1:
        raise _mixed(document, found)
    return known[0] if known else None


def _mixed(document: interface.DialectDocument, found: Mapping[str, Sequence[ConfigEntry]]) -> ConfigFileError:
    """Return the error that a file has keys of several dialects."""
    firsts = sorted(((title, marks[0]) for title, marks in found.items()), key=lambda first: first[1].line or 0)
    lines = [f" in line {entry.line}" if entry.line is not None else "" for _, entry in firsts]
    places = [f"{entry.key} of {title}{line}" for (title, entry), line in zip(firsts, lines, strict=True)]
    message = f"the file mixes configs of several programs: {', '.join(places)}."
    fix = "Write one file for each of them."
    return ConfigFileError("FSDP-E064", message, fix, source=document.shown, line=firsts[-1][1].line)
