"""Safetensors: Hugging Face folders (``full``), and each rank's own shards in a file of its own (``local``)."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major, whole, within
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.stored import (
    COPY_AGAIN,
    StoredModel,
    StoredOptimizer,
    StoredPiece,
    StoredTensor,
    file_inside,
    problem,
    refuse,
    uncovered_problems,
    unreplicated,
)
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, OPTIMIZER, local_file, local_folder
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem

LOCAL_KEY = "fsdp_local"
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

MAX_RANKS = 1 << 20
"""More than any run has; a file that claims more is damaged."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""The format's names of element types -> torch's."""

MAX_SHOWN = 8
"""Missing files that are named one by one."""


class Entry(NamedTuple):
    """A tensor in a safetensors file; ``offset`` is the byte of the file at which it begins."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a safetensors file. Its tensors tile the file behind the header.

    Raises:
        CheckpointError: the file is truncated, longer than its header says, or its header is damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            refuse(
                path, f"{size} bytes long, with a header of {length} bytes: truncated, or no safetensors.", COPY_AGAIN
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        entries = {name: (Entry(*_described(entry)), *_range(entry)) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse(path, f"its header is damaged ({type(error).__name__}: {error}).", COPY_AGAIN)
    begin = 8 + length
    at = 0
    for name, (entry, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if start != at or stop - start != whole(entry.shape).numel * dtype_size(entry.dtype):
            refuse(
                path,
                f"tensor {name!r}, {entry.dtype} {entry.shape}, is said to lie at bytes {start} to {stop} of the data, "
                f"where byte {at} is the next: tensors overlap, leave holes or have another size.",
                COPY_AGAIN,
            )
        at = stop
    if begin + at != size:
        refuse(path, f"{size} bytes long, where its header needs {begin + at}.", COPY_AGAIN)
    return {name: entry._replace(offset=begin + start) for name, (entry, start, _) in entries.items()}, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _described(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    shape = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"unknown element type {entry['dtype']!r}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return DTYPES[entry["dtype"]], shape, 0


def _range(entry: Mapping[str, Any]) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    if not (type(start) is int and type(stop) is int and 0 <= start <= stop):
        raise ValueError(f"data_offsets {entry['data_offsets']}")
    return start, stop


def read_full_model(root: Path, name: str) -> StoredModel | None:
    """The model in ``name``, or in the shards that its index lists; ``None`` without them."""
    listed = root / f"{name}.index.json"
    shards: Mapping[str, Set[str] | None]
    if (root / name).is_file():
        shards = {name: None}
    elif listed.is_file():
        shards = shards_of(root, listed)
    else:
        return None
    tensors: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for shard, names in shards.items():
        entries, _ = read_header(root / shard)
        names = entries.keys() if names is None else names
        absent = sorted(names - entries.keys())
        if absent:
            problems.append(
                problem(
                    listed,
                    f"it places {len(absent)} tensors in {shard}, which lacks them; the first is {absent[0]!r}.",
                    COPY_AGAIN,
                )
            )
        for key in (key for key in entries if key in names):
            entry = entries[key]
            piece = StoredPiece(whole(entry.shape), shard, entry.offset, row_major(entry.shape))
            plain = canonical_name(key)
            tensors[plain] = StoredTensor(plain, entry.dtype, entry.shape, unreplicated([piece]))
    if problems:
        raise CheckpointError(problems)
    return StoredModel(root, "full", tensors)


def shards_of(root: Path, listed: Path) -> dict[str, set[str]]:
    """File -> names of the tensors in it, by a Hugging Face index. All its files are there, inside the folder."""
    try:
        weight_map = json.loads(listed.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise TypeError(f"{name!r} is in {file!r}")
            shards.setdefault(file, set()).add(name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse(listed, f"not an index of weights ({type(error).__name__}: {error}).", COPY_AGAIN)
    problems: list[Problem] = []
    for file in shards:
        try:
            file_inside(root, file, listed)
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return shards


class _Part(NamedTuple):
    """A rank's file of a ``local`` checkpoint: its entries, and what it says of itself."""

    path: Path
    entries: dict[str, Entry]
    said: dict[str, Any]


def read_local_model(root: Path, number: int) -> StoredModel | None:
    """The model of a ``local`` checkpoint from the files of all ranks, or ``None`` where there is none."""
    parts = _parts(root / local_folder(FSDP_MODEL), number)
    if not parts:
        return None
    found = _assembled(root, parts)
    tensors = {name: tensor for (name, _), tensor in found.items()}
    return StoredModel(root, "local", {**tensors, **_aliases(parts, tensors)})


def read_local_optimizer(root: Path, number: int) -> StoredOptimizer | None:
    """The optimizer of a ``local`` checkpoint from the files of all ranks, or ``None`` where there is none."""
    parts = _parts(root / local_folder(OPTIMIZER), number)
    if not parts:
        return None
    state: dict[str, dict[str, Any]] = {}
    for (name, key), tensor in _assembled(root, parts).items():
        state.setdefault(name, {})[key] = tensor
    for part in parts:
        for name, values in part.said.get("values", {}).items():
            state.setdefault(canonical_name(name), {}).update(values)
    return StoredOptimizer(root, "local", state, parts[0].said.get("groups", []))


def _parts(folder: Path, number: int) -> list[_Part]:
    """The files of all ranks, in their order. Raises for each that is missing."""
    ranks = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(rf"{number}_rank(\d{{1,7}})\.safetensors", path.name))
    }
    parts = {rank: _part(ranks[rank]) for rank in sorted(ranks)}
    if not parts:
        return []
    worlds = {part.said["world_size"] for part in parts.values()}
    if len(worlds) > 1:
        refuse(folder, f"its files are of runs of {sorted(worlds)} ranks.", "Keep the files of one checkpoint only.")
    num_ranks = worlds.pop()
    missing = [rank for rank in range(num_ranks) if rank not in ranks]
    if missing:
        raise CheckpointError(
            problem(
                folder / local_file(number, rank),
                f"missing: of the files of {num_ranks} ranks {len(missing)} are not there.",
                "Copy the files of all ranks, which may lie on other machines, into one folder.",
            )
            for rank in missing[:MAX_SHOWN]
        )
    return list(parts.values())


def _part(path: Path) -> _Part:
    entries, metadata = read_header(path)
    try:
        said = json.loads(metadata[LOCAL_KEY])
        _check_local(said, entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        refuse(path, f"not a rank's file of a local checkpoint ({type(error).__name__}: {error}).", COPY_AGAIN)
    return _Part(path, entries, said)


def _check_local(said: Any, entries: Mapping[str, Entry]) -> None:
    """Raises all that Python raises where a rank's file says of itself what cannot be."""
    if type(said["world_size"]) is not int or not 0 < said["world_size"] <= MAX_RANKS:
        raise ValueError(f"world_size {said['world_size']!r}")
    if said["pieces"].keys() != entries.keys():
        raise ValueError("its pieces are not its tensors")
    for entry, piece in said["pieces"].items():
        box, shape = Box(tuple(piece["offsets"]), entries[entry].shape), tuple(piece["shape"])
        if not all(type(number) is int and number >= 0 for number in (*box.offsets, *shape)) or not within(box, shape):
            raise ValueError(f"{entry!r} is {box} of {shape}")
        if not isinstance(piece["name"], str) or not isinstance(piece.get("key", ""), str):
            raise TypeError(f"{entry!r} is of {piece['name']!r}")
    if not all(isinstance(name, str) for name in said.get("aliases", {}).values()):
        raise TypeError(f"aliases {said['aliases']}")
    if not all(isinstance(values, dict) for values in said.get("values", {}).values()):
        raise TypeError("values that are no mappings")
    if not all(isinstance(group, dict) for group in said.get("groups", [])):
        raise TypeError("groups that are no mappings")


def _assembled(root: Path, parts: list[_Part]) -> dict[tuple[str, str], StoredTensor]:
    """(name, key) -> tensor; the key is empty for a model's."""
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    problems: list[Problem] = []
    for part in parts:
        file = part.path.relative_to(root).as_posix()
        for entry, piece in part.said["pieces"].items():
            dtype, sizes, offset = part.entries[entry]
            place = canonical_name(piece["name"]), piece.get("key", "")
            kind = dtype, tuple(piece["shape"])
            if kinds.setdefault(place, kind) != kind:
                message = f"{place[0]!r} is {kind} in it and {kinds[place]} in another rank's file."
                problems.append(problem(part.path, message, "Keep the files of one checkpoint only."))
            box = Box(tuple(piece["offsets"]), sizes)
            pieces.setdefault(place, []).append(StoredPiece(box, file, offset, row_major(sizes)))
    tensors = {place: StoredTensor(place[0], *kinds[place], unreplicated(found)) for place, found in pieces.items()}
    problems = problems or uncovered_problems(parts[0].path.parent, tensors.values(), COPY_AGAIN)
    if problems:
        raise CheckpointError(problems)
    return tensors


def _aliases(parts: list[_Part], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Further names of tied tensors."""
    named: dict[str, StoredTensor] = {}
    for part in parts:
        for alias, name in part.said.get("aliases", {}).items():
            if canonical_name(name) not in tensors:
                refuse(part.path, f"{alias!r} is tied to {name!r}, which no rank's file holds.", COPY_AGAIN)
            tensor = tensors[canonical_name(name)]
            named[canonical_name(alias)] = replace(tensor, name=canonical_name(alias))
    return named
