"""Reads the headers of safetensors files, and the index of a Hugging Face model that is split into several files."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.formats.element_types import SAFETENSORS_NAMES, SIZES
from hf_fsdp_plugin.checkpoint.formats.errors import LFS_POINTER_SIZE, raise_if_any, refuse, refuse_lfs_pointer
from hf_fsdp_plugin.checkpoint.formats.stored import file_problems_inside
from hf_fsdp_plugin.checkpoint.formats.strict_json import parse_json, without_duplicates
from hf_fsdp_plugin.checkpoint.io import read_file, reading
from hf_fsdp_plugin.text import plural

MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes; the limit of the safetensors library."""

DTYPES = {
    **{name: dtype for dtype, name in SAFETENSORS_NAMES.items()},
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The element types of safetensors files -> torch's."""


class Entry(NamedTuple):
    """A tensor in a safetensors file; ``offset`` is the byte offset of its first element in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path, *, any_dtype: bool = False) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a safetensors file's entries and metadata. Checks that the tensors tile the bytes after the header.

    Args:
        any_dtype: accept element types that this package does not know, such as the packed ones of quantized weights.

    Raises:
        CheckpointError: the file is truncated, longer than its header allows, or its header is damaged.
    """
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            refuse_lfs_pointer(path, head + file.read(LFS_POINTER_SIZE))
            message = f"has {size} bytes and a header of {length} bytes; it is truncated or not a safetensors file."
            refuse("FSDP-E453", path, message)
        text = file.read(length)
    begin = 8 + length
    try:
        header = _parse_json(text)
        metadata = header.pop("__metadata__", {})
        found = sorted(_parse_entry(name, entry, begin, any_dtype) for name, entry in header.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse("FSDP-E453", path, f"has a damaged header ({type(error).__name__}: {error}).")
    at = 0
    for start, stop, name, entry in found:
        num_bytes = math.prod(entry.shape) * SIZES[entry.dtype] if entry.dtype in SIZES else stop - start
        if start != at or stop - start != num_bytes:
            message = (
                f"tensor {name!r}, {entry.dtype} {entry.shape}, has the data offsets {start} to {stop}, and the next "
                f"free byte is {at}: tensors overlap, leave gaps or have the wrong size."
            )
            refuse("FSDP-E453", path, message)
        at = stop
    if begin + at != size:
        cut = [(stop, name) for _, stop, name, _ in found if begin + stop > size]
        missing = f": the bytes of {min(cut)[1]!r} are incomplete" if cut else ""
        others = f", and so are {plural(len(cut) - 1, 'other tensor')}" if len(cut) > 1 else ""
        refuse("FSDP-E453", path, f"has {size} bytes; its header requires {begin + at}{missing}{others}.")
    return {name: entry for _, _, name, entry in found}, metadata


def read_weight_map(root: Path, index: Path) -> dict[str, set[str]]:
    """Return file -> names of its tensors, from a Hugging Face index. Checks that all files exist inside the folder."""
    shards = parse_weight_map(index)
    raise_if_any(file_problems_inside(root, shards, index))
    return shards


def parse_weight_map(index: Path) -> dict[str, set[str]]:
    """Return file -> names of its tensors, from a Hugging Face index. The files are not looked at.

    Raises:
        CheckpointError: the index is damaged.
    """
    text = read_file(index)
    refuse_lfs_pointer(index, text)
    try:
        weight_map = parse_json(text)["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise TypeError(f"{name!r} is in {file!r}")
            shards.setdefault(file, set()).add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = (
            f"is not a valid index of weights ({type(error).__name__}: {error}). Expected: a JSON object whose "
            "weight_map contains the file of each tensor."
        )
        refuse("FSDP-E453", index, message)
    return shards


def _parse_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a header. Raises ``ValueError`` if an object in it has a key twice."""
    header = json.loads(text)
    # Each key has a colon after it. If there are no more colons than keys that were found, no key was there twice.
    num_keys = len(header) + sum(len(entry) for entry in header.values() if type(entry) is dict)
    return header if text.count(b":") == num_keys else json.loads(text, object_pairs_hook=without_duplicates)


def _parse_entry(name: str, entry: Mapping[str, Any], begin: int, any_dtype: bool) -> tuple[int, int, str, Entry]:
    """Return start and stop after ``begin``, name and entry of a tensor."""
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        if not any_dtype or not isinstance(entry["dtype"], str):
            raise ValueError(f"unknown element type {entry['dtype']!r}")
        dtype = entry["dtype"]
    shape = tuple(entry["shape"])
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"shape {shape}")
    start, stop = entry["data_offsets"]
    if not (type(start) is int and type(stop) is int and 0 <= start <= stop):
        raise ValueError(f"data_offsets {entry['data_offsets']}")
    return start, stop, name, Entry(dtype, shape, begin + start)
