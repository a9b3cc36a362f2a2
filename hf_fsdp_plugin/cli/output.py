"""What the verbs share: exit codes, problems and JSON that are printed, and progress; width and colors of the terminal.

docs/json.md describes the JSON objects.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TextIO

from hf_fsdp_plugin.hangs import HANG as HANG
from hf_fsdp_plugin.problems import Problem, has_errors, shown_problems
from hf_fsdp_plugin.text import printable, wrap_words
from hf_fsdp_plugin.version import SCHEMA_VERSION

OK: Final = 0
PROBLEMS: Final = 1
USAGE: Final = 2
"""Wrong usage: an unknown flag, a missing argument, or an argument that is not the path of a file or folder."""
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in a shell."""
_NO_FILE: Final = frozenset({"FSDP-E001", "FSDP-E042"})
"""Problems of a config that is not a file. Their origin is the config that the command line names, if there is one."""
Color = Literal["red", "yellow", "green", "cyan", "dim", "bold"]
_CODES: Final[Mapping[Color, str]] = {"red": "31", "yellow": "33", "green": "32", "cyan": "36", "dim": "2", "bold": "1"}
_SEVERITY_COLORS: Final[Mapping[str, Color]] = {"error": "red", "warning": "yellow", "note": "cyan"}


def exit_code(problems: Iterable[Problem], config: str | None) -> int:
    """Return the exit code for the problems of a config.

    Args:
        config: the config as the user named it; ``None`` without one.
    """
    problems = list(problems)
    sources = {problem.origin and problem.origin.source for problem in problems if problem.code in _NO_FILE}
    if config in sources:
        return USAGE
    return PROBLEMS if has_errors(problems) else OK


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
    if given.isdecimal() and len(given) < 6 and int(given) > 0:
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
        label = f"{problem.severity}: "
        color = _SEVERITY_COLORS[problem.severity]
        text = "\n".join(wrap_words(problem.text(label), width))
        print(text.replace(label, colored(label, color, sys.stderr), 1), file=sys.stderr)
    for line in rest:
        print(line, file=sys.stderr)
    sys.stderr.flush()  # before what the verb prints to stdout


def print_failure(problems: Iterable[Problem], *, as_json: bool) -> int:
    """Print why a verb failed: one JSON object to stdout, or text to stderr. Returns the exit code."""
    if as_json:
        print_json({"ok": False, "problems": list(problems)})
    else:
        print_problems(problems)
    return PROBLEMS


def print_result(
    args: argparse.Namespace, tree: Mapping[str, Any], text: str, problems: Sequence[Problem] | None = None
) -> int:
    """Print the result of a verb: a JSON object with ``--json``, else the problems and a text. Returns the exit code.

    Args:
        problems: if they are given, ``ok`` and ``problems`` are added to the JSON object.
    """
    failed = has_errors(problems or ())
    if args.json:
        print_json(tree if problems is None else {"ok": not failed, **tree, "problems": problems})
    else:
        print_problems(problems or ())
        if text:
            print(text)
    return PROBLEMS if failed else OK


def print_json(tree: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout, with the version of its schema. Parts of it may have a method ``to_json``."""
    import json  # only for --json, to start faster

    def convert(value: Any) -> Any:
        return value.to_json() if hasattr(value, "to_json") else str(value)

    text = json.dumps({"schema_version": SCHEMA_VERSION, **tree}, indent=2, ensure_ascii=False, default=convert)
    print("\n".join(map(printable, text.split("\n"))))  # JSON itself allows C1 control characters and surrogates
