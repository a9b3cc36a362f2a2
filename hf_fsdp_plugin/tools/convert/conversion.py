"""Converts a config of another program before a verb reads its settings, and shows what became of its keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from hf_fsdp_plugin.cli.output import text_width
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.text import fit_table, printable, wrap_words
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading, KeyOutcome
from hf_fsdp_plugin.tools.convert.dialects.reader import read


def with_converted_config(sources: Sources, script_arguments: Sequence[str] = (), *, converts: bool = False) -> Sources:
    """Return the sources with the settings of ``config``, if it is a config of another program.

    Args:
        script_arguments, converts: as for :func:`read`.
    """
    return replace(sources, converted=read(sources, script_arguments, converts=converts))


def print_conversion(converted: SourceSettings | None) -> None:
    """Print to stderr what each key of a config becomes; nothing for a config of FSDP."""
    if isinstance(converted, DialectReading):
        title = f"hf-fsdp: {converted.source}: the settings of {converted.dialect_of.title} are converted for FSDP"
        print(printable(title), file=sys.stderr)
        print_outcomes(converted.outcomes)


def print_outcomes(outcomes: Sequence[KeyOutcome]) -> None:
    """Print to stderr what each key becomes, and the keys without effect by their reason."""
    rows, without = [("place", "key", "becomes")], dict[str, list[str]]()
    for outcome in outcomes:
        if outcome.becomes:
            rows.append((outcome.origin.source_line, outcome.origin.written, ", ".join(outcome.becomes)))
        else:
            without.setdefault(outcome.why, []).append(outcome.origin.spelling)
    width = text_width(sys.stderr)
    lines = [fit_table(rows, width)]
    for why, keys in without.items():
        lines += wrap_words(printable(f"no effect: {', '.join(keys)}. {why}"), width)
    print("\n".join(lines), end="\n\n", file=sys.stderr, flush=True)
