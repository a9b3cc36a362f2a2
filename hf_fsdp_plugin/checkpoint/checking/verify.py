"""Verification that a checkpoint is unchanged since it was saved: all bytes, names, shapes and dtypes.

A manifest has a hash for every byte of every file. Stock checkpoints have none: their structure and the CRC-32
checksums of ``torch.save``'s archives are checked, and the number of bytes without a checksum is reported.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking.against_model import config_problems
from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, file_problems, own_files, structure_problems
from hf_fsdp_plugin.checkpoint.checking.verified_files import (
    REPLACE_FILE,
    ByteRange,
    Progress,
    damage_problem,
    find_damaged,
)
from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem
from hf_fsdp_plugin.checkpoint.formats.archives import NotAnArchive, crc_file, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.formats.dcp import index_problems
from hf_fsdp_plugin.checkpoint.formats.manifest import BlockTable, FileRecord, Manifest
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.formats.optimizer_state import state_layout
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer, labelled_tensors
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.io import hash_file
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME, OPTIMIZER, is_adapter, is_wrapped_by_peft
from hf_fsdp_plugin.problems import CheckpointError, Problem, has_errors
from hf_fsdp_plugin.text import format_names, format_shape, plural


def manifest_problems(model: StoredModel, optimizer: StoredOptimizer | None, manifest: Manifest) -> list[Problem]:
    """Return errors for missing names, unexpected names, and dtypes and shapes that differ from the manifest."""
    group_of = {name: tie for tie in manifest.ties for name in tie}
    # The files and the manifest need to contain only one name of each group of tied names.
    stored = {other for name in model.tensors for other in group_of.get(name, (name,))}
    known = {other for name in manifest.parameters for other in group_of.get(name, (name,))}
    missing = [name for name in manifest.parameters if name not in stored]
    if is_adapter(model.tensors) and is_wrapped_by_peft(manifest.parameters):
        # Earlier versions listed the base model of an adapter too, which the Trainer does not save.
        missing = [name for name in missing if ".lora_" in name]
    unexpected = [name for name in model.tensors if name not in known]
    other = [
        f"{name} ({tensor.dtype} {format_shape(tensor.shape)}, in the manifest {dtype} {format_shape(shape)})"
        for name, tensor in model.tensors.items()
        for dtype, shape in [manifest.parameters.get(name, (tensor.dtype, tensor.shape))]
        if (dtype, shape) != (tensor.dtype, tensor.shape)
    ]
    if optimizer is not None:
        shapes = {name: shape for name, (_, shape) in manifest.parameters.items()}
        unexpected += [f"optimizer state of {name}" for name in optimizer.state if name not in known]
        other += [
            f"{label} ({format_shape(tensor.shape)}, the parameter {format_shape(shapes[tensor.name])})"
            for label, tensor in labelled_tensors(optimizer)
            if tensor.name in shapes
            and state_layout(label.partition(" of ")[0], tensor.shape, shapes[tensor.name]) == "other"
        ]
    total = len(manifest.parameters)
    found = [
        ("FSDP-E477", missing, f"does not contain {len(missing)} of the {total} parameters of its manifest"),
        ("FSDP-E478", unexpected, f"contains {plural(len(unexpected), 'parameter')} that its manifest does not list"),
        (
            "FSDP-E479",
            other,
            f"contains {plural(len(other), 'tensor')} with another dtype or shape than in its manifest",
        ),
    ]
    return [problem(code, model.root, f"{text}: {format_names(n, 3)}.", COPY_AGAIN) for code, n, text in found if n]


_Offsets = list[tuple[int, str]]
"""Byte offset and name of every tensor in a file, in ascending order."""


def crc_problems(folder: Path, files: Iterable[Path], progress: Progress | None) -> tuple[int, list[Problem]]:
    """Return the number of bytes with a CRC-32, and a problem for each archive that is damaged or incomplete."""
    return _compare_archives(files, _tensor_offsets(folder), progress)


def archive_problems(files: Iterable[Path]) -> list[Problem]:
    """Return a problem for each archive without tensors of a model that is damaged or incomplete."""
    return _compare_archives(files, {}, None)[1]


def _compare_archives(
    files: Iterable[Path], offsets: Mapping[Path, _Offsets], progress: Progress | None
) -> tuple[int, list[Problem]]:
    problems: list[Problem] = []
    ranges: list[ByteRange] = []
    for path in files:
        try:
            ranges += _byte_ranges(path, offsets.get(path, [])) if is_archive(path) else []
        except NotAnArchive as error:
            lost = sorted({name for start, name in offsets.get(path, []) if start < error.stop})
            contents = f"; they contain {format_names(lost, 3)}" if lost else ""
            problems.append(problem("FSDP-E453", path, f"is truncated or damaged: {error}{contents}.", REPLACE_FILE))
        except OSError as error:
            problems.append(problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", REPLACE_FILE))
    damaged, unreadable = find_damaged(ranges, crc_file, progress)
    counts = Counter(item.path for item in ranges)
    problems += unreadable + [damage_problem(items, counts[path]) for path, items in damaged.items()]
    return sum(item.stop - item.start for item in ranges), problems


def _byte_ranges(path: Path, offsets: _Offsets) -> list[ByteRange]:
    """Return the entries of a file's archives that have a checksum, with the tensors that begin in them."""
    return [
        ByteRange(path, entry.start, entry.stop, entry.crc, tuple(name for _, name in offsets[low:high]))
        for entry in stored_entries(path)
        if entry.crc
        for low, high in [(bisect_left(offsets, (entry.start,)), bisect_left(offsets, (entry.stop,)))]
    ]


def _tensor_offsets(folder: Path) -> dict[Path, _Offsets]:
    """Return the offsets of tensors by file; unreadable models and optimizers are skipped."""
    found: dict[Path, _Offsets] = {}
    for read in (read_stored_model, read_stored_optimizer):
        try:
            stored = read(folder)
        except CheckpointError:
            continue
        if stored is None:
            continue
        for label, tensor in labelled_tensors(stored):
            for piece in tensor.pieces:
                found.setdefault(stored.root / piece.file, []).append((piece.offset, label))
    return {path: sorted(offsets) for path, offsets in found.items()}


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
