"""Checks of the files of a Hugging Face model before its weights are read: index, headers, shapes. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hf_fsdp_plugin.checkpoint.formats.errors import (
    COPY_AGAIN,
    LFS_POINTER_SIZE,
    problem,
    raise_if_any,
    refuse,
    refuse_lfs_pointer,
)
from hf_fsdp_plugin.checkpoint.formats.safetensors_header import parse_weight_map, read_header
from hf_fsdp_plugin.checkpoint.formats.stored import MAX_PROBLEMS, missing_problem, name_problem
from hf_fsdp_plugin.checkpoint.io import reading
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, format_shape, plural

_OTHER_MODEL = (
    "Load the files of this model, or the config.json that belongs to them. To initialize such weights anew, pass "
    "ignore_mismatched_sizes=True."
)


class ModelTensor(NamedTuple):
    """A tensor in a file of a model. ``file`` is the file's path, ``dtype`` torch's name, or the file's if unknown."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class ShapeMismatch(NamedTuple):
    """A weight whose shape does not fit. ``file`` is empty if the weight is computed from several tensors."""

    name: str
    file: str
    stored: tuple[int, ...]
    expected: tuple[int, ...]


def check_model_index(index: Path, *, is_local: bool) -> None:
    """Check the index of a model, and that all of its files exist in the same folder.

    Args:
        is_local: whether the files are in the folder of the index. Otherwise they are looked up later.

    Raises:
        CheckpointError: the index is damaged, or refers to missing files or to files outside the folder.
    """
    files = sorted(parse_weight_map(index))
    problems = [found for file in files if (found := name_problem(file, index)) is not None]
    if not problems and is_local:
        # The names only, not where links lead: model folders with links to other disks are common.
        problems = [missing_problem(file, index) for file in files if not (index.parent / file).is_file()]
    raise_if_any(problems[:MAX_PROBLEMS])


def read_model_headers(files: Iterable[str]) -> dict[str, ModelTensor]:
    """Return name -> tensor of a model's files. Only the headers of safetensors files are read, each of them once.

    Raises:
        CheckpointError: a file is missing, empty, truncated, not a safetensors file, or a pointer of Git LFS.
    """
    tensors: dict[str, ModelTensor] = {}
    for file in files:
        path = Path(file)
        try:
            if file.endswith(".safetensors"):
                entries, _ = read_header(path, any_dtype=True)
                tensors |= {name: ModelTensor(file, entry.shape, entry.dtype) for name, entry in entries.items()}
            else:
                _check_other_file(path)
        except OSError as error:
            refuse("FSDP-E472", path, f"cannot be read: {error.strerror}.", "Check its permissions and the disk.")
    return tensors


def _check_other_file(path: Path) -> None:
    with reading(path) as file:
        if not os.fstat(file.fileno()).st_size:
            refuse("FSDP-E453", path, "is empty.")
        refuse_lfs_pointer(path, file.read(LFS_POINTER_SIZE))


def raise_absent_tensors(absent: Iterable[str], weight_map: Mapping[str, str], files: Iterable[str]) -> None:
    """Raise a ``CheckpointError`` with one problem for each file that lacks tensors; do nothing if there are none.

    Args:
        absent: names of tensors that the model needs and that are in none of the files. Transformers would initialize
            these weights anew.
        weight_map: name -> name of the file, from the index.
        files: paths of the files.
    """
    by_file: dict[str, list[str]] = {}
    for name in sorted(absent):
        by_file.setdefault(weight_map[name], []).append(name)
    paths = {os.path.basename(file): file for file in files}
    problems = [
        problem(
            "FSDP-E459",
            paths.get(os.path.basename(file), file),
            f"does not contain {plural(len(names), 'tensor')} that the index of the model lists there: "
            f"{format_names(names, 3)}.",
            COPY_AGAIN,
        )
        for file, names in by_file.items()
    ]
    raise_if_any(problems[:MAX_PROBLEMS])


def raise_shape_mismatches(mismatches: Iterable[ShapeMismatch], model_class: str, folder: str) -> None:
    """Raise a ``CheckpointError`` with one problem for each file; do nothing if there are no mismatches."""
    by_file: dict[str, list[ShapeMismatch]] = {}
    for mismatch in sorted(mismatches):
        by_file.setdefault(mismatch.file, []).append(mismatch)
    raise_if_any([_shape_problem(file or folder, each, model_class) for file, each in by_file.items()][:MAX_PROBLEMS])


def _shape_problem(place: str, mismatches: list[ShapeMismatch], model_class: str) -> Problem:
    shown = [
        f"{each.name} ({format_shape(each.stored)} in the file, {format_shape(each.expected)} in the model)"
        for each in mismatches
    ]
    message = (
        f"contains {plural(len(mismatches), 'tensor')} with other shapes than in {model_class}: "
        f"{format_names(shown, 3)}."
    )
    return problem("FSDP-E479", place, message, _OTHER_MODEL)
