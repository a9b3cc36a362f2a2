"""The files of a checkpoint, and the ranges of their bytes that have a hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANGE = 1 << 20
"""Maximum size in bytes of a range of a file with tensors. It ends at a multiple of this number, or with its tensor.

A rank that needs a part of a range reads and hashes all of it. Measured by ``scripts/bench/verified_reads.py``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """The bytes ``[start, stop)`` of a file.

    Attributes:
        hash: xxh3_128 of these bytes, in hexadecimal.
        name: name of the tensor in this range; empty for headers, padding and files without tensors.
    """

    start: int
    stop: int
    hash: str
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file: its path relative to the checkpoint (with ``/``), its size in bytes, and the ranges that tile it."""

    path: str
    size: int
    ranges: Sequence[FileRange]
