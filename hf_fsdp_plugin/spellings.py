"""How values are written: words for true, false and null, and choices with several spellings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

TRUE_WORDS: Final = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS: Final = frozenset({"false", "no", "off", "0"})
NULL_WORDS: Final = frozenset({"", "none", "null", "~"})
"""Text that programs write for a missing value."""

_SEPARATOR: Final = re.compile(r"(?<=[a-z0-9])(?:-| +)(?=[a-z0-9])")
"""Characters that may replace ``_`` inside a word: a hyphen or spaces, but not both, and not at the ends."""
BLANKS: Final = " \t\r\n\f\v"
"""Characters that are removed around keys and values. Other white space (no-break spaces) is part of the text."""
QUOTES: Final = ('""', "''")
"""Pairs of quotes, which launchers of jobs put around values."""


def lower(text: str) -> str:
    """Return text in lower case, without blanks around it. Letters outside ASCII are not changed into ASCII letters."""
    text = text.strip(BLANKS)
    return text.lower() if text.isascii() else text


def word_of(raw: Any) -> str:
    """Return a value as lower-case text without blanks around it."""
    return lower(str(raw))


def without_prefix(word: str, prefixes: Sequence[str]) -> str:
    """Return ``full_shard`` for ``shardingstrategy.full_shard``, if ``ShardingStrategy`` is one of the prefixes."""
    before, dot, after = word.partition(".")
    is_known = before in {prefix.lower() for prefix in prefixes}
    return after if dot and is_known and after and not after[0].isdigit() else word


def value_key(raw: Any, prefixes: Sequence[str] = ()) -> str:
    """Return a value in the form of a choice: ``full_shard`` for ``full shard`` and ``ShardingStrategy.FULL_SHARD``."""
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    word = word_of(raw)
    if not set(word) - set("+-.0123456789"):
        return word  # a sign or a decimal point is not a separator: -1 is not 1, and 2.5 is not 5
    return _SEPARATOR.sub("_", without_prefix(word, prefixes))


def look_up(choices: Mapping[str, tuple[str, ...]], raw: Any, prefixes: Sequence[str] = ()) -> str | None:
    """Return the choice that a text, number or bool represents; ``None`` if there is none."""
    key = value_key(raw, prefixes)
    for value, others in choices.items():
        if key == value.lower() or key in others:
            return value
    return None


def without_pair(text: str, pairs: Collection[str]) -> str:
    """Return a text without the pair of characters around it, such as quotes (``""``), and without blanks inside."""
    return text[1:-1].strip(BLANKS) if len(text) > 1 and text[0] + text[-1] in pairs else text


def nearest_word(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known word that is most similar to a misspelled one; empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(nearest: str, otherwise: str = "") -> str:
    """Return the remedy for a misspelled word: the nearest known word, or `otherwise` if there is none."""
    return f"Did you mean {nearest}?" if nearest else otherwise
