"""The format ``local``: a safetensors file per rank. ``docs/local_format.md`` is its specification."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major, within
from hf_fsdp_plugin.checkpoint.formats.errors import COPY_ALL_RANKS, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.index_file import IndexFile
from hf_fsdp_plugin.checkpoint.formats.safetensors_header import Entry, read_header
from hf_fsdp_plugin.checkpoint.formats.stored import (
    MAX_PROBLEMS,
    CheckpointFormat,
    StoredModel,
    StoredOptimizer,
    StoredPiece,
    StoredTensor,
    coverage_problems,
    without_replicas,
)
from hf_fsdp_plugin.checkpoint.formats.strict_json import parse_json
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, OPTIMIZER, local_file, local_folder, local_index
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem

METADATA_KEY = "fsdp_local"
"""The key of a file's description in the safetensors metadata."""
MAX_RANKS = 1 << 20
"""The largest valid world size; files with a larger one are reported as damaged."""

_ONE_CHECKPOINT = "Keep the files of one checkpoint only."


class _RankFile(NamedTuple):
    """The file of one rank: its safetensors entries, and the description in its metadata."""

    path: Path
    entries: dict[str, Entry]
    description: dict[str, Any]


def read_model(root: Path, number: int) -> StoredModel | None:
    """Return the model from the index or the files of all ranks, or ``None`` if there are none."""
    if (index := _open_index(root, local_folder(FSDP_MODEL), number)) is not None:
        tensors = {name: tensor for (name, _), tensor in _indexed(index).items()}
        for alias, path in index.aliases:
            name = canonical_name(str(alias[0]))
            tensors[name] = replace(tensors[canonical_name(str(path[0]))], name=name)
        return StoredModel(root, FORMAT.name, tensors, _index_names(root, index))
    files = _read_files(root / local_folder(FSDP_MODEL), number)
    if not files:
        return None
    tensors = {name: tensor for (name, _), tensor in _assemble(root, files).items()}
    return StoredModel(root, FORMAT.name, {**tensors, **_aliases(files, tensors)}, _names(root, files))


def read_optimizer(root: Path, number: int) -> StoredOptimizer | None:
    """Return the optimizer from the index or the files of all ranks, or ``None`` if there are none."""
    state: dict[str, dict[str, Any]] = {}
    if (index := _open_index(root, local_folder(OPTIMIZER), number)) is not None:
        for (name, key), tensor in _indexed(index).items():
            state.setdefault(name, {})[key] = tensor
        values, groups = _plain(index)
        for name, found in values.items():
            state.setdefault(canonical_name(name), {}).update(found)
        return StoredOptimizer(root, FORMAT.name, state, groups, _index_names(root, index))
    files = _read_files(root / local_folder(OPTIMIZER), number)
    if not files:
        return None
    for (name, key), tensor in _assemble(root, files).items():
        state.setdefault(name, {})[key] = tensor
    for file in files:
        for name, found in file.description.get("values", {}).items():
            state.setdefault(canonical_name(name), {}).update(found)
    groups = files[0].description.get("groups", [])
    return StoredOptimizer(root, FORMAT.name, state, groups, _names(root, files))


def _names(root: Path, files: list[_RankFile]) -> tuple[str, ...]:
    return tuple(file.path.relative_to(root).as_posix() for file in files)


def _open_index(root: Path, folder: str, number: int) -> IndexFile | None:
    """Return the index of the files of all ranks; ``None`` if there is none. It replaces reading their headers."""
    name = local_index(number)
    return IndexFile(root / folder, f"{folder}/", name) if (root / folder / name).is_file() else None


def _index_names(root: Path, index: IndexFile) -> tuple[str, ...]:
    return (index.path.relative_to(root).as_posix(),)


def _indexed(index: IndexFile) -> dict[tuple[str, str], StoredTensor]:
    """Return (name, key) -> tensor; the key is empty for a model."""
    tensors = {}
    for tensor in index.tensors:
        name, key = (*map(str, tensor.path), "")[:2]
        name = canonical_name(name)
        tensors[name, key] = StoredTensor(name, tensor.dtype, tensor.shape, index.pieces(tensor))
    return tensors


def _plain(index: IndexFile) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the plain values of the optimizer's state, and its groups."""
    plain = index.plain if isinstance(index.plain, dict) else {}
    values, groups = plain.get("values", {}), plain.get("groups", [])
    if (
        not isinstance(values, dict)
        or not isinstance(groups, list)
        or not all(isinstance(found, dict) for found in values.values())
        or not all(map(_is_group, groups))
    ):
        refuse("FSDP-E453", index.path, "is damaged: its values or groups are not in the form of an optimizer's.")
    return values, groups


def _read_files(folder: Path, number: int) -> list[_RankFile]:
    """Return the files of all ranks in rank order. Raises ``CheckpointError`` if any is missing."""
    paths = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(rf"{number}_rank(\d{{1,7}})\.safetensors", path.name))
    }
    files = [_read_file(paths[rank]) for rank in sorted(paths)]
    if not files:
        return []
    world_sizes = sorted({file.description["world_size"] for file in files})
    if len(world_sizes) > 1:
        found = " and ".join(map(str, world_sizes))
        refuse("FSDP-E459", folder, f"contains files of several runs, with world sizes {found}.", _ONE_CHECKPOINT)
    missing = [folder / local_file(number, rank) for rank in range(world_sizes[0]) if rank not in paths]
    message = f"is missing: the files of {len(missing)} of the {world_sizes[0]} ranks are not in the folder."
    raise_if_any([problem("FSDP-E457", path, message, COPY_ALL_RANKS) for path in missing[:MAX_PROBLEMS]])
    return files


def _read_file(path: Path) -> _RankFile:
    entries, metadata = read_header(path)
    try:
        description = parse_json(metadata[METADATA_KEY])
        _check_description(description, entries)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"is not the file of a rank of a local checkpoint ({type(error).__name__}: {error})."
        refuse("FSDP-E453", path, message)
    return _RankFile(path, entries, description)


def _check_description(description: Any, entries: Mapping[str, Entry]) -> None:
    """Raise an exception of any type for an invalid description. The caller reports all types as the same problem."""
    world_size = description["world_size"]
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
        raise ValueError(f"world_size {world_size!r}")
    if description["pieces"].keys() != entries.keys():
        raise ValueError("its pieces and its tensors have different names")
    for entry, piece in description["pieces"].items():
        box, shape = Box(tuple(piece["offsets"]), entries[entry].shape), tuple(piece["shape"])
        if not all(type(number) is int and number >= 0 for number in (*box.offsets, *shape)) or not within(box, shape):
            raise ValueError(f"{entry!r} is {box} of {shape}")
        if not isinstance(piece["name"], str) or not isinstance(piece.get("key", ""), str):
            raise TypeError(f"{entry!r} has the name {piece['name']!r}")
    if not all(isinstance(name, str) for name in description.get("aliases", {}).values()):
        raise TypeError(f"aliases {description['aliases']}")
    if not all(isinstance(values, dict) for values in description.get("values", {}).values()):
        raise TypeError("values are not mappings")
    if not all(map(_is_group, description.get("groups", []))):
        raise TypeError("groups are not mappings with a list of names")


def _is_group(group: Any) -> bool:
    """Whether a value is a parameter group of an optimizer, with the names of its parameters."""
    names = group.get("params", []) if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _assemble(root: Path, files: list[_RankFile]) -> dict[tuple[str, str], StoredTensor]:
    """Return (name, key) -> tensor; the key is empty for a model."""
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    problems: list[Problem] = []
    for file in files:
        relative = file.path.relative_to(root).as_posix()
        for entry, piece in file.description["pieces"].items():
            dtype, sizes, offset = file.entries[entry]
            tensor = canonical_name(piece["name"]), piece.get("key", "")
            kind = dtype, tuple(piece["shape"])
            if kinds.setdefault(tensor, kind) != kind:
                message = f"stores {tensor[0]!r} as {kind}, but the file of another rank stores it as {kinds[tensor]}."
                problems.append(problem("FSDP-E459", file.path, message, _ONE_CHECKPOINT))
            box = Box(tuple(piece["offsets"]), sizes)
            pieces.setdefault(tensor, []).append(StoredPiece(box, relative, offset, row_major(sizes)))
    tensors = {key: StoredTensor(key[0], *kinds[key], without_replicas(found)) for key, found in pieces.items()}
    problems = problems or coverage_problems(files[0].path.parent, tensors.values())
    raise_if_any(problems)
    return tensors


def _aliases(files: list[_RankFile], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tied tensors under their other names."""
    aliases: dict[str, StoredTensor] = {}
    for file in files:
        for alias, name in file.description.get("aliases", {}).items():
            if canonical_name(name) not in tensors:
                message = f"{alias!r} is tied to {name!r}, which is in none of the files."
                refuse("FSDP-E459", file.path, message, _ONE_CHECKPOINT)
            tensor = tensors[canonical_name(name)]
            aliases[canonical_name(alias)] = replace(tensor, name=canonical_name(alias))
    return aliases


FORMAT = CheckpointFormat(
    name="local",
    state_dict_type="local",
    model_files=(f"{local_folder(FSDP_MODEL)}/{{number}}_rank*.safetensors",),
    read_model=read_model,
    read_optimizer=read_optimizer,
    index_files=tuple(map(local_index, range(10))),
)
