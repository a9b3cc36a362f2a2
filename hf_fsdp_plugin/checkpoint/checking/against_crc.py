"""Comparison of a checkpoint without a manifest with the CRC-32 checksums in its archives."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.byte_ranges import (
    REPLACE_FILE,
    ByteRange,
    Progress,
    damage_problem,
    find_damaged,
)
from hf_fsdp_plugin.checkpoint.checking.checksums import NotAnArchive, crc_file, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.checkpoint.formats.stored import labelled_tensors
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

_Offsets = list[tuple[int, str]]
"""Byte offset and name of every tensor in a file, in ascending order."""


def crc_problems(folder: Path, files: Iterable[Path], progress: Progress | None) -> tuple[int, list[Problem]]:
    """Return the number of bytes with a CRC-32, and a problem for each archive that is damaged or incomplete."""
    return _compare(files, _tensor_offsets(folder), progress)


def archive_problems(files: Iterable[Path]) -> list[Problem]:
    """Return a problem for each archive without tensors of a model that is damaged or incomplete."""
    return _compare(files, {}, None)[1]


def _compare(
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
