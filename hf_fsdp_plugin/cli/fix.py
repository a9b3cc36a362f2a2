"""Corrects misspelled keys and values in the text of a config. Order, comments and blanks stay as they are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml

from hf_fsdp_plugin.problems import Problem

_KEY_CODES = frozenset({"FSDP-E020"})
_WORD = re.compile(r"[\w.-]+")


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
                edit = _edit(text, key if problem.code in _KEY_CODES else value, problem, key=key)
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
