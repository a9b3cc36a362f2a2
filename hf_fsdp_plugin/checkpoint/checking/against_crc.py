"""A checkpoint without a manifest against the CRC-32 in its archives."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.byte_ranges import REPLACE_FILE, Progress, Stretch, check, damage
from hf_fsdp_plugin.checkpoint.checking.checksums import NotAnArchive, crc_file, is_archive, stored_entries
from hf_fsdp_plugin.checkpoint.checking.completeness import listed, tensors_of
from hf_fsdp_plugin.checkpoint.formats.stored import problem
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError, Problem

_Places = list[tuple[int, str]]
"""First byte and name of every tensor in a file, in ascending order."""


def crc_problems(folder: Path, files: Iterable[Path], progress: Progress | None) -> tuple[int, list[Problem]]:
    """The bytes that have a CRC-32, and a problem for each archive in which one is wrong, or which is torn."""
    places = _places(folder)
    problems: list[Problem] = []
    stretches: list[Stretch] = []
    for path in files:
        try:
            stretches += _stretches(path, places.get(path, [])) if is_archive(path) else []
        except NotAnArchive as error:
            torn = sorted({name for start, name in places.get(path, []) if start < error.stop})
            held = f"; they hold {listed(torn)}" if torn else ""
            problems.append(problem(path, f"{error}{held}.", REPLACE_FILE))
        except OSError as error:
            problems.append(problem(path, f"cannot be read: {error.strerror}.", REPLACE_FILE))
    damaged, unreadable = check(stretches, crc_file, progress)
    counts = Counter(stretch.path for stretch in stretches)
    problems += unreadable + [damage(hit, counts[path]) for path, hit in damaged.items()]
    return sum(stretch.stop - stretch.start for stretch in stretches), problems


def _stretches(path: Path, places: _Places) -> list[Stretch]:
    """The entries of a file's archives that have a checksum, with the tensors that begin in them."""
    return [
        Stretch(path, entry.start, entry.stop, entry.crc, tuple(name for _, name in places[low:high]))
        for entry in stored_entries(path)
        if entry.crc
        for low, high in [(bisect_left(places, (entry.start,)), bisect_left(places, (entry.stop,)))]
    ]


def _places(folder: Path) -> dict[Path, _Places]:
    """What begins where in each file; nothing of what cannot be read."""
    found: dict[Path, _Places] = {}
    for read in (read_stored_model, read_stored_optimizer):
        try:
            index = read(folder)
        except CheckpointError:
            continue
        if index is None:
            continue
        for name, tensor in tensors_of(index):
            for piece in tensor.pieces:
                found.setdefault(index.root / piece.file, []).append((piece.offset, name))
    return {path: sorted(places) for path, places in found.items()}
