"""Splits a shell script into its commands, with the values of variables that the script itself sets. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_SUBSTITUTION: Final = r"\$\((?:[^()]|\((?:[^()]|\([^()]{0,999}\)){0,999}\)){0,999}\)|`[^`]{0,999}`"
"""The output of a command. Lengths are limited, so that a text with many beginnings takes no long time."""
_QUOTED: Final = rf"'[^']*'|\"(?:\\.|{_SUBSTITUTION}|[^\"\\])*\""
_TOKEN: Final = re.compile(
    rf"""
    (?P<blank>(?:[ \t\r]|\\\r?\n)+)
    |(?P<comment>\#[^\n]*)
    |(?P<here><<-?[ \t]*['"]?(?P<mark>\w+)['"]?[^\n]*\n(?:.*\n){0, 200}?[ \t]*(?P=mark)(?=\n|\Z))
    |(?P<array>(?P<name>\w+)\+?=\()
    |(?P<redirect>(?:\d|&)?(?:>>|>\||>&|<<<|>|<)(?:&?\d)?[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?)
    |(?P<end>\n|&&|\|\||;;|[;&|(){{}}](?=\s|\)|\Z)|[();|])
    |(?P<word>(?:{_QUOTED}|{_SUBSTITUTION}|\$\{{[^}}]{{0,999}}\}}|\\(?:.|\n)|[^\s\\'"`;&|()<>])+)
    |(?P<other>.)
    """,
    re.VERBOSE,
)
_PIECE: Final = re.compile(
    rf"(?P<quoted>{_QUOTED})|(?P<substitution>{_SUBSTITUTION})|(?P<variable>\$\{{[^}}]{{0,999}}\}}|\$\w+|\$[@*#?])"
    r"|\\(?P<escaped>(?:.|\n))|(?P<plain>.)",
    re.DOTALL,
)
_VARIABLE: Final = re.compile(r"\$\{?(?P<name>\w+|[@*])(?:\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}?")
_INNER_VARIABLE: Final = re.compile(r"\$\{[^}]{0,999}\}|\$\w+")
_ASSIGNMENT: Final = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+)?=(?P<value>.*)", re.DOTALL)
_MAX_VALUE, _MAX_WORDS = 10_000, 1_000
"""Limits of a variable: characters, and words of an array."""
_DECLARATIONS: Final = frozenset({"export", "declare", "local", "readonly", "typeset"})
_KEYWORDS: Final = frozenset(
    {"if", "then", "do", "else", "elif", "while", "until", "!", "time", "exec", "nohup", "{", "eval"}
)


@dataclass(frozen=True, slots=True)
class ShellWord:
    """A word of a command, with the values of variables, and its 1-based line.

    A variable without a known value, and the output of a command, stay as they are written: ``$1``, ``$(nproc)``.
    """

    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellCommand:
    """One command of a script.

    Attributes:
        words: program and arguments.
        variables: the variables that the script has set before it, and those in front of the program.
    """

    words: tuple[ShellWord, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def parse_commands(text: str) -> Iterator[ShellCommand]:
    """Yield the commands of a script in their order. Branches and loops are not followed: each command occurs once."""
    variables: dict[str, list[str]] = {}
    words: list[ShellWord] = []
    array, line, skips = "", 1, False
    for token in _TOKEN.finditer(f"{text}\n"):
        written = token[0]
        if token["array"]:
            array = token["name"]
            variables[array] = list(variables.get(array, [])) if "+" in written else []
        elif token["word"] and skips:
            skips = False  # the file of a redirection
        elif token["word"] and array:
            if len(variables[array]) < _MAX_WORDS:
                variables[array] += _expand(written, variables)
        elif token["word"]:
            words += [ShellWord(word, line) for word in _expand(written, variables)]
        elif token["redirect"]:
            skips = not re.search(r"\d$|\)$", written.strip())
        elif token["end"] and array:
            array = "" if written == ")" else array
        elif token["end"]:
            yield from _finish(words, variables)
            words = []
        line += written.count("\n")
    yield from _finish(words, variables)


def _finish(words: list[ShellWord], variables: dict[str, list[str]]) -> Iterator[ShellCommand]:
    """Apply the assignments of a command to `variables`, and yield the command if it has a program."""
    while words and words[0].text in _KEYWORDS | _DECLARATIONS | {"env"}:
        words = words[1:]
    given: dict[str, list[str]] = {}
    while words and (assignment := _ASSIGNMENT.fullmatch(words[0].text)):
        before = "".join(variables.get(assignment["name"], [])) if assignment["append"] else ""
        if len(before) + len(assignment["value"]) <= _MAX_VALUE:  # a loop could double it each time
            given[assignment["name"]] = [before + assignment["value"]]
        words = words[1:]
    if not words:
        variables |= given
        return
    known = {name: " ".join(values) for name, values in (variables | given).items()}
    yield ShellCommand(words=tuple(words), variables=known)


def _expand(written: str, variables: Mapping[str, list[str]]) -> list[str]:
    """Return the words that a written word stands for. An unquoted variable with blanks becomes several words."""
    words, is_assignment = [""], _ASSIGNMENT.fullmatch(written) is not None
    for piece in _PIECE.finditer(written):
        quoted, variable = piece["quoted"], piece["variable"]
        if quoted is not None and re.fullmatch(r'"\$\{\w+\[@\]\}"', quoted):
            parts = _values_of(quoted[1:-1], variables)
        elif quoted is not None:
            inner = quoted[1:-1]
            if quoted[0] == '"':
                inner = re.sub(r"\\([\"\\$`]|\n)", lambda match: match[1].strip("\n"), inner)
                inner = _INNER_VARIABLE.sub(lambda match: " ".join(_values_of(match[0], variables)), inner)
            parts = [inner]
        elif variable is not None:
            value = " ".join(_values_of(variable, variables))
            parts = [value] if is_assignment or re.search(r"\$\(|`", value) else value.split()
        else:
            parts = [(piece["substitution"] or piece["escaped"] or piece["plain"] or "").replace("\n", " ")]
        if parts:
            words = [*words[:-1], words[-1] + parts[0], *parts[1:]]
    is_empty = words == [""] and not re.search("['\"]", written)
    return [] if is_empty else words


def _values_of(written: str, variables: Mapping[str, list[str]]) -> list[str]:
    """Return the value of a variable, its default, or the variable as it is written."""
    match = _VARIABLE.fullmatch(written)
    if match is None:
        return [written]
    if match["name"] in variables:
        return variables[match["name"]]
    return [written] if match["default"] is None else [match["default"].strip("\"'")]
