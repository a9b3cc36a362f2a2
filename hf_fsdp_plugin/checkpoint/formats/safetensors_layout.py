"""The layout of safetensors files before they are written, so that several writers can fill one file concurrently.

A file is 8 bytes (little-endian length of the header), the header (JSON, padded with spaces) and the tensors without
gaps, row-major and little-endian: https://github.com/huggingface/safetensors#format. File names and the index are those
of Hugging Face.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_fsdp_plugin.checkpoint.formats.element_types import SAFETENSORS_NAMES, dtype_size
from hf_fsdp_plugin.checkpoint.formats.errors import raise_if_any
from hf_fsdp_plugin.problems import Problem

DATA_ALIGNMENT = 4096
"""The tensors begin at a multiple of this many bytes, so that direct I/O and memory maps start at a page."""

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, torch's name of the dtype, shape."""


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The layout of one file.

    Attributes:
        name: ``model.safetensors`` or ``model-00001-of-00003.safetensors``.
        header: all bytes before the first tensor.
        size: size of the whole file in bytes.
        offsets: tensor -> byte offset in the file, in ascending order.
    """

    name: str
    header: bytes
    size: int
    offsets: dict[str, int]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype_size(dtype)


def plan_files(
    tensors: Sequence[Tensor], max_shard_size: int, stem: str = "model", metadata: Mapping[str, str] | None = None
) -> list[SafetensorsFile]:
    """Return the files that contain ``tensors``, each with at most ``max_shard_size`` bytes of tensors.

    Tensors are assigned in order. A tensor larger than ``max_shard_size`` gets a separate file. Within a
    file, large dtypes come first, so that tensors are aligned to their element size.

    Raises:
        CheckpointError: a name is duplicate or reserved, or safetensors does not support a dtype.
    """
    _check(tensors)
    shards = _assign(tensors, max_shard_size)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return [_file(name, shard, metadata or {}) for name, shard in zip(names, shards, strict=True)]


def index_text(files: Sequence[SafetensorsFile]) -> str | None:
    """Return the text of ``model.safetensors.index.json``; ``None`` for a single file, which has no index."""
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
        if dtype not in SAFETENSORS_NAMES:
            fix = f"Convert it to one of {', '.join(SAFETENSORS_NAMES)}."
            message = f"'{name}' is {dtype}, which safetensors does not support."
            problems.append(Problem(code="FSDP-E466", message=message, fix=fix))
        if name in seen or name == "__metadata__":
            reason = "is the name of two tensors" if name in seen else "is a reserved name of safetensors"
            problems.append(Problem(code="FSDP-E467", message=f"'{name}' {reason}.", fix="Rename the tensor."))
        seen.add(name)
    raise_if_any(problems)


def _assign(tensors: Sequence[Tensor], max_shard_size: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = []
    alone: list[list[Tensor]] = []
    free = -1
    for tensor in tensors:
        size = num_bytes(*tensor[1:])
        if size > max_shard_size:
            alone.append([tensor])
            continue
        if size > free:
            shards.append([])
            free = max_shard_size
        shards[-1].append(tensor)
        free -= size
    return shards + alone or [[]]


def _file(name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> SafetensorsFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    starts = {}
    end = 0
    for tensor, dtype, shape in sorted(tensors, key=lambda entry: -dtype_size(entry[1])):
        starts[tensor], begin = end, end
        end += num_bytes(dtype, shape)
        entries[tensor] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return SafetensorsFile(name, header, len(header) + end, {key: len(header) + at for key, at in starts.items()})
