"""Names of test parameters that are the same in every process, as pytest-xdist needs them."""

from __future__ import annotations

from collections.abc import Mapping


def keys_of(value: object) -> str:
    """Return the keys of a mapping, because its values may contain memory addresses or sets; else the value as text."""
    return ",".join(map(str, value)) if isinstance(value, Mapping) else str(value)
