"""``hf-fsdp explain``: Print what a problem code means, with an example and the remedy. Without a code, list all codes.

Examples::

    hf-fsdp explain FSDP-E701
    hf-fsdp explain w711 --json
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from typing import NamedTuple

from hf_fsdp_plugin.cli.output import print_result
from hf_fsdp_plugin.problems import AREAS, CODE, UsageError
from hf_fsdp_plugin.text import format_table
from hf_fsdp_plugin.vocabulary import did_you_mean, nearest_word

_HEADING = re.compile(rf"## ({CODE.pattern}): (\S.*)")


class CodeDocumentation(NamedTuple):
    """The documentation of one problem code.

    Attributes:
        area: the package that reports the problem; also the name of the page.
        text: Markdown with the meaning, an example and the remedy, without the heading.
    """

    code: str
    title: str
    area: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", help="a code in any case, with or without FSDP- (default: list all codes)")


def run(args: argparse.Namespace) -> int:
    """Print one entry or the list of codes. Returns 0, or 2 for an unknown code."""
    entries = read_entries()
    if args.code is None:
        listed = [{"code": entry.code, "title": entry.title} for entry in entries.values()]
        return print_result(args, {"codes": listed}, format_table([tuple(row.values()) for row in listed]))
    # FSDP-E201, e201 and 201 are written for the same code.
    short = re.sub(r"[^A-Z0-9]", "", args.code.upper()).removeprefix("FSDP")
    entry = next((entry for code, entry in entries.items() if short in (code[-4:], code[-3:])), None)
    if entry is None:
        same_number = next((code for code in entries if short[1:] == code[-3:]), "")
        near = same_number or nearest_word(f"FSDP-{short}", entries, cutoff=0.8)
        hint = did_you_mean(near, "`hf-fsdp explain` lists all codes.")
        raise UsageError(f"unknown problem code '{args.code}'. {hint}")
    return print_result(args, entry._asdict(), f"{entry.code}: {entry.title}\n\n{entry.text}")


def read_entries() -> dict[str, CodeDocumentation]:
    """Read the entries of all pages in ``problem_pages/``, by code, ordered by number."""
    entries = []
    for area in AREAS.values():
        page = files("hf_fsdp_plugin") / "problem_pages" / f"{area}.md"
        entries += parse_page(page.read_text(encoding="utf-8"), area)
    return {entry.code: entry for entry in sorted(entries, key=lambda entry: entry.code[-3:])}


def parse_page(text: str, area: str) -> list[CodeDocumentation]:
    """Split a page into its entries. Headings inside fenced blocks do not count."""
    entries: list[tuple[str, str, list[str]]] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (heading := _HEADING.fullmatch(line)):
            entries.append((heading[1], heading[heading.lastindex or 0], []))
        elif entries and not (line.startswith("# ") and not fenced):
            entries[-1][2].append(line)
    return [
        CodeDocumentation(code=code, title=title, area=area, text="\n".join(lines).strip())
        for code, title, lines in entries
    ]
