"""Verifies a checkpoint: all bytes against the hashes of its manifest, names and shapes against manifest and config.

A manifest has a hash for every byte of every file. Stock checkpoints have none: their structure and the CRC-32
checksums of ``torch.save``'s archives are checked, and the number of bytes without a checksum is reported.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking import completeness
from hf_fsdp_plugin.checkpoint.checking.hashes import REPLACE_FILE, damage_problem, unlisted_problem
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading, read_file, read_range
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, Manifest, hash_file, read_manifest
from hf_fsdp_plugin.checkpoint.formats.pickles import read_pickle
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import MAX_PROBLEMS, labelled_tensors
from hf_fsdp_plugin.checkpoint.formats.torch_files import FileSlice, compare_checksums
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, DCP_METADATA, MANIFEST_NAME, OPTIMIZER
from hf_fsdp_plugin.problems import CheckpointError, Problem, has_errors
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.tools.common import Progress
from hf_fsdp_plugin.tools.verify.comparison import config_problems, manifest_problems


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
        config_check: compare names and shapes with the model of ``config.json``.
        progress: called while bytes are read.
    """
    folder = completeness.checkpoint_of(checkpoint)
    manifest: Manifest | None = None
    problems: list[Problem] = []
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        problems += error.problems
    if manifest is not None:
        sizes = [record.size for record in manifest.files]
        num_checked = sum(record.size for record in manifest.files if record.ranges)
        problems += completeness.file_problems(folder, manifest)
        problems += _byte_problems(folder, manifest, progress)
        problems += _extra_files(folder, manifest)
    else:
        files = sorted(completeness.own_files(folder))
        sizes = [completeness.regular_size(path) or 0 for path in files]
        problems += completeness.structure_problems(folder)
        num_checked, damaged = crc_problems(files, progress)
        problems += damaged
    is_reported = manifest is None or has_errors(problems)  # damage that makes the contents unreadable
    problems += _contents_problems(folder, manifest, config_check=config_check, is_reported=is_reported)
    if num_checked < sum(sizes) and not has_errors(problems):
        what = f"has no {MANIFEST_NAME}" if manifest is None else f"has an {MANIFEST_NAME} of an earlier version"
        message = f"{what}; only {num_checked:,} of {sum(sizes):,} bytes have a checksum"
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
    for record in manifest.files:
        path = folder / record.path
        if (size := completeness.regular_size(path)) is not None:
            files[path] = [piece for piece in record.ranges if piece.stop <= size]
    return hash_problems(files, progress)


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
    problems: list[Problem] = []
    if manifest is not None:
        listed = {record.path for record in manifest.files}
        read = {
            stored.root / file
            for stored in (model, optimizer)
            if stored is not None
            for file in [*stored.files, *(each for _, tensor in labelled_tensors(stored) for each in tensor.files())]
        }
        unlisted = [path for path in sorted(read) if path.relative_to(folder).as_posix() not in listed]
        problems += [unlisted_problem(path) for path in unlisted[:MAX_PROBLEMS]]  # a resume refuses them
        problems += manifest_problems(model, manifest)
    return problems + (config_problems(model, folder) if config_check else [])


def hash_problems(files: Mapping[Path, Sequence[FileRange]], progress: Progress) -> list[Problem]:
    """Return a problem for each file with ranges whose hash differs, or that cannot be read."""

    def check(path: Path, item: FileRange) -> int | None:
        return item.stop - item.start if hash_file(path, item.start, item.stop) == item.hash else None

    return _check_ranges(files, check, progress)[1]


def crc_problems(files: Iterable[Path], progress: Progress) -> tuple[int, list[Problem]]:
    """Return the number of bytes with a CRC-32, and a problem for each file with a damaged or incomplete archive.

    Args:
        files: the files of a checkpoint. The metadata of DCP lists the archives in its files; others are one archive.
    """
    archives: dict[Path, list[FileRange]] = {}
    for path in files:
        try:
            if path.name == DCP_METADATA:
                for key, place in read_pickle(read_file(path), path).storage_data.items():
                    item = FileRange(place.offset, place.offset + place.length, "", key.fqn)
                    archives.setdefault(path.parent / place.relative_path, []).append(item)
            elif read_range(path, 0, 4) == b"PK\3\4" and path not in archives:
                archives[path] = [FileRange(0, path.stat().st_size, "")]
        except (CheckpointError, AttributeError, TypeError, OSError):
            pass  # the check of the structure reports it
    return _check_ranges({path: items for path, items in archives.items() if path.is_file()}, _check_archive, progress)


def _check_archive(path: Path, item: FileRange) -> int:
    with open_for_reading(path) as file:
        part = FileSlice(file, item.start, item.stop - item.start)
        return compare_checksums(io.BufferedReader(part, 1 << 20))


def _check_ranges(
    files: Mapping[Path, Sequence[FileRange]], check: Callable[[Path, FileRange], int | None], progress: Progress
) -> tuple[int, list[Problem]]:
    """Return the number of bytes that were compared, and a problem for each file that is damaged or cannot be read.

    Args:
        check: returns the number of bytes in a range that were compared; ``None`` if they differ.
    """
    ranges = [(path, item) for path, items in files.items() for item in items]
    total = sum(item.stop - item.start for _, item in ranges)
    progress("verify", 0, total)
    damaged: dict[Path, list[FileRange]] = {}
    problems: dict[Path, Problem] = {}
    num_checked = 0

    def examine(place: tuple[Path, FileRange]) -> int | OSError | None:
        try:
            return check(*place)
        except OSError as error:
            return error
        except (CheckpointError, zipfile.BadZipFile, ValueError, NotImplementedError):  # truncated or damaged
            return None

    # Hashing and reading release the GIL, so that threads use all cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for (path, item), found in zip(ranges, pool.map(examine, ranges), strict=True):
            progress("verify", item.stop - item.start, total)
            if isinstance(found, OSError):
                problems[path] = problem("FSDP-E472", path, f"cannot be read: {found.strerror or found}.", REPLACE_FILE)
            elif found is None:
                damaged.setdefault(path, []).append(item)
            else:
                num_checked += found
    for path, items in damaged.items():
        problems[path] = damage_problem(path, items, len(files[path]), [item.name for item in items])
    return num_checked, list(problems.values())
