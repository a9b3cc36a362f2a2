"""The hash of the manifest, over bytes in memory and in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

from hf_fsdp_plugin.checkpoint.formats.errors import refuse

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
    hasher = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK if stop is None else min(_BLOCK, max(stop - start, 1))))
    with open(path, "rb", buffering=0) as file:
        position = start
        while stop is None or position < stop:
            wanted = len(block) if stop is None else min(len(block), stop - position)
            count = os.preadv(file.fileno(), [block[:wanted]], position)
            if count == 0:
                break
            hasher.update(block[:count])
            position += count
    if stop is not None and position < stop:
        refuse("FSDP-E453", path, f"ends at byte {position:,}; expected {stop:,} bytes.")
    return hasher.hexdigest()
