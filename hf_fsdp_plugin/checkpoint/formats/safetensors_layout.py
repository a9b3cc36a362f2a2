"""Where every byte of a safetensors file goes, before there is one: writers can fill their places side by side.

A file is 8 bytes (little-endian length of the header), the header (JSON, padded with blanks) and the tensors without
gaps, row-major and little-endian: https://github.com/huggingface/safetensors#format. Files are named and indexed as
Hugging Face does.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hf_fsdp_plugin.problems import CheckpointError, Problem

DATA_ALIGNMENT = 4096
"""The data begin at a multiple of this many bytes, so that direct I/O and memory maps meet whole pages."""

DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "complex64": ("C64", 8),
        "float64": ("F64", 8),
        "int64": ("I64", 8),
        "uint64": ("U64", 8),
        "float32": ("F32", 4),
        "int32": ("I32", 4),
        "uint32": ("U32", 4),
        "bfloat16": ("BF16", 2),
        "float16": ("F16", 2),
        "int16": ("I16", 2),
        "uint16": ("U16", 2),
        "bool": ("BOOL", 1),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "float8_e8m0fnu": ("F8_E8M0", 1),
        "int8": ("I8", 1),
        "uint8": ("U8", 1),
    }
)
"""torch's name of a dtype -> safetensors' name, and bytes an element."""

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, torch's name of the dtype, shape."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file to be written.

    Attributes:
        name: ``model.safetensors`` or ``model-00001-of-00003.safetensors``.
        header: every byte before the first tensor's.
        size: bytes of the whole file.
        offsets: tensor -> its first byte in the file, in ascending order.
    """

    name: str
    header: bytes
    size: int
    offsets: dict[str, int]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype][1]


def plan_files(
    tensors: Sequence[Tensor], max_shard_size: int, stem: str = "model", metadata: Mapping[str, str] | None = None
) -> list[SafetensorsFile]:
    """The files that hold ``tensors``, each of at most ``max_shard_size`` bytes of tensors.

    Tensors are dealt out in their order; one that is larger than a file has a file to itself. Within a file wide
    dtypes come first, so that every tensor lies at a multiple of its element's size. ``metadata`` joins the header.

    Raises:
        CheckpointError: for names that come twice or are reserved, and dtypes that safetensors does not have.
    """
    _check(tensors)
    shards = _deal(tensors, max_shard_size)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return [_file(name, shard, metadata or {}) for name, shard in zip(names, shards, strict=True)]


def index_text(files: Sequence[SafetensorsFile]) -> str | None:
    """The text of ``model.safetensors.index.json``; ``None`` for a single file, which needs none."""
    if len(files) == 1:
        return None
    index = {
        "metadata": {"total_size": sum(file.size - len(file.header) for file in files)},
        "weight_map": {name: file.name for file in files for name in file.offsets},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _check(tensors: Sequence[Tensor]) -> None:
    problems = []
    seen = set()
    for name, dtype, _ in tensors:
        if dtype not in DTYPES:
            fix = f"Convert it to one of {', '.join(DTYPES)}."
            message = f"'{name}' is {dtype}, which safetensors files cannot hold."
            problems.append(Problem(severity="error", message=message, fix=fix))
        if name in seen or name == "__metadata__":
            reason = "comes twice" if name in seen else "is a name that safetensors keeps for itself"
            problems.append(Problem(severity="error", message=f"'{name}' {reason}.", fix="Rename the tensor."))
        seen.add(name)
    if problems:
        raise CheckpointError(problems)


def _deal(tensors: Sequence[Tensor], max_shard_size: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = []
    alone: list[list[Tensor]] = []
    room = -1
    for tensor in tensors:
        size = num_bytes(*tensor[1:])
        if size > max_shard_size:
            alone.append([tensor])
            continue
        if size > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= size
    return shards + alone or [[]]


def _file(name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> SafetensorsFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    starts = {}
    end = 0
    for tensor, dtype, shape in sorted(tensors, key=lambda entry: -DTYPES[entry[1]][1]):
        starts[tensor], begin = end, end
        end += num_bytes(dtype, shape)
        entries[tensor] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return SafetensorsFile(name, header, len(header) + end, {key: len(header) + at for key, at in starts.items()})
