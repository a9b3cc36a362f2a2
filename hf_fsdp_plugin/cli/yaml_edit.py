"""Changes keys and corrects misspelled words in a YAML text. Everything else stays: order, comments, blanks, quotes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import yaml

from hf_fsdp_plugin.problems import Problem

_MISSPELLED_KEY: Final = "FSDP-E020"
_WORD: Final = re.compile(r"[\w.-]+")


def scalar_text(value: Any) -> str:
    """Return a value as it is written in YAML: ``'no'`` has quotes, ``true`` has none."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20).removesuffix("...\n").strip()


def line_of(key: str, value: Any, comment: str, indent: str = "") -> str:
    """Return ``key: value  # comment``."""
    return f"{indent}{key}: {scalar_text(value)}{f'  # {comment}' if comment else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key of a YAML text.

    Attributes:
        section: the key whose mapping contains it; empty at the top level.
        is_first: whether it is the first key of its mapping.
    """

    section: str
    name: str
    node: Any
    value: Any
    is_first: bool


class YamlText:
    """A YAML text whose top level is a mapping in block style, as :mod:`hf_fsdp_plugin.sources.tree` accepts it.

    Keys of the top level and of its sections can be changed, added and removed. Sections in flow style
    (``{a: 1}``) are written in block style first.
    """

    def __init__(self, text: str) -> None:
        self.text = text if text.endswith("\n") else f"{text}\n"
        self._newline = "\r\n" if "\r\n" in text else "\n"

    def all_keys(self) -> Iterator[Key]:
        """Yield the keys of the top level, each followed by the keys of its section."""
        for key in self._keys_of(self._root(), ""):
            yield key
            if isinstance(key.value, yaml.MappingNode):
                yield from self._keys_of(key.value, key.name)

    def put(self, section: str, name: str, value: Any, comment: str, *, replaces: Key | None = None) -> None:
        """Write a key: in the place of another one, else at the end of its section.

        Args:
            replaces: a key that :meth:`all_keys` returned after the last change.
        """
        if replaces is not None and replaces.section == section:
            self._replace(replaces, name, value, comment)
            return
        if replaces is not None:
            self.remove(replaces)
        self._add(section, name, value, comment)

    def remove(self, key: Key) -> None:
        """Remove a key with the comment on its line, and its section if that is empty then."""
        section = self._section(key.section)
        if section is not None and len(section.value.value) == 1:
            key = section
        elif section is not None and section.value.flow_style:
            self._to_block(section)
            key = next(other for other in self.all_keys() if (other.section, other.name) == (key.section, key.name))
        start, stop = self._line_start(key), self._line_end(key)
        self.text = self.text[:start] + self.text[stop:]

    def comment_out(self, key: Key, reason: str) -> None:
        """Turn the lines of a key at the top level into a comment, after a line with the reason."""
        start, stop = self._line_start(key), self._line_end(key)
        lines = [f"# {reason}", *(f"# {line}" for line in self.text[start:stop].splitlines())]
        self.text = self.text[:start] + "".join(line + self._newline for line in lines) + self.text[stop:]

    def _root(self) -> Any:
        return yaml.compose(self.text, Loader=yaml.SafeLoader)

    @staticmethod
    def _keys_of(mapping: Any, section: str) -> Iterator[Key]:
        for number, (key, value) in enumerate(mapping.value):
            yield Key(section=section, name=str(key.value), node=key, value=value, is_first=number == 0)

    def _section(self, name: str) -> Key | None:
        if not name:
            return None
        return next((key for key in self.all_keys() if not key.section and key.name == name), None)

    def _replace(self, key: Key, name: str, value: Any, comment: str) -> None:
        section = self._section(key.section)
        if section is not None and section.value.flow_style:
            self._to_block(section)
            key = next(other for other in self.all_keys() if (other.section, other.name) == (key.section, key.name))
        indent = " " * key.node.start_mark.column
        line = line_of(name, value, comment).replace("\n", " ")
        start, stop = key.node.start_mark.index, self._line_end(key)
        self.text = self.text[:start] + line + self._newline + self.text[stop:]
        assert indent == "" or self.text[start - len(indent) : start] == indent

    def _add(self, section: str, name: str, value: Any, comment: str) -> None:
        if not section:
            self._insert_after_last(self._root(), line_of(name, value, comment))
            return
        found = self._section(section)
        if found is None:
            line = f"{section}:{self._newline}{line_of(name, value, comment, '  ')}"
            self._insert_after_last(self._root(), line)
            return
        if not isinstance(found.value, yaml.MappingNode) or not found.value.value or found.value.flow_style:
            self._to_block(found, line_of(name, value, comment))
            return
        first = found.value.value[0][0]
        self._insert_after_last(found.value, line_of(name, value, comment, " " * first.start_mark.column))

    def _insert_after_last(self, mapping: Any, line: str) -> None:
        key, value = mapping.value[-1]
        at = self._line_end(Key(section="", name="", node=key, value=value, is_first=False))
        self.text = self.text[:at] + line + self._newline + self.text[at:]

    def _to_block(self, section: Key, *more: str) -> None:
        """Write a section that is null, empty or in flow style with one line per key."""
        content = _plain(section.value)
        lines = [line_of(name, value, "") for name, value in content.items()] if isinstance(content, dict) else []
        text = "".join(f"  {line}{self._newline}" for line in [*lines, *more])
        start, stop = section.node.start_mark.index, self._line_end(section)
        self.text = f"{self.text[:start]}{section.name}:{self._newline}{text}{self.text[stop:]}"

    def _line_start(self, key: Key) -> int:
        return self.text.rfind("\n", 0, key.node.start_mark.index) + 1

    def _line_end(self, key: Key) -> int:
        """Return the position after the last line of a key's value."""
        end = max(key.node.end_mark.index, _end(key.value))
        if self.text[end - 1 : end] == "\n":  # a block scalar
            return end
        newline = self.text.find("\n", end)
        return len(self.text) if newline < 0 else newline + 1


def _end(node: Any) -> int:
    """Return the position after the content of a node. The end mark of a block collection is after its comments."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
    return max(_end(part) for part in parts)


def _plain(node: Any) -> Any:
    return yaml.SafeLoader("").construct_object(node, deep=True)


class Edit(NamedTuple):
    """A replacement of a part of a text. ``start`` and ``stop`` are positions in the text."""

    start: int
    stop: int
    text: str
    line: int


def corrections(text: str, problems: Iterable[Problem], file: str) -> list[Edit]:
    """Return the edits that apply the suggestions of the problems of one file, in the order of the text.

    Args:
        file: the file as the origins of the problems name it.
    """
    found = [problem for problem in problems if problem.suggestion and problem.severity == "error"]
    entries = list(_entries(text)) if found else []
    edits: dict[int, Edit] = {}
    for problem in found:
        origin = problem.origin
        for key, value in entries:
            place = (file, key.start_mark.line + 1, key.value)
            if origin is not None and (origin.file, origin.line, origin.spelling) == place:
                edit = _edit(text, key if problem.code == _MISSPELLED_KEY else value, problem, key=key)
                if edit is not None:
                    edits.setdefault(edit.start, edit)
    return [edits[start] for start in sorted(edits)]


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.stop :]
    return text


def _edit(text: str, node: Any, problem: Problem, *, key: Any) -> Edit | None:
    """Return the replacement of a key, of a value, or of the most similar word of a value with several words."""
    start, stop = node.start_mark.index, node.end_mark.index
    written = text[start:stop]
    line = node.start_mark.line + 1
    if node is key or not isinstance(node, yaml.ScalarNode) or len(_WORD.findall(written)) > 1:
        words = {match[0]: match for match in _WORD.finditer(written)}
        folded = {word.lower().replace("-", "_"): word for word in words}
        near = difflib.get_close_matches(problem.suggestion.lower(), folded, n=1, cutoff=0.5)
        if not near:
            return None
        match = words[folded[near[0]]]
        start, stop = start + match.start(), start + match.end()
    elif getattr(node, "style", None) in ("'", '"'):
        start, stop = start + 1, stop - 1
    if text[start:stop] == problem.suggestion:  # the rest of the word is invalid, such as an escape sequence
        return None
    return Edit(start, stop, problem.suggestion, line)


def _entries(text: str) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of each key and its value, in all mappings of a text that was parsed before."""
    waiting = [yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            yield from node.value
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
