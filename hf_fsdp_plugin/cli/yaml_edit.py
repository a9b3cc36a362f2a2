"""Changes keys and corrects misspelled words in a YAML text. Everything else stays: order, comments, blanks, quotes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spellings import nearest_word

_MISSPELLED_KEY: Final = "FSDP-E020"
_WORD: Final = re.compile(r"[\w.-]+")


def scalar_text(value: Any) -> str:
    """Return a value as it is written in YAML: ``'no'`` has quotes, ``true`` has none."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


def line_of(key: str, value: Any, comment: str, indent: str = "") -> str:
    """Return ``key: value  # comment``."""
    return f"{indent}{key}: {scalar_text(value)}{f'  # {comment}' if comment else ''}"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a YAML text whose top level is a mapping in block style.

    Attributes:
        section: the key whose mapping contains it; empty at the top level.
        value: the node of its value.
        indent: the blanks before it.
        start, stop: its lines, from 0, without `stop`.
    """

    section: str
    name: str
    value: Any = field(compare=False)
    indent: str
    start: int
    stop: int


def keys_of(text: str) -> list[Key]:
    """Return the keys of the top level, each followed by the keys of its section."""
    found = []
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value:
        found.append(_key("", key, value))
        if isinstance(value, yaml.MappingNode):
            found += [_key(str(key.value), *pair) for pair in value.value]
    return found


def _key(section: str, key: Any, value: Any) -> Key:
    start = key.start_mark
    stop = max(key.end_mark.line + 1, _stop_line(value))
    return Key(section, str(key.value), value, " " * start.column, start.line, stop)


def _stop_line(node: Any) -> int:
    """Return the line after the content of a node. The end mark of a block collection is after its comments."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.line) + (node.end_mark.column > 0)  # a block scalar ends before a line
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    return max(map(_stop_line, parts))


def in_block_style(text: str, names: Iterable[str]) -> str:
    """Return the text in which these sections have one line per key, also those in flow style: ``{a: 1}``."""
    lines = text.splitlines()
    for key in reversed(keys_of(text)):
        is_section = not key.section and key.name in names and isinstance(key.value, yaml.MappingNode)
        if is_section and key.value.flow_style and key.value.value:
            content = yaml.SafeLoader("").construct_object(key.value, deep=True)
            keys = [line_of(name, value, "", "  ") for name, value in content.items()]
            lines[key.start : key.stop] = [f"{key.name}:", *keys]
    return "\n".join(lines) + "\n"


def change_keys(text: str, replaced: Mapping[Key, Sequence[str]], added: Mapping[str, Sequence[str]]) -> str:
    """Return the text with other lines for some keys, and with new keys at the end of their sections.

    A section without keys is removed. Everything else stays: order, comments, blanks, quotes.

    Args:
        replaced: key in block style -> its lines; without lines, the key is removed.
        added: section, or "" for the top level -> lines of new keys, without indent.
    """
    replaced, keys = dict(replaced), keys_of(text)
    end = list(added.get("", ()))
    edits: list[tuple[int, int, Sequence[str]]] = []
    for owner in [key for key in keys if not key.section]:
        members = [key for key in keys if key.section == owner.name]
        block = [(members[0].indent if members else "  ") + line for line in added.get(owner.name, ())]
        if members and not block and all(replaced.get(key) == [] for key in members):
            replaced = {key: lines for key, lines in replaced.items() if key not in members} | {owner: []}
        elif block and members:
            edits.append((members[-1].stop, members[-1].stop, block))
        elif block:
            edits.append((owner.start, owner.stop, [f"{owner.name}:", *block]))
    for section in added.keys() - {"", *(key.name for key in keys if not key.section)}:
        end += [f"{section}:", *(f"  {line}" for line in added[section])]
    edits = [(keys[-1].stop, keys[-1].stop, end), *edits, *((key.start, key.stop, replaced[key]) for key in replaced)]
    changed = text.splitlines()
    for start, stop, lines in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        changed[start:stop] = lines
    return "\n".join(changed) + "\n"


def apply_suggestions(text: str, problems: Iterable[Problem], file: str) -> tuple[str, list[str]]:
    """Return the text with the suggestions of the problems of one file, and a line for each correction.

    Args:
        file: the file as the origins of the problems name it.
    """
    lines, corrections = text.splitlines(keepends=True), []
    for problem in problems:
        origin = problem.origin
        if problem.severity != "error" or not problem.suggestion or origin is None or origin.file != file:
            continue
        number = origin.line or 1
        following = itertools.takewhile(lambda line: line.lstrip().startswith("- "), lines[number:])
        for line_number, line in enumerate([lines[number - 1], *following], start=number):
            word = _misspelled_word(line, problem, origin.spelling)
            if word is not None and word[0] != problem.suggestion:  # else the rest of the key is invalid
                lines[line_number - 1] = line[: word.start()] + problem.suggestion + line[word.end() :]
                corrections.append(f"{file}:{line_number}: {word[0]} → {problem.suggestion}")
                break
    return "".join(lines), corrections


def _misspelled_word(line: str, problem: Problem, key: str) -> re.Match[str] | None:
    """Return the word of a line that a suggestion replaces: the key, or the most similar word of the value."""
    content = re.sub(r"\s#.*", "", line)
    words = list(_WORD.finditer(content))
    if problem.code == _MISSPELLED_KEY:
        words = [word for word in words if word[0] == key] or words
    elif key in content:
        words = [word for word in words if word.start() >= content.index(key) + len(key)]
        if len(words) == 1:
            return words[0]
    folded = {word[0].lower().replace("-", "_"): word for word in words}
    return folded.get(nearest_word(problem.suggestion.lower(), folded, cutoff=0.5))
