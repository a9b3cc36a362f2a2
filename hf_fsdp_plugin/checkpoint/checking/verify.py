"""Whether a checkpoint is what was saved: every byte against its hash, every name and shape against what it should be.

With a manifest every byte of every file has a hash. Without one (the host's own checkpoints) there are the CRC-32 of
``torch.save``'s archives and the structure; what no checksum covers is said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking.against_config import config_problems
from hf_fsdp_plugin.checkpoint.checking.against_crc import crc_problems
from hf_fsdp_plugin.checkpoint.checking.byte_ranges import REPLACE_FILE, Progress, Stretch, check, damage
from hf_fsdp_plugin.checkpoint.checking.completeness import (
    checkpoint_of,
    file_problems,
    listed,
    own_files,
    stock_problems,
    tensors_of,
)
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, Manifest, hash_file, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem, Severity, has_errors

_SAME_SHAPE = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""Optimizer state that has an element for each of the parameter's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        checkpoint: its path.
        problems: damage as errors; what could not be checked as notes.
        num_files, num_bytes: the files that were looked at, and their bytes.
    """

    checkpoint: Path
    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checkpoint": str(self.checkpoint),
            "problems": [problem.to_json() for problem in self.problems],
            "files": self.num_files,
            "bytes": self.num_bytes,
        }


def verify(checkpoint: Path, *, config_check: bool = True, progress: Progress | None = None) -> Verdict:
    """Check everything that can be checked about a checkpoint, or the one that a part of it belongs to.

    Args:
        config_check: compare names and shapes with the model of ``config.json``, which imports torch.
    """
    folder = checkpoint_of(checkpoint)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return _without_manifest(folder, list(error.problems), config_check, progress)
    if manifest is None:
        return _without_manifest(folder, [], config_check, progress)
    problems = file_problems(folder, manifest)
    problems += _byte_problems(folder, manifest, progress)
    problems += _extra_files(folder, manifest)
    # A file that cannot be read as what it is has been complained of already; there is nothing to compare in it.
    problems += _index_problems(folder, manifest, config_check=config_check, damaged=has_errors(problems))
    return Verdict(
        checkpoint=folder,
        problems=tuple(problems),
        num_files=len(manifest.files),
        num_bytes=sum(record.size for record in manifest.files),
    )


def _byte_problems(folder: Path, manifest: Manifest, progress: Progress | None) -> list[Problem]:
    """A problem for every file with bytes that are not those that were saved."""
    stretches = [
        Stretch(folder / record.path, piece.start, piece.stop, piece.hash, (piece.name,) if piece.name else ())
        for record in manifest.files
        if (size := _size(folder / record.path)) is not None
        for piece in record.ranges
        if piece.stop <= size
    ]
    damaged, problems = check(stretches, hash_file, progress)
    for record in manifest.files:
        hit = damaged.get(folder / record.path, [])
        if hit:
            twin = _same_as(folder / record.path, record, manifest.files)
            problems.append(damage(hit, len(record.ranges), twin))
    return problems


def _same_as(path: Path, record: FileRecord, records: Iterable[FileRecord]) -> str | None:
    """The file of the checkpoint that should have this one's bytes, where two were swapped or one was copied over."""
    for other in records:
        if other.path != record.path and other.size == record.size:
            ranges = other.ranges
            if all(hash_file(path, piece.start, piece.stop) == piece.hash for piece in ranges):
                return other.path
    return None


def _extra_files(folder: Path, manifest: Manifest) -> list[Problem]:
    """A note for everything that the manifest does not know: files, and folders without any file that it knows."""
    known = {Path(record.path) for record in manifest.files} | {Path(MANIFEST_NAME)}
    folders = {parent for path in known for parent in path.parents}
    extra = []
    for place, inner, files in os.walk(folder):
        here = Path(place).relative_to(folder)
        extra += [here / name for name in files if here / name not in known]
        extra += [here / name for name in inner if here / name not in folders]
        inner[:] = [name for name in inner if here / name in folders]
    if not extra:
        return []
    names = sorted(path.as_posix() for path in extra)
    return [_problem(folder, f"the manifest does not know {listed(names)}: not verified.", severity="note")]


def _index_problems(folder: Path, manifest: Manifest | None, *, config_check: bool, damaged: bool) -> list[Problem]:
    """Names, shapes, dtypes and completeness of what is stored, against the manifest and the model of the config."""
    problems: list[Problem] = []
    try:
        model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
        for number in _further_optimizers(folder):
            read_stored_optimizer(folder, number)  # to read it is to check that it is all there
    except CheckpointError as error:
        return [] if damaged else list(error.problems)
    if manifest is not None:
        problems += _against_manifest(model, optimizer, manifest)
    if config_check:
        problems += config_problems(model, folder)
    return problems


def _further_optimizers(folder: Path) -> list[int]:
    """The numbers of the optimizers beside the first."""
    names = (path.name for path in folder.iterdir())
    found = {int(match[1]) for name in names if (match := re.fullmatch(r"optimizer_([1-9]\d*)(\.bin)?", name))}
    return sorted(found)


def _against_manifest(model: StoredModel, optimizer: StoredOptimizer | None, manifest: Manifest) -> list[Problem]:
    group_of = {name: tie for tie in manifest.ties for name in tie}
    # One name of those that share a tensor is enough, in the files as in the manifest.
    stored = {other for name in model.tensors for other in group_of.get(name, (name,))}
    known = {other for name in manifest.parameters for other in group_of.get(name, (name,))}
    missing = [name for name in manifest.parameters if name not in stored]
    unexpected = [name for name in model.tensors if name not in known]
    other = [
        f"{name} ({_described(tensor.dtype, tensor.shape)} here, {_described(*manifest.parameters[name])} there)"
        for name, tensor in model.tensors.items()
        if name in manifest.parameters and manifest.parameters[name] != (tensor.dtype, tensor.shape)
    ]
    if optimizer is not None:
        shapes = {name: shape for name, (_, shape) in manifest.parameters.items()}
        unexpected += [f"optimizer state of {name}" for name in optimizer.state if name not in known]
        other += [
            f"{label} ({_described('', tensor.shape)} here, {_described('', shapes[tensor.name])} there)"
            for label, tensor in tensors_of(optimizer)
            if label.partition(" of ")[0] in _SAME_SHAPE and shapes.get(tensor.name, tensor.shape) != tensor.shape
        ]
    said = [
        (missing, f"{len(missing)} of the {len(manifest.parameters)} parameters of the manifest are not stored"),
        (unexpected, f"{len(unexpected)} stored parameters are unknown to the manifest"),
        (other, f"{len(other)} parameters have another dtype or shape than in the manifest"),
    ]
    return [_problem(model.root, f"{text}: {listed(names)}.", REPLACE_FILE) for names, text in said if names]


def _without_manifest(folder: Path, problems: list[Problem], config_check: bool, progress: Progress | None) -> Verdict:
    """What can be said without a manifest that could be trusted: structure, and the CRC-32 of archives."""
    files = sorted(own_files(folder))
    try:
        structure = stock_problems(folder)
    except CheckpointError as error:
        structure = list(error.problems)
    problems += structure
    checked, more = crc_problems(folder, files, progress)
    problems += more
    if not has_errors(structure):
        problems += _index_problems(folder, None, config_check=config_check, damaged=True)
    sizes = [_size(path) or 0 for path in files]
    if not has_errors(problems) and checked < sum(sizes):
        text = f"there is no {MANIFEST_NAME}; {checked:,} of {sum(sizes):,} bytes have a checksum, and were verified."
        problems.append(_problem(folder, text, severity="note"))
    return Verdict(checkpoint=folder, problems=tuple(problems), num_files=len(files), num_bytes=sum(sizes))


def _size(path: Path) -> int | None:
    """Bytes of a regular file; None for anything else."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _described(dtype: str, shape: tuple[int, ...]) -> str:
    sizes = "×".join(str(size) for size in shape) or "scalar"
    return f"{dtype} {sizes}".strip()


def _problem(path: Path, message: str, fix: str = "", severity: Severity = "error") -> Problem:
    return Problem(severity=severity, message=message, fix=fix, origin=Origin(source=str(path)))
