"""The numbers of this process among the ranks, from its launcher's environment variables. torch is not needed."""

from __future__ import annotations

import os
from collections.abc import Mapping


def launched_rank() -> int:
    """Return ``RANK``; 0 without a launcher."""
    return variable_number(os.environ, "RANK", 0)


def launched_local_rank() -> int:
    """Return ``LOCAL_RANK``, the number of the rank on its machine; 0 without a launcher."""
    return variable_number(os.environ, "LOCAL_RANK", 0)


def launched_world_size() -> int:
    """Return ``WORLD_SIZE``; 1 without a launcher."""
    return variable_number(os.environ, "WORLD_SIZE", 1)


def variable_number(environ: Mapping[str, str], variable: str, default: int = 0) -> int:
    """Return the number in an environment variable; ``default`` if it is absent, or no number."""
    text = environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else default
