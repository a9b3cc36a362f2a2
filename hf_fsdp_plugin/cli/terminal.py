"""Width and colors of the terminal, and problems printed for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TextIO

from hf_fsdp_plugin.problems import Problem, shown_problems
from hf_fsdp_plugin.text import wrap_words

Color = Literal["red", "yellow", "green", "cyan", "dim", "bold"]
_CODES: Final[Mapping[Color, str]] = {"red": "31", "yellow": "33", "green": "32", "cyan": "36", "dim": "2", "bold": "1"}
_SEVERITY_COLORS: Final[Mapping[str, Color]] = {"error": "red", "warning": "yellow", "note": "cyan"}


def has_color(stream: TextIO) -> bool:
    """Return whether to print colors. ``NO_COLOR`` has precedence over ``FORCE_COLOR``, as in Python itself."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str, color: Color, stream: TextIO | None = None) -> str:
    """Return the text with the escape codes of a color, if `stream` (by default stdout) shows colors."""
    return f"\033[{_CODES[color]}m{text}\033[0m" if has_color(stream or sys.stdout) else text


def text_width(stream: TextIO | None = None) -> int | None:
    """Return the number of columns of a terminal, or ``COLUMNS``; ``None`` for a file or a pipe: no limit."""
    stream = stream or sys.stdout
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None
    except (OSError, ValueError):
        return None


def in_line_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort the problems of each file by line. Files are in the order of their first problem, before other sources."""
    problems = list(problems)
    files = {origin.file: None for problem in problems if (origin := problem.origin) is not None and origin.file}
    order = {file: number for number, file in enumerate(files)}

    def place(problem: Problem) -> tuple[int, int]:
        origin = problem.origin
        if origin is None or origin.file is None:
            return len(order), 0
        return order[origin.file], origin.line or 0

    return sorted(problems, key=place)


def print_problems(problems: Iterable[Problem]) -> None:
    """Print problems to stderr, each with its severity: in color, and wrapped, on a terminal."""
    width = text_width(sys.stderr)
    shown, rest = shown_problems(problems)
    for problem in shown:
        print(_problem_text(problem, width), file=sys.stderr)
    for line in rest:
        print(line, file=sys.stderr)
    sys.stderr.flush()  # before what the verb prints to stdout


def _problem_text(problem: Problem, width: int | None) -> str:
    label = f"{problem.severity}: "
    text = "\n".join(wrap_words(problem.text(label), width))
    place = text.find(label)
    if place < 0:
        return text
    return text[:place] + colored(label, _SEVERITY_COLORS[problem.severity], sys.stderr) + text[place + len(label) :]
