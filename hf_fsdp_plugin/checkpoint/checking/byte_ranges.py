"""Stretches of files against the checksums that they had, on all cores, and what is said of the damaged ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.completeness import listed
from hf_fsdp_plugin.checkpoint.formats.stored import problem
from hf_fsdp_plugin.problems import CheckpointError, Problem

Progress = Callable[[int, int], None]
"""Told the bytes that were checked, and those that are to be checked in all."""

REPLACE_FILE = "Take this file from a copy that is whole, or resume from an earlier checkpoint."


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file with the checksum that they had, and the tensors in them."""

    path: Path
    start: int
    stop: int
    expected: str | int
    names: tuple[str, ...]


def check(
    stretches: list[Stretch], digest: Callable[[Path, int, int], str | int], progress: Progress | None
) -> tuple[dict[Path, list[Stretch]], list[Problem]]:
    """The stretches whose checksum is another now, by file; and a problem for each file that cannot be read."""
    total = sum(stretch.stop - stretch.start for stretch in stretches)
    done = 0
    damaged: dict[Path, list[Stretch]] = {}
    unreadable: dict[Path, Problem] = {}

    def examine(stretch: Stretch) -> bool | str:
        try:
            return digest(stretch.path, stretch.start, stretch.stop) == stretch.expected
        except OSError as error:
            return error.strerror or str(error)
        except CheckpointError:  # it has been cut short since its size was looked at
            return False

    # Hashing and reading free the GIL, so threads use all cores.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for stretch, found in zip(stretches, pool.map(examine, stretches), strict=True):
            done += stretch.stop - stretch.start
            if progress is not None:
                progress(done, total)
            if isinstance(found, str):
                unreadable[stretch.path] = problem(stretch.path, f"cannot be read: {found}.", REPLACE_FILE)
            elif not found:
                damaged.setdefault(stretch.path, []).append(stretch)
    return damaged, list(unreadable.values())


def damage(hit: list[Stretch], count: int, twin: str | None = None) -> Problem:
    """What is said of one file: where it was hit, of how many stretches, and the tensors there.

    Args:
        twin: the file that has, by its checksums, changed places with this one.
    """
    names = list(dict.fromkeys(name for stretch in hit for name in stretch.names))
    first = f"bytes {hit[0].start:,} to {hit[0].stop:,}"
    where = first if len(hit) == 1 else f"{len(hit)} of {count} stretches (the first: {first})"
    held = f"they hold {listed(names)}" if names else "they hold no tensor"
    swapped = f" The file is what {twin} should be." if twin is not None else ""
    return problem(hit[0].path, f"{where} are not what was saved; {held}.{swapped}", REPLACE_FILE)
