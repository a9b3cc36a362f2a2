"""The hash of the bytes of a checkpoint's files. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading

HASH = "xxh3_128"

_BLOCK = 4 << 20
"""Bytes read at once: large enough for a disk, and small enough to be in the CPU cache when they are hashed."""


def hash_bytes(data: Any) -> str:
    """Return the xxh3_128 of contiguous bytes (bytes, memoryview, an array), in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """Return the xxh3_128 of the bytes ``[start, stop)`` of a file; without ``stop``, up to its end.

    The GIL is released while bytes are read and hashed.

    Raises:
        CheckpointError: the file ends before ``stop``.
    """
    hasher, position = xxhash.xxh3_128(), start
    with open_for_reading(path, buffering=0) as file:
        file.seek(start)
        while stop is None or position < stop:
            block = file.read(_BLOCK if stop is None else min(_BLOCK, stop - position))
            if not block:
                break
            hasher.update(block)
            position += len(block)
    if stop is not None and position < stop:
        refuse("FSDP-E453", path, f"ends at byte {position:,}; expected {stop:,} bytes.")
    return hasher.hexdigest()
