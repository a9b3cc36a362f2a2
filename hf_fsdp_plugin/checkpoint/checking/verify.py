"""Verification that a checkpoint is unchanged since it was saved: all bytes, names, shapes and dtypes.

A manifest has a hash for every byte of every file. Stock checkpoints have none: their structure and the CRC-32
checksums of ``torch.save``'s archives are checked, and the number of bytes without a checksum is reported.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking import inspection
from hf_fsdp_plugin.checkpoint.checking.against_model import config_problems, difference_problems
from hf_fsdp_plugin.checkpoint.checking.verified_files import REPLACE_FILE, Progress, damage_problem
from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem
from hf_fsdp_plugin.checkpoint.formats import stored_tensors
from hf_fsdp_plugin.checkpoint.formats.archives import crc_file
from hf_fsdp_plugin.checkpoint.formats.dcp import index_problems
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord, Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredOptimizer
from hf_fsdp_plugin.checkpoint.io import hash_file
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME, OPTIMIZER, is_adapter, is_wrapped_by_peft
from hf_fsdp_plugin.problems import CheckpointError, Problem, has_errors
from hf_fsdp_plugin.text import format_names, format_shape


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
            for label, tensor in stored_tensors.labelled_tensors(optimizer)
            if tensor.name in shapes
            and stored_tensors.state_layout(label.partition(" of ")[0], tensor.shape, shapes[tensor.name]) == "other"
        ]
    num_expected = len(manifest.parameters)
    return difference_problems(model.root, missing, unexpected, other, num_expected, "its manifest", COPY_AGAIN)


def _damaged_ranges(
    files: Mapping[Path, Sequence[FileRange]], digest: Callable[[Path, int, int], str], progress: Progress
) -> tuple[dict[Path, list[FileRange]], list[Problem]]:
    """Return the ranges of each file whose checksum differs, and a problem for each file that cannot be read."""
    ranges = [(path, item) for path, items in files.items() for item in items]
    total = sum(item.stop - item.start for _, item in ranges)
    progress("verify", 0, total)
    damaged: dict[Path, list[FileRange]] = {}
    problems: dict[Path, Problem] = {}

    def examine(place: tuple[Path, FileRange]) -> bool | str:
        path, item = place
        try:
            return digest(path, item.start, item.stop) == item.hash
        except OSError as error:
            return error.strerror or str(error)
        except CheckpointError:  # the file was truncated after its size was checked
            return False

    # Hashing and reading release the GIL, so that threads use all cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for (path, item), found in zip(ranges, pool.map(examine, ranges), strict=True):
            progress("verify", item.stop - item.start, total)
            if isinstance(found, str):
                problems[path] = problem("FSDP-E472", path, f"cannot be read: {found}.", REPLACE_FILE)
            elif not found:
                damaged.setdefault(path, []).append(item)
    return damaged, list(problems.values())


def crc_problems(
    folder: Path, files: Iterable[Path], progress: Progress = lambda *_: None
) -> tuple[int, list[Problem]]:
    """Return the number of bytes with a CRC-32, and a problem for each archive that is damaged or incomplete."""
    offsets = functools.cache(partial(_tensor_offsets, folder))  # only needed to name the tensors in damaged bytes

    def names_between(path: Path, start: int, stop: int) -> list[str]:
        return [name for offset, name in offsets().get(path, ()) if start <= offset < stop]

    problems: list[Problem] = []
    ranges: dict[Path, list[FileRange]] = {}
    for path in files:
        entries = inspection.archive_entries(path, problems, REPLACE_FILE, partial(names_between, path, 0))
        ranges[path] = [FileRange(start=each.start, stop=each.stop, hash=str(each.crc)) for each in entries if each.crc]
    damaged, unreadable = _damaged_ranges(ranges, lambda *place: str(crc_file(*place)), progress)
    for path, found in damaged.items():
        names = [name for item in found for name in names_between(path, item.start, item.stop)]
        problems.append(damage_problem(path, found, len(ranges[path]), names))
    num_bytes = sum(item.stop - item.start for items in ranges.values() for item in items)
    return num_bytes, problems + unreadable


def _tensor_offsets(folder: Path) -> dict[Path, list[tuple[int, str]]]:
    """Return byte offset and name of every tensor in a file, in ascending order; what is unreadable is skipped."""
    found: dict[Path, list[tuple[int, str]]] = {}
    for read in (read_stored_model, read_stored_optimizer):
        with suppress(CheckpointError):
            stored = read(folder)
            for label, tensor in stored_tensors.labelled_tensors(stored) if stored is not None else ():
                for piece in tensor.pieces:
                    found.setdefault(folder / piece.file, []).append((piece.offset, label))
    return {path: sorted(offsets) for path, offsets in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a verification.

    Attributes:
        checkpoint: path of the checkpoint.
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


def verify(checkpoint: Path, *, config_check: bool = True, progress: Progress = lambda *_: None) -> Verdict:
    """Verify the checkpoint ``checkpoint``, or the checkpoint that contains this folder.

    Args:
        config_check: compare names and shapes with the model of ``config.json``, which imports torch.
        progress: called while bytes are read.
    """
    folder = inspection.checkpoint_of(checkpoint)
    manifest: Manifest | None = None
    problems: list[Problem] = []
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        problems += error.problems
    if manifest is not None:
        sizes = [record.size for record in manifest.files]
        num_checked = sum(sizes)
        problems += inspection.file_problems(folder, manifest)
        problems += _byte_problems(folder, manifest, progress)
        problems += _extra_files(folder, manifest)
    else:
        files = sorted(inspection.own_files(folder))
        sizes = [inspection.regular_size(path) or 0 for path in files]
        problems += inspection.structure_problems(folder)
        num_checked, damaged = crc_problems(folder, files, progress)
        problems += damaged
    is_reported = manifest is None or has_errors(problems)  # damage that makes the contents unreadable
    problems += _contents_problems(folder, manifest, config_check=config_check, is_reported=is_reported)
    if num_checked < sum(sizes) and not has_errors(problems):
        message = f"has no {MANIFEST_NAME}; only {num_checked:,} of {sum(sizes):,} bytes have a checksum"
        problems.append(problem("FSDP-N474", folder, f"{message} and were verified."))
    return Verdict(
        checkpoint=folder,
        problems=tuple(problems),
        num_files=len(sizes),
        num_bytes=sum(sizes),
        num_checked_bytes=num_checked,
    )


def _byte_problems(folder: Path, manifest: Manifest, progress: Progress) -> list[Problem]:
    """Return a problem for every file whose bytes differ from the saved ones."""
    files: dict[Path, list[FileRange]] = {}
    try:
        for record in manifest.files:
            path = folder / record.path
            if (size := inspection.regular_size(path)) is not None:
                files[path] = [piece for piece in record.ranges if piece.stop <= size]
    except CheckpointError as error:  # the hashes are damaged
        return list(error.problems)
    damaged, problems = _damaged_ranges(files, hash_file, progress)
    for path, found in damaged.items():
        swapped_with = _file_with_contents(folder, manifest.files, path)
        names = [piece.name for piece in found]
        problems.append(damage_problem(path, found, len(files[path]), names, swapped_with))
    return problems


def _file_with_contents(folder: Path, records: Iterable[FileRecord], path: Path) -> str | None:
    """Return another file of the manifest whose hashes match the bytes of ``path``: the two files were swapped."""
    size = path.stat().st_size
    for record in (each for each in records if each.size == size and folder / each.path != path):
        if all(hash_file(path, piece.start, piece.stop) == piece.hash for piece in record.ranges):
            return record.path
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
    names = format_names(sorted(path.as_posix() for path in extra), 3)
    message = f"contains files that are not in the manifest and were not verified: {names}."
    return [problem("FSDP-N473", folder, message)]


def _contents_problems(
    folder: Path, manifest: Manifest | None, *, config_check: bool, is_reported: bool
) -> list[Problem]:
    """Compare stored names, shapes and dtypes with the manifest and with the model of the config."""
    try:
        model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
        for path in folder.iterdir():
            if match := re.fullmatch(rf"{OPTIMIZER}_([1-9]\d*)(\.bin)?", path.name):
                read_stored_optimizer(folder, int(match[1]))  # raises if it is incomplete
    except CheckpointError as error:
        return [] if is_reported else list(error.problems)
    problems = index_problems(folder)
    if manifest is not None:
        problems += manifest_problems(model, optimizer, manifest)
    if config_check:
        problems += config_problems(model, folder)
    return problems
