"""The commands that the documents show: each simple command of each code block, with its place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)  # fmt: skip
_BLOCK = re.compile(r"^ *(?P<fence>```+)(?P<kind>bash|console)\n(?P<text>.*?)^ *(?P=fence)", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`((?:hf-fsdp |(?:\.venv/bin/)?python (?:-m )?scripts|(?:bash )?scripts/\S+\.sh)[^`\n]*)`")
_SUBSTITUTION = re.compile(r"\$\(\(.*?\)\)|\$\([^)]*\)|\$\w+")
_CODE = re.compile(r"^#+ .*(FSDP-[EWN]\d+)", re.MULTILINE)
_OPERATORS = "&|;<>"


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command.

    Attributes:
        place: document and line.
        code: the problem code of the section, in docs/problems.md; otherwise empty.
        words: the words after variables such as ``NAME=value``.
        target: the file to which the output is written.
        piped: whether it reads the output of the command before it.
    """

    place: str
    words: tuple[str, ...]
    variables: dict[str, str]
    code: str = ""
    target: str = ""
    piped: bool = False

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def blocks() -> list[list[Command]]:
    """Return the commands of each block with a shell's language, in the order of the documents."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            code = _CODE.findall(text[: block.start()])[-1:] if document.name == "problems.md" else []
            line = text.count("\n", 0, block.start()) + 2
            commands = _commands(block["text"], block["kind"] == "console")
            place = f"{document.relative_to(ROOT)}:"
            found.append(
                [
                    command
                    for number, written in commands
                    for command in simple_commands(written, f"{place}{line + number}", "".join(code))
                ]
            )
    return found


def inline_commands() -> list[Command]:
    """Return the commands between single backquotes, most of which are fragments."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _INLINE.finditer(text):
            place = f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            found += simple_commands(match[1], place)
    return found


def _commands(text: str, console: bool) -> Iterator[tuple[int, str]]:
    """Yield the commands of a block, with the number of their line; lines that end with a backslash are joined."""
    pending, begin = "", 0
    for number, line in enumerate(text.splitlines()):
        if console and not pending:
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        begin = begin if pending else number
        pending += line.strip() if not line.endswith("\\") else f"{line[:-1].strip()} "
        if not line.endswith("\\"):
            yield begin, pending
            pending = ""


def simple_commands(text: str, place: str, code: str = "") -> list[Command]:
    """Split a line of a shell at its operators. A comment is dropped; each ``$NAME`` and ``$(COMMAND)`` is ``2``."""
    reader = shlex.shlex(_SUBSTITUTION.sub("2", text), posix=True, punctuation_chars=_OPERATORS)
    reader.whitespace_split = True
    found: list[Command] = []
    words: list[str] = []
    tokens = [*reader, ";"]
    target, piped, index = "", False, 0
    while index < len(tokens):
        token = tokens[index]
        if token in (">", "<"):
            target = tokens[index + 1] if token == ">" else target
            index += 1
        elif token and set(token) <= set(_OPERATORS):
            variables: dict[str, str] = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, value = words.pop(0).partition("=")
                variables[name] = value
            if words or variables:
                found.append(Command(place, tuple(words), variables, code, target, piped))
            words, target, piped = [], "", token == "|"
        else:
            words.append(token)
        index += 1
    return found
