"""Where the tensors of a checkpoint lie, whatever format they were written in: names, boxes, files, bytes.

No format's reader touches the bytes of a tensor; who wants them goes to the file, the offset and the strides that
stand here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, uncovered
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem

COPY_AGAIN = "Use another checkpoint, or copy this one again, whole."
"""The remedy for damage."""

MAX_PATH = 4096
"""Characters of a file's name that Linux opens."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One box of a tensor, in one file.

    Attributes:
        box: which elements of the tensor.
        file: path relative to the index' root, with ``/``.
        offset: the byte of the file at which the box' first element lies.
        strides: elements between neighbours in each dim, within the file.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and all its pieces. Two names of one tensor have pieces at the same places.

    Attributes:
        name: canonical, free of wrapper parts; of an optimizer's tensor the parameter's.
        dtype: torch's name without ``torch.``: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
        shape: of the whole tensor.
        pieces: where its boxes lie, replicas left out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Every entry of a model's state dict.

    Attributes:
        root: the folder that the pieces' files are relative to.
        format: ``dcp``, ``local``, ``full``, ``bin`` or ``per_rank``.
        tensors: name -> tensor.
        objects: name -> value of the entries that are no tensors.
    """

    root: Path
    format: str
    tensors: dict[str, StoredTensor]
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer's state, keyed by the names of parameters.

    Attributes:
        root: the folder that the pieces' files are relative to.
        format: as in :class:`StoredModel`.
        state: parameter -> key (``exp_avg``, ``step``) -> tensor, or a plain value.
        groups: one dict a parameter group: ``params`` is a list of names, the rest are hyperparameters.
    """

    root: Path
    format: str
    state: dict[str, dict[str, StoredTensor | Any]]
    groups: list[dict[str, Any]]


def unreplicated(pieces: Iterable[StoredPiece]) -> tuple[StoredPiece, ...]:
    """One piece a box, none for empty ones: ranks that hold the same box wrote the same elements."""
    by_box: dict[Box, StoredPiece] = {}
    for piece in pieces:
        if piece.box.numel:
            by_box.setdefault(piece.box, piece)
    return tuple(by_box.values())


def shared_tensors(model: StoredModel) -> list[tuple[str, ...]]:
    """Names whose tensors are the same bytes of the same files."""
    by_place: dict[tuple[str, tuple[int, ...], frozenset[StoredPiece]], list[str]] = {}
    for name, tensor in model.tensors.items():
        by_place.setdefault((tensor.dtype, tensor.shape, frozenset(tensor.pieces)), []).append(name)
    return [tuple(names) for key, names in by_place.items() if len(names) > 1 and math.prod(key[1]) > 0]


def file_inside(root: Path, relative: str, place: Path | str) -> Path:
    """The file that ``place`` names by ``relative``, within the folder ``root``.

    Raises:
        CheckpointError: for an absolute path, ``..``, a symlink that leaves the folder, and a file that is not there.
            Out of a snapshot of the Hugging Face cache links may lead to its ``blobs``.
    """
    if "\0" in relative or len(relative) > MAX_PATH:
        refuse(place, f"it names the file {relative[:80]!r}, which no file can be called.", "Use another checkpoint.")
    path = root / relative
    fix = "Use a copy of the checkpoint from a source you trust."
    if PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts or "\\" in relative:
        refuse(place, f"it names the file {relative!r}, outside its folder.", fix)
    allowed = [root.resolve()]
    if root.parent.name == "snapshots":
        allowed.append((root.parent.parent / "blobs").resolve())
    real = path.resolve()
    if not any(real.is_relative_to(folder) for folder in allowed):
        refuse(place, f"it names the file {relative!r}, which is a link to {real}, outside its folder.", fix)
    if not real.is_file():
        refuse(place, f"it names the file {relative!r}, which is not there.", "Copy the checkpoint again, whole.")
    return path


def uncovered_problems(place: Path | str, tensors: Iterable[StoredTensor], fix: str) -> list[Problem]:
    """One complaint about all tensors of which elements are missing."""
    missing = {tensor.name: uncovered(tensor.shape, [piece.box for piece in tensor.pieces]) for tensor in tensors}
    names = [name for name, count in missing.items() if count]
    if not names:
        return []
    return [
        problem(
            place,
            f"{sum(missing.values())} elements of {len(names)} tensors are in none of its files; the first is "
            f"{names[0]!r}.",
            fix,
        )
    ]


def problem(place: Path | str, message: str, fix: str) -> Problem:
    """One complaint about a file or folder of a checkpoint."""
    return Problem(severity="error", message=message, fix=fix, origin=Origin(source=str(place)))


def refuse(place: Path | str, message: str, fix: str) -> NoReturn:
    """Raise the only complaint there is."""
    raise CheckpointError([problem(place, message, fix)])
