"""Reads sizes of memory as users write them."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {
    "": 10**9,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_WRITTEN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
SPELLINGS: Final = '"80GB" (80·10⁹ bytes), "80 GB", "79.6GiB" (2³⁰ bytes each), "81559MiB", or "80", which means GB'
_SMALLEST, _LARGEST = 1 << 20, 1 << 50


def parse_size(text: str) -> int | None:
    """Return the bytes of ``80GB``, ``80 GB``, ``80GiB`` or ``80``; ``None`` if it is not the size of a memory.

    A number without a unit is in GB. Sizes below 1 MiB and above 1 PiB are refused.
    """
    found = _WRITTEN.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        return None
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    return size if _SMALLEST <= size <= _LARGEST else None
