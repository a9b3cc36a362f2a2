"""Whether a checkpoint is all there, told in moments: by its manifest, or by its structure where it has none.

This looks at names, sizes and headers only. Whether the bytes are still those that were saved is
:mod:`hf_fsdp_plugin.checkpoint.checking.verify`'s subject.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.checksums import NotAnArchive, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer, StoredTensor, problem
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.names import (
    ACCELERATE_PREFIX,
    FSDP_MODEL,
    MANIFEST_NAME,
    OPTIMIZER,
    SAVING,
    TRAINER_PREFIX,
    TRAINER_STATE,
    accelerate_rng_file,
    local_folder,
)
from hf_fsdp_plugin.problems import CheckpointError, Problem

_OURS = (local_folder(FSDP_MODEL), local_folder(OPTIMIZER))
"""Folders that nobody else writes, and we never without a manifest."""
_PART = re.compile(rf"({FSDP_MODEL}|{OPTIMIZER})_(\d+|local)")
_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")
_RESUME_EARLIER = "Resume from an earlier checkpoint."


def why_incomplete(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, in one line; None where it is complete."""
    try:
        manifest = read_manifest(folder)
        problems = stock_problems(folder) if manifest is None else file_problems(folder, manifest)
    except CheckpointError as error:
        problems = list(error.problems)
    errors = [found for found in problems if found.severity == "error"]
    if not errors:
        return None
    more = f" ({len(errors) - 1} more problems)" if len(errors) > 1 else ""
    return _in_folder(errors[0], folder) + more


def newest_complete(run_folder: Path, prefix: str = TRAINER_PREFIX) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The complete checkpoint of the highest number, and the newer ones that are not, each with the reason."""
    passed_over: list[tuple[Path, str]] = []
    for folder in numbered(run_folder, prefix):
        reason = why_incomplete(folder)
        if reason is None:
            return folder, passed_over
        passed_over.append((folder, reason))
    return None, passed_over


def numbered(run_folder: Path, prefix: str) -> list[Path]:
    """The folders ``<prefix><number>`` in a folder, the highest number first; none where there is no such folder."""
    if not run_folder.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    found = [(int(match[1]), path) for path in run_folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that ``path`` is a part of (``pytorch_model_fsdp_0``), or ``path`` itself."""
    parent = path.resolve().parent
    if not _PART.fullmatch(path.resolve().name) or (path / MANIFEST_NAME).exists():
        return path
    return parent if any((parent / name).is_file() for name in (MANIFEST_NAME, TRAINER_STATE)) else path


def file_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Files of the manifest that are missing, or not of the size that was saved."""
    problems = []
    for record in manifest.files:
        path = folder / record.path
        try:
            status = path.stat()
        except OSError:
            status = None
        held = _held(sorted({piece.name for piece in record.ranges if piece.name}))
        if status is None or not stat.S_ISREG(status.st_mode):
            problems.append(_problem(path, f"is missing{held}."))
        elif status.st_size != record.size:
            lost = sorted({piece.name for piece in record.ranges if piece.name and piece.stop > status.st_size})
            message = f"has {status.st_size:,} bytes; {record.size:,} were saved{_held(lost)}."
            problems.append(_problem(path, message))
    return problems


def stock_problems(folder: Path) -> list[Problem]:
    """What the structure of a checkpoint without a manifest tells: unreadable, cut short, or never finished.

    Raises:
        CheckpointError: there is no model in it that could be read.
    """
    if SAVING in (Path(name).suffix for name in (folder.resolve().name, folder.resolve().parent.name)):
        return [_problem(folder, "is being written, or is what is left of a save that was cut off.")]
    unfinished = [
        _problem(folder / name, f"is there, but no {MANIFEST_NAME}: the save was not finished.")
        for name in _OURS
        if ((folder / name).is_dir() and not (folder / MANIFEST_NAME).exists()) or folder.resolve().name == name
    ]
    if unfinished:
        return unfinished
    # The readers follow every reference, and refuse those that lead behind the end of a file.
    read_stored_model(folder)
    read_stored_optimizer(folder)
    return _cut_archives(folder) + _unfinished(folder)


def tensors_of(index: StoredModel | StoredOptimizer) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor, by a name for messages: ``model.norm.weight``, or ``exp_avg of model.norm.weight``."""
    if isinstance(index, StoredModel):
        yield from index.tensors.items()
        return
    for name, entry in index.state.items():
        yield from ((f"{key} of {name}", value) for key, value in entry.items() if isinstance(value, StoredTensor))


def own_files(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint; other checkpoints inside of it (it may be a run's folder) are not its own."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not re.fullmatch(r"\.?checkpoint([-_]\d+.*|s)", name)]
        yield from (Path(place) / name for name in files)


def listed(names: list[str], most: int = 3) -> str:
    """``a, b, c and 5 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _held(names: list[str]) -> str:
    return f"; it held {listed(names)}" if names else ""


def _problem(path: Path, message: str) -> Problem:
    return problem(path, message, _RESUME_EARLIER)


def _in_folder(found: Problem, folder: Path) -> str:
    """A problem's place and message, without the part of the place that the reader knows."""
    if found.origin is None or found.origin.place == str(folder):
        return found.message
    return f"{found.origin.place.removeprefix(f'{folder}/')}: {found.message}"


def _cut_archives(folder: Path) -> list[Problem]:
    """Empty files, and archives that are not whole, among what ``torch.save`` wrote beside the model."""
    problems = []
    for path in sorted(path for pattern in _ARCHIVES for path in folder.glob(pattern) if path.is_file()):
        try:
            if path.stat().st_size == 0:
                problems.append(_problem(path, "is empty."))
            elif is_archive(path):
                for _ in stored_entries(path):
                    pass
        except NotAnArchive as error:
            problems.append(_problem(path, f"{error}: it was cut short or damaged."))
        except OSError as error:
            problems.append(_problem(path, f"cannot be read: {error.strerror}."))
    return problems


def _unfinished(folder: Path) -> list[Problem]:
    """The host writes these last, so their absence says that it did not get there."""
    name = folder.resolve().name
    if re.fullmatch(rf"{TRAINER_PREFIX}\d+", name):
        try:
            json.loads((folder / TRAINER_STATE).read_bytes())
        except FileNotFoundError:
            return [_problem(folder, f"has no {TRAINER_STATE}: the save was not finished.")]
        except (OSError, ValueError) as error:
            return [_problem(folder / TRAINER_STATE, f"cannot be read: {error}.")]
    elif re.fullmatch(rf"{ACCELERATE_PREFIX}\d+", name) and not (folder / accelerate_rng_file(0)).is_file():
        return [_problem(folder, f"has no {accelerate_rng_file(0)}: the save was not finished.")]
    return []
