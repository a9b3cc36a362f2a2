"""The hash of the manifest, over bytes in memory and in files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import xxhash

from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.io import reading

HASH = "xxh3_128"

_BLOCK = 4 << 20
"""Bytes read at once: large enough for a disk, and small enough to be in the CPU cache when they are hashed."""


_thread = threading.local()


def _block_of_thread() -> memoryview:
    """Return memory that the thread reuses: new memory for each range takes as long as hashing it."""
    if not hasattr(_thread, "block"):
        _thread.block = memoryview(bytearray(_BLOCK))
    block: memoryview = _thread.block
    return block


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
    block = _block_of_thread()
    with reading(path) as file:
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
