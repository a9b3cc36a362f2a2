"""Checks the files of ``from_pretrained``, and compares them with the model.

No weights are read: only the index, and the headers of safetensors files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint import errors
from hf_fsdp_plugin.checkpoint.formats.safetensors import parse_weight_map, read_entries
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import MAX_PROBLEMS
from hf_fsdp_plugin.checkpoint.io import open_for_reading
from hf_fsdp_plugin.text import format_names, format_shape, plural


def required_names(model: Any, names: Iterable[str]) -> list[str]:
    """Return the names that a checkpoint of the model must contain."""
    return not_matching(names, getattr(model, "_keys_to_ignore_on_load_missing", None))


def not_matching(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    """Return the names that match none of the patterns that the model's class ignores."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


_OTHER_MODEL = (
    "Load the files of this model, or the config.json that belongs to them. To initialize such weights anew, pass "
    "ignore_mismatched_sizes=True."
)


class ModelTensor(NamedTuple):
    """A tensor of a model in ``file``, a path. ``dtype``: torch's name, or the one in the file if torch has none."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def check_model_index(index: Path, *, is_local: bool) -> None:
    """Check the index of a model, and that all of its files exist in the same folder.

    Args:
        is_local: whether the files are in the folder of the index. Otherwise they are looked up later.

    Raises:
        CheckpointError: the index is damaged, or refers to missing files or to files outside the folder.
    """
    files = sorted(parse_weight_map(index))
    problems = [found for file in files if (found := errors.name_problem(file, index)) is not None]
    if not problems and is_local:
        # The names only, not where links lead: model folders with links to other disks are common.
        problems = [errors.missing_problem(file, index) for file in files if not (index.parent / file).is_file()]
    errors.raise_if_any(problems[:MAX_PROBLEMS])


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
                entries = read_entries(path, any_dtype=True)
                tensors |= {name: ModelTensor(file, entry.shape, entry.dtype) for name, entry in entries.items()}
                continue
            with open_for_reading(path) as opened:
                if not os.fstat(opened.fileno()).st_size:
                    errors.refuse("FSDP-E453", path, "is empty.")
                errors.refuse_lfs_pointer(path, opened.read(errors.LFS_POINTER_SIZE))
        except OSError as error:
            fix = "Check its permissions and the disk."
            errors.refuse("FSDP-E472", path, f"cannot be read: {error.strerror}.", fix)
    return tensors


def raise_absent_tensors(absent: Iterable[str], weight_map: Mapping[str, str], files: Iterable[str]) -> None:
    """Raise a ``CheckpointError`` with one problem for each file that lacks tensors; do nothing if there are none.

    Args:
        absent: names of tensors that the model needs and that are in none of the files. Transformers would initialize
            these weights anew.
        weight_map: name -> name of the file, from the index.
        files: paths of the files.
    """
    paths = {os.path.basename(file): file for file in files}
    found = [(paths.get(os.path.basename(weight_map[name]), weight_map[name]), name) for name in sorted(absent)]
    _raise_by_file("FSDP-E459", "does not contain {} that the index of the model lists there", found, errors.COPY_AGAIN)


def raise_shape_mismatches(
    mismatches: Iterable[tuple[str, str, Sequence[int], Sequence[int]]], model_class: str, folder: str
) -> None:
    """Raise a ``CheckpointError`` with one problem for each file; do nothing if there are no mismatches.

    Args:
        mismatches: name of a weight, its file, and its shapes in the file and in the model. The file is empty if the
            weight is computed from several tensors.
    """
    found = []
    for name, file, stored, expected in sorted(mismatches):
        shapes = f"{format_shape(stored)} in the file, {format_shape(expected)} in the model"
        found.append((file or folder, f"{name} ({shapes})"))
    _raise_by_file("FSDP-E479", f"contains {{}} with other shapes than in {model_class}", found, _OTHER_MODEL)


def _raise_by_file(code: str, message: str, names: Iterable[tuple[str, str]], fix: str) -> None:
    """Raise one problem for each file, with a few names.

    Args:
        message: the message, with ``{}`` for the number of tensors.
        names: file, and name of a tensor.
    """
    by_file: dict[str, list[str]] = {}
    for file, name in names:
        by_file.setdefault(file, []).append(name)
    problems = []
    for file, found in by_file.items():
        text = f"{message.format(plural(len(found), 'tensor'))}: {format_names(found, 3)}."
        problems.append(errors.problem(code, file, text, fix))
    errors.raise_if_any(problems[:MAX_PROBLEMS])
