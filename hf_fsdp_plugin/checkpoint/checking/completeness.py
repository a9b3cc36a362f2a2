"""Checks that a checkpoint is complete, within milliseconds: by its manifest, or by its structure if it has none.

Only names, sizes and headers are read. :mod:`hf_fsdp_plugin.checkpoint.checking.verify` checks the bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.archives import NotAnArchive, ZipEntry, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.io import read_file
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, plural

_PART = re.compile(rf"({file_names.FSDP_MODEL}|{file_names.OPTIMIZER})_\d+")
_ARCHIVES = ("*.pt", "*.pth", "*.bin", "*.pkl")
_RESUME_EARLIER = "Resume from an earlier checkpoint."
_UNFINISHED = "the save was not finished."


def why_incomplete(folder: Path) -> str | None:
    """Return the reason why a checkpoint cannot be used, in one line; ``None`` if it is complete."""
    problems = completeness_problems(folder)
    if not problems:
        return None
    more = f" (and {plural(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
    return _in_folder(problems[0], folder) + more


def completeness_problems(folder: Path) -> list[Problem]:
    """Return all problems because of which a checkpoint cannot be used; empty if it is complete."""
    try:
        manifest = read_manifest(folder)
        return structure_problems(folder) if manifest is None else file_problems(folder, manifest)
    except CheckpointError as error:
        return list(error.problems)


def newest_complete(
    run_folder: Path, prefix: str = file_names.TRAINER_PREFIX
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the complete checkpoint with the highest number, and the newer incomplete ones with the reasons."""
    skipped: list[tuple[Path, str]] = []
    for folder in numbered_checkpoints(run_folder, prefix):
        reason = why_incomplete(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder, reason))
    return None, skipped


def numbered_checkpoints(run_folder: Path, prefix: str) -> list[Path]:
    """Return the folders ``<prefix><number>`` in ``run_folder``, highest number first; empty if it does not exist."""
    if not run_folder.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    found = [(int(match[1]), path) for path in run_folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that contains ``path`` (``pytorch_model_fsdp_0``), or ``path`` itself."""
    parent = path.resolve().parent
    if not _PART.fullmatch(path.resolve().name) or (path / file_names.MANIFEST_NAME).exists():
        return path
    return (
        parent
        if any((parent / name).is_file() for name in (file_names.MANIFEST_NAME, file_names.TRAINER_STATE))
        else path
    )


def file_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return a problem for each file of the manifest that is missing or has a different size."""
    problems = []
    for record in manifest.files:
        path = folder / record.path
        try:
            status = path.stat()
        except OSError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            names = sorted({piece.name for piece in record.ranges if piece.name})
            problems.append(problem("FSDP-E457", path, f"is missing{_contents(names)}.", _RESUME_EARLIER))
        elif status.st_size != record.size:
            lost = sorted({piece.name for piece in record.ranges if piece.name and piece.stop > status.st_size})
            message = f"has {status.st_size:,} bytes; {record.size:,} were saved{_contents(lost)}."
            problems.append(problem("FSDP-E470", path, message, _RESUME_EARLIER))
    return problems


def structure_problems(folder: Path) -> list[Problem]:
    """Return the problems in the structure of a checkpoint without a manifest: unreadable, truncated or unfinished."""
    if file_names.SAVING in (Path(name).suffix for name in (folder.resolve().name, folder.resolve().parent.name)):
        message = "is the staging folder of a save that is running or was interrupted."
        return [problem("FSDP-E452", folder, message, _RESUME_EARLIER)]
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


def archive_entries(
    path: Path, problems: list[Problem], fix: str, offsets: Iterable[tuple[int, str]] = ()
) -> list[ZipEntry]:
    """Return the entries of a file's archives; none for another file. Adds a problem if the file is damaged.

    Args:
        offsets: byte offsets and names of the tensors in the file.
    """
    try:
        return list(stored_entries(path)) if is_archive(path) else []
    except NotAnArchive as error:
        lost = sorted({name for start, name in offsets if start < error.stop})
        contents = f"; they contain {format_names(lost, 3)}" if lost else ""
        problems.append(problem("FSDP-E453", path, f"is truncated or damaged: {error}{contents}.", fix))
    except OSError as error:
        problems.append(problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", fix))
    return []


def _contents(names: list[str]) -> str:
    return f"; it contained {format_names(names, 3)}" if names else ""


def _in_folder(found: Problem, folder: Path) -> str:
    """Return a problem's place and message, with the place relative to ``folder``."""
    if found.origin is None or found.origin.place == str(folder):
        return found.message
    return f"{found.origin.place.removeprefix(f'{folder}/')}: {found.message}"


def _archive_problems(folder: Path) -> list[Problem]:
    """Return a problem for each empty or damaged file of ``torch.save`` next to the model."""
    problems: list[Problem] = []
    for path in sorted(path for pattern in _ARCHIVES for path in folder.glob(pattern) if path.is_file()):
        if path.stat().st_size == 0:
            problems.append(problem("FSDP-E453", path, "is empty.", _RESUME_EARLIER))
        else:
            archive_entries(path, problems, _RESUME_EARLIER)
    return problems


def _last_file_problems(folder: Path) -> list[Problem]:
    """Return a problem if the file that the Trainer or Accelerate writes last is missing or damaged."""
    name, state, rng = folder.resolve().name, folder / file_names.TRAINER_STATE, file_names.accelerate_rng_file(0)
    code, place, message = "", folder, ""
    if re.fullmatch(rf"{file_names.TRAINER_PREFIX}\d+", name):
        try:
            json.loads(read_file(state))
        except FileNotFoundError:
            code, message = "FSDP-E452", f"has no {file_names.TRAINER_STATE}: {_UNFINISHED}"
        except OSError as error:
            code, place, message = "FSDP-E472", state, f"cannot be read: {error.strerror}."
        except (ValueError, RecursionError) as error:
            code, place, message = "FSDP-E453", state, f"is not valid JSON: {error}."
    elif re.fullmatch(rf"{file_names.ACCELERATE_PREFIX}\d+", name) and not (folder / rng).is_file():
        code, message = "FSDP-E452", f"has no {rng}: {_UNFINISHED}"
    return [problem(code, place, message, _RESUME_EARLIER)] if code else []
