"""The numbers of this process among the ranks, from its launcher's environment variables. torch is not needed."""

from __future__ import annotations

import os


def launched_rank() -> int:
    """Return ``RANK``; 0 without a launcher."""
    return _number("RANK", 0)


def launched_local_rank() -> int:
    """Return ``LOCAL_RANK``, the number of the rank on its machine; 0 without a launcher."""
    return _number("LOCAL_RANK", 0)


def launched_world_size() -> int:
    """Return ``WORLD_SIZE``; 1 without a launcher."""
    return _number("WORLD_SIZE", 1)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
