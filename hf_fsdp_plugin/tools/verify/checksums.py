"""Compares bytes with checksums on all cores: the hashes of a manifest, or those in the archives of ``torch.save``."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.verify import REPLACE_FILE, damage_problem
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading, read_file, read_range
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange
from hf_fsdp_plugin.checkpoint.formats.pickles import read_pickle
from hf_fsdp_plugin.checkpoint.formats.torch_files import FileSlice, compare_checksums
from hf_fsdp_plugin.checkpoint.hashes import hash_file
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.tools.common import Progress


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
