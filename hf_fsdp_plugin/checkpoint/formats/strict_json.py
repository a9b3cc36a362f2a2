"""Parses JSON in which no object has a key twice. Other readers could use another of its values."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from hf_fsdp_plugin.checkpoint.io import read_file


def parse_json(text: str | bytes, *, only_finite: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        only_finite: refuse ``NaN`` and ``Infinity``, which are not JSON.

    Raises:
        ValueError: it is not valid, or an object has a key twice.
        RecursionError: it is nested too deeply.
    """
    return json.loads(
        text, object_pairs_hook=without_duplicates, parse_constant=_refuse_constant if only_finite else None
    )


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that is only described; empty if it cannot be read or is no object."""
    try:
        tree = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these members. Raises ``ValueError`` if a key is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {key!r}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
