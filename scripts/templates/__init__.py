"""The parts of generated documents that are written by hand, and how the generated parts get into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
_PART = re.compile(r"\{\{(\w+)(?: (.*?))?\}\}\n?")


def fill(name: str, parts: Mapping[str, str | Callable[[str], str]]) -> str:
    """Return a template with each ``{{PART WORDS}}`` replaced by a text, or by what a function returns for the words.

    The parts are made in the order of the template. A part without text leaves no line.
    """

    def text(found: re.Match[str]) -> str:
        part, end = parts[found[1]], "\n" if found[0].endswith("\n") else ""
        made = part if isinstance(part, str) else part(found[2] or "")
        return made and f"{made}{end}"

    return _PART.sub(text, (HERE / name).read_text(encoding="utf-8"))
