"""Whether a checkpoint is complete. Does not import torch.

Only names, sizes, headers and metadata are read: the manifest, or the structure of the files if there is none.
:mod:`hf_fsdp_plugin.checkpoint.checking.verify` checks the bytes.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.trainer_checkpoint import RESUME_EARLIER, check_trainer_state
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.file_io import read_range
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, plural

_PART = re.compile(rf"({file_names.FSDP_MODEL}|{file_names.OPTIMIZER})_\d+")
_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")


def why_incomplete(folder: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, in one line; ``None`` if it is complete."""
    problems = completeness_problems(folder)
    if not problems:
        return None
    origin, message = problems[0].origin, problems[0].message
    if origin is not None and origin.source_line != str(folder):
        message = f"{origin.source_line.removeprefix(f'{folder}/')}: {message}"
    return message + (f" (and {plural(len(problems) - 1, 'more problem')})" if len(problems) > 1 else "")


def completeness_problems(folder: Path) -> list[Problem]:
    """Return all problems because of which a checkpoint cannot be used; empty if it is complete."""
    try:
        manifest = read_manifest(folder)
        if manifest is None or not manifest.files:
            return structure_problems(folder)
        return file_problems(folder, manifest)
    except CheckpointError as error:
        return list(error.problems)


def first_complete(folders: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first folder that is a complete checkpoint, and those before it with the reasons."""
    skipped: list[tuple[Path, str]] = []
    for folder in folders:
        reason = why_incomplete(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder, reason))
    return None, skipped


def numbered_checkpoints(run_folder: Path, prefix: str) -> list[Path]:
    """Return the folders ``<prefix><number>`` in ``run_folder``, highest number first; empty if it does not exist."""
    if not run_folder.is_dir():
        return []
    paths = (run_folder / name for name in by_number((path.name for path in run_folder.iterdir()), prefix))
    return [path for path in paths if path.is_dir()]


def by_number(names: Iterable[str], prefix: str) -> list[str]:
    """Return the names ``<prefix><number>``, highest number first."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    return [name for _, name in sorted(((int(m[1]), m[0]) for m in map(pattern.fullmatch, names) if m), reverse=True)]


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that contains ``path`` (``pytorch_model_fsdp_0``), or ``path`` itself."""
    parent = path.resolve().parent
    is_part = _PART.fullmatch(path.resolve().name) and not (path / file_names.MANIFEST_NAME).exists()
    in_checkpoint = any((parent / name).is_file() for name in (file_names.MANIFEST_NAME, file_names.TRAINER_STATE))
    return parent if is_part and in_checkpoint else path


def regular_size(path: Path) -> int | None:
    """Return the size in bytes of a regular file; ``None`` for anything else."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def file_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return a problem for each file of the manifest that is missing or has a different size."""
    problems = []
    for record in manifest.files:
        path = folder / record.path
        size = regular_size(path)
        if size == record.size:
            continue
        code, message = "FSDP-E457", "is missing"
        if size is not None:
            code, message = "FSDP-E470", f"has {size:,} bytes; {record.size:,} were saved"
        lost = sorted({piece.name for piece in record.ranges if piece.name and piece.stop > (size or 0)})
        contents = f"; it contained {format_names(lost, 3)}" if lost else ""
        problems.append(problem(code, path, f"{message}{contents}.", RESUME_EARLIER))
    return problems


def structure_problems(folder: Path) -> list[Problem]:
    """Return the problems in the structure of a checkpoint without a manifest: unreadable, truncated or unfinished."""
    if file_names.SAVING in (Path(name).suffix for name in (folder.resolve().name, folder.resolve().parent.name)):
        message = "is the staging folder of a save that is running or was interrupted."
        return [problem("FSDP-E452", folder, message, RESUME_EARLIER)]
    try:  # the readers follow every reference, and reject references beyond the end of a file
        read_stored_model(folder)
        read_stored_optimizer(folder)
    except CheckpointError as error:
        return list(error.problems)
    return _archive_problems(folder) + _last_file_problems(folder)


def own_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint. Skips checkpoints inside it: the folder of a run can be a checkpoint too."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not re.fullmatch(r"\.?checkpoint([-_]\d+.*|s)", name)]
        yield from (Path(place) / name for name in files)


def _archive_problems(folder: Path) -> list[Problem]:
    """Return a problem for each empty or truncated file of ``torch.save`` next to the model."""
    problems: list[Problem] = []
    for path in sorted(path for pattern in _ARCHIVES for path in folder.glob(pattern) if path.is_file()):
        try:
            if path.stat().st_size == 0:
                problems.append(problem("FSDP-E453", path, "is empty.", RESUME_EARLIER))
            elif read_range(path, 0, 4) == b"PK\3\4" and not zipfile.is_zipfile(path):
                message = "is truncated or damaged: it is not a complete zip archive."
                problems.append(problem("FSDP-E453", path, message, RESUME_EARLIER))
        except OSError as error:
            problems.append(problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", RESUME_EARLIER))
    return problems


def _last_file_problems(folder: Path) -> list[Problem]:
    """Return a problem if the file that the Trainer or Accelerate writes last is missing or damaged."""
    name, path = folder.resolve().name, folder / file_names.TRAINER_STATE
    try:
        if re.fullmatch(rf"{file_names.TRAINER_PREFIX}\d+", name):
            path.stat()
            check_trainer_state(path)
        elif re.fullmatch(rf"{file_names.ACCELERATE_PREFIX}\d+", name):
            path = folder / file_names.accelerate_rng_file(0)
            path.stat()
    except FileNotFoundError:
        return [problem("FSDP-E452", folder, f"has no {path.name}: the save was not finished.", RESUME_EARLIER)]
    except OSError as error:
        return [problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", RESUME_EARLIER)]
    except CheckpointError as error:
        return list(error.problems)
    return []
