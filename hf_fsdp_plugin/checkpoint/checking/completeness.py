"""Whether a checkpoint is complete, and has all that a Trainer continues with. Does not import torch.

Only names, sizes, headers and metadata are read: the manifest, or the structure of the files if there is none.
:mod:`hf_fsdp_plugin.checkpoint.checking.hashes` checks the bytes. The Trainer itself skips what is missing without a
message, and reads JSON without checks.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import problem, problems_of, read_errors_as_problems, refuse
from hf_fsdp_plugin.checkpoint.file_io import read_file, read_range
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, plural

RESUME_EARLIER: Final = "Resume from an earlier checkpoint."
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


def first_complete(folders: Iterable[Path], skip: Callable[[Path, str], object]) -> Path | None:
    """Return the first folder that is a complete checkpoint. Calls ``skip`` with each one before it and the reason."""
    for folder in folders:
        if (reason := why_incomplete(folder)) is None:
            return folder
        skip(folder, reason)
    return None


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
    archives = sorted(path for pattern in _ARCHIVES for path in folder.glob(pattern) if path.is_file())
    return problems_of([*(partial(_check_archive, path) for path in archives), partial(_check_last_file, folder)])


def own_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint. Skips checkpoints inside it: the folder of a run can be a checkpoint too."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not re.fullmatch(r"\.?checkpoint([-_]\d+.*|s)", name)]
        yield from (Path(place) / name for name in files)


def _check_archive(path: Path) -> None:
    """Raise ``CheckpointError`` if a file of ``torch.save`` next to the model is empty or truncated."""
    with read_errors_as_problems(path, RESUME_EARLIER):
        if path.stat().st_size == 0:
            refuse("FSDP-E453", path, "is empty.", RESUME_EARLIER)
        if read_range(path, 0, 4) == b"PK\3\4" and not zipfile.is_zipfile(path):
            message = "is truncated or damaged: it is not a complete zip archive."
            refuse("FSDP-E453", path, message, RESUME_EARLIER)


def _check_last_file(folder: Path) -> None:
    """Raise ``CheckpointError`` if the file that the Trainer or Accelerate writes last is missing or damaged."""
    name, path = folder.resolve().name, folder / file_names.TRAINER_STATE
    with read_errors_as_problems(path, RESUME_EARLIER):
        try:
            if re.fullmatch(rf"{file_names.TRAINER_PREFIX}\d+", name):
                path.stat()
                check_trainer_state(path)
            elif re.fullmatch(rf"{file_names.ACCELERATE_PREFIX}\d+", name):
                path = folder / file_names.accelerate_rng_file(0)
                path.stat()
        except FileNotFoundError:
            refuse("FSDP-E452", folder, f"has no {path.name}: the save was not finished.", RESUME_EARLIER)


_MODEL_ONLY: Final = ("optimizer state", "learning rate schedule", "random state")
"""What a checkpoint of ``save_only_model=True`` lacks."""


def check_trainer_checkpoint(checkpoint: Path, *, model_only: bool) -> Problem | None:
    """Check that a Trainer continues with everything that a checkpoint should contain.

    Args:
        model_only: the run asks for checkpoints without optimizer, schedule and random state.

    Returns:
        A warning if the checkpoint is one of these, and ``model_only`` is set.

    Raises:
        CheckpointError: a file is not valid; or something is missing, so that the training would continue from less
            than was saved.
    """
    config, state = checkpoint / "config.json", checkpoint / file_names.TRAINER_STATE
    if config.exists():
        read_object(config)
    found = (
        read_stored_optimizer(checkpoint) is not None,
        (checkpoint / file_names.TRAINER_SCHEDULE).is_file(),
        any(path.is_file() for path in checkpoint.glob(f"{file_names.TRAINER_RNG}*.pth")),
    )
    missing = tuple(name for name, is_found in zip(_MODEL_ONLY, found, strict=True) if not is_found)
    if state.exists():
        check_trainer_state(state)
    else:
        missing += (f"step of the Trainer ({file_names.TRAINER_STATE})",)
    if not missing:
        return None
    lacks = f"has no {format_names(missing)}"
    if model_only and missing == _MODEL_ONLY:
        effect = "the optimizer and its schedule begin anew, and random numbers differ from the uninterrupted run"
        return problem("FSDP-W408", checkpoint, f"{lacks}: {effect}.", _REMEDY)
    refuse("FSDP-E424", checkpoint, f"{lacks}, from which the training would have to continue.", _REMEDY)


_REMEDY: Final = (
    "Resume from a checkpoint that was saved with save_only_model=False. To train its weights with a new optimizer, "
    "load them with from_pretrained, and call train() without resume_from_checkpoint."
)


_STATE_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "global_step": (int,),
    "max_steps": (int,),
    "num_train_epochs": (int, float),
    "epoch": (int, float, NoneType),
    "log_history": (list,),
    "best_global_step": (int, NoneType),
    "best_metric": (int, float, NoneType),
    "best_model_checkpoint": (str, NoneType),
    "stateful_callbacks": (dict, NoneType),
}
"""Types of values with which the Trainer continues, in every version of ``transformers.TrainerState`` that has them."""


def check_trainer_state(path: Path) -> None:
    """Raise ``CheckpointError`` if the Trainer could not continue with the values of ``trainer_state.json``.

    The Trainer itself reads them without checks, and prints names and paths as they are.
    """
    tree = read_object(path)
    for name, value in tree.items():
        if not name.isidentifier():
            message = f"contains the name {name!a:.60}, which the Trainer never writes."
            refuse("FSDP-E453", path, message, RESUME_EARLIER)
        types = _STATE_TYPES.get(name, (object,))
        if not isinstance(value, types) or (isinstance(value, bool) and name in _STATE_TYPES):
            expected = " or ".join("null" if kind is NoneType else _JSON_TYPES[kind] for kind in types)
            refuse("FSDP-E453", path, f"has {name}: {value!a:.60}; expected {expected}.", RESUME_EARLIER)
    if (step := tree.get("global_step", 0)) < 0:
        refuse("FSDP-E453", path, f"has global_step: {step}; expected 0 or more.", RESUME_EARLIER)
    if not (best := tree.get("best_model_checkpoint") or "").isprintable():
        message = f"has best_model_checkpoint: {best!a:.60}, with characters that cannot be printed."
        refuse("FSDP-E453", path, message, RESUME_EARLIER)


_JSON_TYPES: Final = {int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, is too large, is not an object, or names a value twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{twice!a:.60} occurs twice in an object")
        return tree

    with read_errors_as_problems(path):
        data = read_file(path)
    try:
        tree = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E453", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict):
        refuse("FSDP-E453", path, f"contains {tree!r:.40} instead of a JSON object.")
    return tree
