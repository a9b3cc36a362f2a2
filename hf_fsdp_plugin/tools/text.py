"""Reads sizes that users write, and formats times, multiples and lists that only tools print."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|(b))?\s*", re.IGNORECASE)
SIZE_SPELLINGS = '"80GB" (80·10⁹ bytes), "80 GB", "79.6GiB" (2³⁰ bytes each), "81559MiB", or "80", which means GB'


def parse_bytes(text: str, *, plain: int = 10**9, least: int = 1 << 20) -> int | None:
    """Return the bytes of ``80GB``, ``80 GB``, ``80GiB`` or ``80``; ``None`` if it is not the size of a memory.

    Args:
        plain: bytes of the unit of a number without one.
        least: smallest number of bytes that is not refused. The largest is 1 PiB.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, prefix, binary, is_bytes = found.groups()
    base = 1024 if binary else 1000
    unit = base ** ("kmgt".index(prefix.lower()) + 1) if prefix else 1 if is_bytes else plain
    size = int(float(number) * unit)
    return size if least <= size <= 1 << 50 else None


def format_seconds(seconds: float) -> str:
    """Format a duration: ``12.3 ms``, or ``4.56 s`` from one second."""
    return f"{seconds * 1000:,.1f} ms" if abs(seconds) < 1 else f"{seconds:,.2f} s"


def nearest_multiples(count: int, divisor: int) -> str:
    """Return the multiples of a divisor below and above a number that is not one itself, such as ``64 or 72``."""
    below = count - count % divisor
    return f"{below} or {below + divisor}" if below > 0 else str(divisor)


def wrap_items(items: Iterable[str], width: int, *, label: str = "") -> list[str]:
    """Join items by commas, in lines of at most `width` characters. Lines are broken between items only.

    Args:
        label: start of the first line. Other lines are indented by its length.
    """
    text = ", ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in items)
    wrapper = textwrap.TextWrapper(width, label, " " * len(label), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapper.wrap(text)]
