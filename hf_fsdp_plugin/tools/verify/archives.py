"""The checksums in the archives of ``torch.save``, and comparisons of bytes on all cores."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.verify import REPLACE_FILE, damage_problem
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import labelled_tensors
from hf_fsdp_plugin.checkpoint.formats.torch_files import END_SIGNATURE, END_SIZE, ZipEntry, ZipError, read_archive
from hf_fsdp_plugin.checkpoint.io import file_blocks, open_for_reading, read_range
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.tools.common import Progress


class NotAnArchive(ValueError):
    """The bytes before ``stop`` are not a complete zip archive."""

    def __init__(self, stop: int) -> None:
        super().__init__(f"the bytes before {stop:,} are not a complete zip archive")
        self.stop = stop


def crc_file(path: Path, start: int, stop: int) -> int:
    """Return the CRC-32 of the bytes ``[start, stop)`` of a file, or up to the end of the file if it is shorter."""
    crc = 0
    for block in file_blocks(path, start, stop):
        crc = zlib.crc32(block, crc)
    return crc


def stored_entries(path: Path) -> Iterator[ZipEntry]:
    """Yield every uncompressed entry of every archive in the file, the last archive first.

    Raises:
        NotAnArchive: some bytes of the file do not belong to a complete archive.
    """
    with open_for_reading(path) as file:
        stop = os.fstat(file.fileno()).st_size
        while stop > 0:
            try:
                entries = read_archive(file.fileno(), 0, stop)
            except ZipError:
                raise NotAnArchive(stop) from None
            yield from (entry for entry in entries if not entry.compressed)
            stop = _end_before(file.fileno(), min(entry.header for entry in entries))


def _end_before(descriptor: int, start: int) -> int:
    """Return the end of the archive before the one at ``start``: this package aligns archives, with zeros between."""
    if start % file_names.ENTRY_ALIGNMENT:
        return start
    begin = max(0, start - file_names.ENTRY_ALIGNMENT - END_SIZE + 1)
    data = os.pread(descriptor, start - begin, begin)
    end = data.rfind(END_SIGNATURE) + END_SIZE
    return begin + end if end >= END_SIZE and not any(data[end:]) else start


def archive_entries(
    path: Path, problems: list[Problem], fix: str, names_before: Callable[[int], list[str]] = lambda _: []
) -> list[ZipEntry]:
    """Return the entries of a file's archives; none for another file. Adds a problem if the file is damaged.

    Args:
        names_before: returns the names of the tensors that begin before a byte of the file.
    """
    try:
        return list(stored_entries(path)) if read_range(path, 0, 4) == b"PK\3\4" else []
    except NotAnArchive as error:
        lost = sorted(set(names_before(error.stop)))
        contents = f"; they contain {format_names(lost, 3)}" if lost else ""
        problems.append(problem("FSDP-E453", path, f"is truncated or damaged: {error}{contents}.", fix))
    except OSError as error:
        problems.append(problem("FSDP-E472", path, f"cannot be read: {error.strerror}.", fix))
    return []


def damaged_ranges(
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
        return [name for first, end, name in offsets().get(path, ()) if first < stop and start < end]

    problems: list[Problem] = []
    ranges: dict[Path, list[FileRange]] = {}
    for path in files:
        entries = archive_entries(path, problems, REPLACE_FILE, partial(names_between, path, 0))
        ranges[path] = [FileRange(start=each.start, stop=each.stop, hash=str(each.crc)) for each in entries if each.crc]
    damaged, unreadable = damaged_ranges(ranges, lambda *place: str(crc_file(*place)), progress)
    for path, found in damaged.items():
        names = [name for item in found for name in names_between(path, item.start, item.stop)]
        problems.append(damage_problem(path, found, len(ranges[path]), names))
    num_bytes = sum(item.stop - item.start for items in ranges.values() for item in items)
    return num_bytes, problems + unreadable


def _tensor_offsets(folder: Path) -> dict[Path, list[tuple[int, int, str]]]:
    """Return first byte, end and name of every tensor in a file, in ascending order; what is unreadable is skipped."""
    found: dict[Path, list[tuple[int, int, str]]] = {}
    for read in (read_stored_model, read_stored_optimizer):
        with suppress(CheckpointError):
            stored = read(folder)
            for label, tensor in labelled_tensors(stored) if stored is not None else ():
                for piece in tensor.pieces:
                    found.setdefault(folder / piece.file, []).append((piece.offset, piece.stop(tensor.dtype), label))
    return {path: sorted(offsets) for path, offsets in found.items()}
