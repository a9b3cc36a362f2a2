"""The formats in safetensors files: ``full``, a Hugging Face folder or a PEFT adapter, and ``hf_shards``.

A file is 8 bytes (little-endian length of the header), the header (JSON, padded with spaces) and the tensors without
gaps, row-major and little-endian: https://github.com/huggingface/safetensors#format. The layout is known before a file
is written, so that several writers can fill it concurrently. File names and the index are those of Hugging Face.

``hf_shards`` are the files of ``save_pretrained(distributed_checkpoint=True)``, and those of torch's
``HuggingFaceStorageWriter(save_distributed=True)``, which are in ``sharded/`` if they are to be consolidated. Each file
``shard-00001-model-00001-of-00001.safetensors`` has a box of each tensor. The metadata in its header has the offsets of
the boxes. The shapes of the whole tensors are not stored: they end where the last box ends.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from hf_fsdp_plugin.checkpoint import errors
from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.file_io import object_in, open_for_reading, read_file
from hf_fsdp_plugin.checkpoint.formats import boxes, stored_tensors
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES, StoredPiece, StoredState, StoredTensor
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

_SHARDING_INFO: Final = "DCP_SHARDING_INFO"
"""The entry with the offsets of boxes in the header of a file that torch's ``HuggingFaceStorageWriter`` has written."""
SAFETENSORS_NAMES: Final[Mapping[str, str]] = MappingProxyType({
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64", "float32": "F32", "int32": "I32",
    "uint32": "U32", "bfloat16": "BF16", "float16": "F16", "int16": "I16", "uint16": "U16", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8",
})  # fmt: skip
"""Type -> its name in the headers of safetensors files that this package writes."""
_DTYPES: Final = {
    **{name: dtype for dtype, name in SAFETENSORS_NAMES.items()},
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The element types of safetensors files -> torch's."""


class TensorEntry(NamedTuple):
    """A tensor in a safetensors file; ``offset`` is the byte offset of its first element in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_entries(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors in a safetensors file and its metadata, from its header, which the safetensors library checks.

    Raises:
        CheckpointError: the file is truncated, longer than its header allows, or its header is damaged.
    """
    with open_for_reading(path) as file:
        head = file.read(errors.LFS_POINTER_SIZE)
        errors.refuse_lfs_pointer(path, head)
        try:
            with safe_open(path, "np") as opened:
                metadata = opened.metadata() or {}
            file.seek(8)
            header = json.loads(file.read(struct.unpack("<Q", head[:8])[0]))
        except (SafetensorError, ValueError) as error:
            size = os.fstat(file.fileno()).st_size
            required = _required_size(file)
            needs = "it" if required is None else f"its header requires {required} bytes, and it"
            message = f"has {size} bytes; {needs} is truncated, damaged or not a safetensors file ({error})."
            errors.refuse("FSDP-E453", path, message)
        begin = file.tell()
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        if dtype not in SIZES:
            errors.refuse("FSDP-E453", path, f"has tensor {name!r} of the unknown element type {dtype!r}.")
        entries[name] = TensorEntry(dtype, tuple(entry["shape"]), begin + entry["data_offsets"][0])
    return entries, metadata


def _required_size(file: BinaryIO) -> int | None:
    """Return the size of a file by its header; ``None`` if the header is damaged."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, struct.error, OverflowError, RecursionError):
        file.seek(0)
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
        return 8 + int(length) + max(entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__")
    return None


def read_weight_map(root: Path, index: Path) -> dict[str, set[str]]:
    """Return file -> names of its tensors, from a Hugging Face index. Checks that all files exist inside the folder.

    Raises:
        CheckpointError: the index is damaged, or a file is missing.
    """
    text = read_file(index)
    errors.refuse_lfs_pointer(index, text)
    try:
        shards: dict[str, set[str]] = {}
        for name, file in json.loads(text)["weight_map"].items():
            if not isinstance(file, str):
                raise TypeError(f"{name!r} is in {file!r}")
            shards.setdefault(file, set()).add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        expected = "Expected: a JSON object whose weight_map contains the file of each tensor."
        message = f"is not a valid index of weights ({type(error).__name__}: {error}). {expected}"
        errors.refuse("FSDP-E453", index, message)
    errors.raise_if_any(errors.file_problems_inside(root, shards, index))
    return shards


DATA_ALIGNMENT = 4096
"""The tensors begin at a multiple of this many bytes, so that direct I/O and memory maps start at a page."""

TensorHeader = tuple[str, str, tuple[int, ...]]
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
    return math.prod(shape) * SIZES[dtype]


def plan_files(tensors: Sequence[TensorHeader], max_shard_size: int, stem: str = "model") -> list[SafetensorsFile]:
    """Return the files that contain ``tensors``, each with at most ``max_shard_size`` bytes of tensors.

    Tensors are assigned in order. A tensor larger than ``max_shard_size`` gets a separate file. Within a
    file, large dtypes come first, so that tensors are aligned to their element size.

    Raises:
        CheckpointError: safetensors does not support a dtype or a name.
    """
    _check(tensors)
    shards = _assign(tensors, max_shard_size)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return [_file(name, shard) for name, shard in zip(names, shards, strict=True)]


def index_text(files: Sequence[SafetensorsFile]) -> str | None:
    """Return the text of ``model.safetensors.index.json``; ``None`` for a single file, which has no index."""
    if len(files) == 1:
        return None
    index = {
        "metadata": {"total_size": sum(file.size - len(file.header) for file in files)},
        "weight_map": {name: file.name for file in files for name in file.offsets},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _check(tensors: Sequence[TensorHeader]) -> None:
    problems = []
    for name, dtype, _ in tensors:
        if dtype not in SAFETENSORS_NAMES:
            message = f"'{name}' is {dtype}, which safetensors does not support."
            fix = f"Convert it to one of {', '.join(SAFETENSORS_NAMES)}."
            problems.append(Problem(code="FSDP-E466", message=message, fix=fix))
        if any("\ud800" <= character <= "\udfff" for character in name):
            message = f"the name {name!a} is not valid Unicode, which safetensors requires."
            problems.append(Problem(code="FSDP-E466", message=message, fix="Rename the tensor in the checkpoint."))
    errors.raise_if_any(problems)


def _assign(tensors: Sequence[TensorHeader], max_shard_size: int) -> list[list[TensorHeader]]:
    shards: list[list[TensorHeader]] = []
    alone: list[list[TensorHeader]] = []
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


def _file(name: str, tensors: Sequence[TensorHeader]) -> SafetensorsFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for tensor, dtype, shape in sorted(tensors, key=lambda entry: -SIZES[entry[1]]):
        starts[tensor], begin = end, end
        end += num_bytes(dtype, shape)
        entries[tensor] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return SafetensorsFile(name, header, len(header) + end, {key: len(header) + at for key, at in starts.items()})


def read_safetensors(root: Path, name: str) -> StoredState | None:
    """Return the tensors in the file ``name``, or in the shards that its index lists; ``None`` if neither exists."""
    index = root / file_names.index_file(name)
    listed: Mapping[str, Set[str]] = {}
    shards: tuple[str, ...] = (name,)
    if (root / name).is_file():
        errors.raise_if_any(errors.file_problems_inside(root, shards, root))
        files = shards
    elif index.is_file():
        listed = read_weight_map(root, index)
        shards, files = tuple(listed), (index.name, *listed)
    else:
        return None
    tensors: dict[tuple[Any, ...], Any] = {}
    problems: list[Problem] = []
    has_boxes = False
    for shard in shards:
        entries, metadata = read_entries(root / shard)
        has_boxes |= _SHARDING_INFO in metadata
        names = listed.get(shard, entries.keys())
        absent = sorted(names - entries.keys())
        if absent:
            message = f"lists {plural(len(absent), 'tensor')} that {shard} does not contain: {format_names(absent, 3)}."
            problems.append(errors.problem("FSDP-E459", index, message, errors.COPY_AGAIN))
        for key in (key for key in entries if key in names):
            entry = entries[key]
            tensors[key,] = stored_tensors.tensor_in_file(key, entry.dtype, entry.shape, shard, entry.offset)
    if has_boxes and listed:  # before the absent tensors, which follow from it
        _check_one_writer(index, sum(tensor.num_bytes for tensor in tensors.values()))
    errors.raise_if_any(problems)
    return StoredState(tensors, files, root)


def _check_one_writer(index: Path, size: int) -> None:
    """Refuse files in which several ranks have overwritten each other's parts: the index has the sum of their bytes."""
    sizes = object_in(index).get("metadata")
    total = sizes.get("total_size") if isinstance(sizes, dict) else None
    if isinstance(total, int) and total != size:
        message = (
            f"lists tensors of {total:,} bytes, and the files have {size:,}: several ranks wrote to the same files."
        )
        fix = "Save again with HuggingFaceStorageWriter(save_distributed=True), or on one rank with no_dist=True."
        errors.refuse("FSDP-E458", index, message, fix)


def read_model(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the model of a Hugging Face folder. Optimizers are not stored in this format."""
    name = file_names.safetensors_file(file_names.numbered_from_one(file_names.HF_MODEL, number))
    return read_safetensors(root, name) if stem == file_names.FSDP_MODEL else None


def read_adapter(root: Path, stem: str, _number: int) -> StoredState | None:
    """Return the weights of a PEFT adapter, which are one file without a number."""
    name = file_names.safetensors_file(file_names.ADAPTER)
    return read_safetensors(root, name) if stem == file_names.FSDP_MODEL else None


_SHARD_FILES: Final = "shard-*-model-*-of-*.safetensors"
SHARD_PATTERNS: Final = (_SHARD_FILES, f"sharded/{_SHARD_FILES}")


def read_shards(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the model in a folder with files of shards; ``None`` without. Optimizers are stored elsewhere."""
    patterns = SHARD_PATTERNS if stem == file_names.FSDP_MODEL and number == 0 else ()
    names = (sorted(path.relative_to(root).as_posix() for path in root.glob(pattern)) for pattern in patterns)
    files = next(filter(None, names), [])
    pieces: dict[str, list[StoredPiece]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        for name, entry, offsets in _boxes(root / file):
            box = boxes.Box(offsets, entry.shape)
            pieces.setdefault(name, []).append(StoredPiece(box, file, entry.offset, boxes.row_major(entry.shape)))
            same = pieces[name][0].box
            if dtypes.setdefault(name, entry.dtype) != entry.dtype or len(same.sizes) != len(box.sizes):
                found = f"{entry.dtype} with {len(box.sizes)} dimensions, and {dtypes[name]} with {len(same.sizes)}"
                errors.refuse("FSDP-E459", root / file, f"the files have {name!r} as {found}.")
    tensors: dict[tuple[Any, ...], Any] = {}
    for name, own in pieces.items():
        ends = ([at + size for at, size in zip(each.box.offsets, each.box.sizes, strict=True)] for each in own)
        shape = tuple(map(max, zip(*ends, strict=True)))
        tensors[name,] = StoredTensor(name, dtypes[name], shape, stored_tensors.without_replicas(own))
    return StoredState(tensors, tuple(files), root, errors.COPY_ALL_RANKS) if files else None


def _boxes(path: Path) -> list[tuple[str, TensorEntry, tuple[int, ...]]]:
    """Return name, entry and offsets of each tensor in one file."""
    (entries, metadata), found = read_entries(path), []
    try:
        places = json.loads(metadata[_SHARDING_INFO])
        for name, entry in entries.items():
            offsets = tuple(places[name]["saved_offsets"])
            if len(offsets) != len(entry.shape) or not all(type(at) is int and at >= 0 for at in offsets):
                raise ValueError(f"{name!r} has the shape {entry.shape} and the offsets {offsets}")
            found.append((name, entry, offsets))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        errors.refuse("FSDP-E453", path, f"has no valid {_SHARDING_INFO} in its header ({why}).")
    return found
