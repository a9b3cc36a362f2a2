"""Verification that a checkpoint is unchanged since it was saved: all bytes, names, shapes and dtypes.

A manifest has a hash for every byte of every file. Stock checkpoints have none: their structure and the CRC-32
checksums of ``torch.save``'s archives are checked, and the number of bytes without a checksum is reported.
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
from hf_fsdp_plugin.checkpoint.checking.against_manifest import manifest_problems
from hf_fsdp_plugin.checkpoint.checking.byte_ranges import ByteRange, Progress, damage_problem, find_damaged
from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, file_problems, own_files, structure_problems
from hf_fsdp_plugin.checkpoint.formats.block_file import BlockTable
from hf_fsdp_plugin.checkpoint.formats.dcp import index_problems
from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.checkpoint.formats.hashing import hash_file
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.formats.ranges import FileRecord
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME, OPTIMIZER
from hf_fsdp_plugin.problems import CheckpointError, Problem, has_errors
from hf_fsdp_plugin.text import format_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a verification.

    Attributes:
        checkpoint: its path.
        problems: damage as errors; what could not be checked as notes.
        num_files, num_bytes: the number of files that were checked, and their size in bytes.
        num_checked_bytes: the number of bytes that were compared with a checksum.
    """

    checkpoint: Path
    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int
    num_checked_bytes: int

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
            "bytes_with_checksum": self.num_checked_bytes,
        }


def verify(checkpoint: Path, *, config_check: bool = True, progress: Progress | None = None) -> Verdict:
    """Verify the checkpoint ``checkpoint``, or the checkpoint that contains this folder.

    Args:
        config_check: compare names and shapes with the model of ``config.json``, which imports torch.
        progress: called while bytes are read.
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
    # A damaged file has been reported already.
    problems += _contents_problems(folder, manifest, config_check=config_check, damaged=has_errors(problems))
    size = sum(record.size for record in manifest.files)
    return Verdict(
        checkpoint=folder,
        problems=tuple(problems),
        num_files=len(manifest.files),
        num_bytes=size,
        num_checked_bytes=size,
    )


def _byte_problems(folder: Path, manifest: Manifest, progress: Progress | None) -> list[Problem]:
    """Return a problem for every file whose bytes differ from the saved ones."""
    unreadable: list[Problem] = []
    for record in manifest.files:
        if isinstance(record.ranges, BlockTable):
            try:
                record.ranges.check()
            except CheckpointError as error:
                unreadable += error.problems
    if unreadable:
        return unreadable
    ranges = [
        ByteRange(folder / record.path, piece.start, piece.stop, piece.hash, (piece.name,) if piece.name else ())
        for record in manifest.files
        if (size := _size(folder / record.path)) is not None
        for piece in record.ranges
        if piece.stop <= size
    ]
    damaged, problems = find_damaged(ranges, hash_file, progress)
    for record in manifest.files:
        items = damaged.get(folder / record.path, [])
        if items:
            swapped_with = _file_with_contents(folder / record.path, record, manifest.files)
            problems.append(damage_problem(items, len(record.ranges), swapped_with))
    return problems


def _file_with_contents(path: Path, record: FileRecord, records: Iterable[FileRecord]) -> str | None:
    """Return another file of the manifest whose hashes match this file's bytes: the two files were swapped."""
    for other in records:
        if other.path != record.path and other.size == record.size:
            ranges = other.ranges
            if all(hash_file(path, piece.start, piece.stop) == piece.hash for piece in ranges):
                return other.path
    return None


def _extra_files(folder: Path, manifest: Manifest) -> list[Problem]:
    """Return a note about files that are not in the manifest, and folders that contain no file of the manifest."""
    known = {Path(record.path) for record in manifest.files} | {Path(MANIFEST_NAME), Path(BLOCK_FILE)}
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
    return [
        problem(
            "FSDP-N473",
            folder,
            f"contains files that are not in the manifest and were not verified: {format_names(names, 3)}.",
        )
    ]


def _contents_problems(folder: Path, manifest: Manifest | None, *, config_check: bool, damaged: bool) -> list[Problem]:
    """Compare stored names, shapes and dtypes with the manifest and with the model of the config."""
    problems: list[Problem] = []
    try:
        model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
        for number in _further_optimizers(folder):
            read_stored_optimizer(folder, number)  # raises if it is incomplete
    except CheckpointError as error:
        return [] if damaged else list(error.problems)
    problems += index_problems(folder)
    if manifest is not None:
        problems += manifest_problems(model, optimizer, manifest)
    if config_check:
        problems += config_problems(model, folder)
    return problems


def _further_optimizers(folder: Path) -> list[int]:
    """Return the numbers of the optimizers after the first."""
    names = (path.name for path in folder.iterdir())
    found = {int(match[1]) for name in names if (match := re.fullmatch(rf"{OPTIMIZER}_([1-9]\d*)(\.bin)?", name))}
    return sorted(found)


def _without_manifest(folder: Path, problems: list[Problem], config_check: bool, progress: Progress | None) -> Verdict:
    """Verify a checkpoint without a valid manifest: its structure, and the CRC-32 checksums of archives."""
    files = sorted(own_files(folder))
    try:
        structure = structure_problems(folder)
    except CheckpointError as error:
        structure = list(error.problems)
    problems += structure
    checked, more = crc_problems(folder, files, progress)
    problems += more
    if not has_errors(structure):
        problems += _contents_problems(folder, None, config_check=config_check, damaged=True)
    sizes = [_size(path) or 0 for path in files]
    if not has_errors(problems) and checked < sum(sizes):
        message = f"has no {MANIFEST_NAME}; only {checked:,} of {sum(sizes):,} bytes have a checksum and were verified."
        problems.append(problem("FSDP-N474", folder, message))
    return Verdict(
        checkpoint=folder,
        problems=tuple(problems),
        num_files=len(files),
        num_bytes=sum(sizes),
        num_checked_bytes=checked,
    )


def _size(path: Path) -> int | None:
    """Return the size in bytes of a regular file; ``None`` for anything else."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
