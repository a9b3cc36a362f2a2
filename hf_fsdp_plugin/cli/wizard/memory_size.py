"""Sizes of memory as people write them: ``80GB``, ``80 GiB``, ``80``."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(gb|gib|g|mb|mib|tb|tib)?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {
    "mb": 10**6,
    "mib": 1 << 20,
    "": 10**9,
    "g": 10**9,
    "gb": 10**9,
    "gib": 1 << 30,
    "tb": 10**12,
    "tib": 1 << 40,
}


def parse_memory(text: str) -> int:
    """Return a number of bytes. A number without a unit is GB. Raises ``ValueError`` with what is expected."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if not (1 << 28) <= size <= (1 << 50):
        raise ValueError(f"{text[:40]!r} is not the memory of a GPU. Write a size such as 80GB.")
    return size
