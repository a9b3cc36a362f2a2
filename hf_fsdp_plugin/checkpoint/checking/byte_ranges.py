"""Comparison of byte ranges of files with their saved checksums, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

Progress = Callable[[str, int, int], None]
"""Progress callback: receives the step (``merge``, ``verify``), the bytes since the last call, and the total."""

REPLACE_FILE = "Replace this file with an undamaged copy, or resume from an earlier checkpoint."


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of a file with its saved checksum, and the names of the tensors in it."""

    path: Path
    start: int
    stop: int
    expected: str | int
    names: tuple[str, ...]


def find_damaged(
    ranges: list[ByteRange], digest: Callable[[Path, int, int], str | int], progress: Progress | None
) -> tuple[dict[Path, list[ByteRange]], list[Problem]]:
    """Return, by file, the ranges whose checksum differs, and a problem for each file that cannot be read."""
    total = sum(item.stop - item.start for item in ranges)
    if progress is not None:
        progress("verify", 0, total)
    damaged: dict[Path, list[ByteRange]] = {}
    unreadable: dict[Path, Problem] = {}

    def examine(item: ByteRange) -> bool | str:
        try:
            return digest(item.path, item.start, item.stop) == item.expected
        except OSError as error:
            return error.strerror or str(error)
        except CheckpointError:  # the file was truncated after its size was checked
            return False

    # Hashing and reading release the GIL, so that threads use all cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for item, found in zip(ranges, pool.map(examine, ranges), strict=True):
            if progress is not None:
                progress("verify", item.stop - item.start, total)
            if isinstance(found, str):
                unreadable[item.path] = problem("FSDP-E472", item.path, f"cannot be read: {found}.", REPLACE_FILE)
            elif not found:
                damaged.setdefault(item.path, []).append(item)
    return damaged, list(unreadable.values())


def damage_problem(damaged: list[ByteRange], num_ranges: int, swapped_with: str | None = None) -> Problem:
    """Return a problem that reports the damaged ranges of one file and the tensors in them.

    Args:
        num_ranges: number of ranges of the file.
        swapped_with: another file of the checkpoint, whose saved checksums match the bytes of this file.
    """
    names = list(dict.fromkeys(name for item in damaged for name in item.names))
    first = f"bytes {damaged[0].start:,} to {damaged[0].stop:,}"
    where = first if len(damaged) == 1 else f"{len(damaged)} of {num_ranges} byte ranges (the first: {first})"
    contents = f"They contain {format_names(names, 3)}." if names else "They contain no tensor."
    swapped = f" The file has the contents of {swapped_with}." if swapped_with is not None else ""
    message = f"{where} differ from what was saved. {contents}{swapped}"
    return problem("FSDP-E471", damaged[0].path, message, REPLACE_FILE)
