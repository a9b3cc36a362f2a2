"""How values are written: words for true and false, names of enumerations, and choices with several spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TRUE_WORDS: Final = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS: Final = frozenset({"false", "no", "off", "0"})
_ENUMERATIONS: Final = frozenset(
    {
        "shardingstrategy", "backwardprefetch", "statedicttype", "fsdpoption", "distributedtype", "precisiontype",
        "dynamobackend", "computeenvironment", "torch",
    }
)  # fmt: skip
"""What stands before a dot when a member of an enumeration, or a dtype, is converted to text."""


def word_of(raw: Any) -> str:
    """Return a value as lower-case text without spaces around it. Raises ``ValueError`` for too many digits."""
    return str(raw).strip().lower()


def without_enumeration(word: str) -> str:
    """Return ``full_shard`` for ``shardingstrategy.full_shard``. Text before any other dot is part of the value."""
    before, dot, after = word.rpartition(".")
    return after if dot and before.rpartition(".")[2] in _ENUMERATIONS and after else word


def value_key(raw: Any) -> str:
    """Return a value in the form of a choice: ``full_shard`` for ``full shard`` and ``ShardingStrategy.FULL_SHARD``."""
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    word = word_of(raw)
    if not set(word) - set("+-.0123456789"):
        return word  # a sign or a decimal point is not a separator: -1 is not 1, and 2.5 is not 5
    return "_".join(without_enumeration(word).replace("-", " ").split())


def look_up(choices: Mapping[str, tuple[str, ...]], raw: Any) -> str | None:
    """Return the choice that a text, number or bool represents; ``None`` if there is none."""
    key = value_key(raw)
    for value, others in choices.items():
        if key == value.lower() or key in others:
            return value
    return None
