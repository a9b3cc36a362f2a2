"""Compares bytes of a checkpoint with the hashes of its manifest, or with the checksums of ``torch.save``'s archives.

A rank that resumes reads parts of some files. It reads and compares the blocks of the manifest that contain these
parts, and no others.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking import inspection
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.boxes import dtype_size, element_span
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, Manifest, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import (
    PieceTable,
    StoredModel,
    StoredOptimizer,
    labelled_tensors,
)
from hf_fsdp_plugin.checkpoint.formats.torch_files import crc_file
from hf_fsdp_plugin.checkpoint.io import InputFiles, hash_bytes, hash_file
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

Progress = Callable[[str, int, int], None]
"""Progress callback: receives the step (``merge``, ``verify``), the bytes since the last call, and the total."""

REPLACE_FILE = "Replace this file with an undamaged copy, or resume from an earlier checkpoint."


def damage_problem(path: Path, damaged: Sequence[FileRange], num_ranges: int, names: Iterable[str]) -> Problem:
    """Return a problem that reports the damaged ranges of one file.

    Args:
        num_ranges: number of ranges of the file.
        names: the tensors in the damaged ranges.
    """
    first = f"bytes {damaged[0].start:,} to {damaged[0].stop:,}"
    where = first if len(damaged) == 1 else f"{len(damaged)} of {num_ranges} byte ranges (the first: {first})"
    found = list(dict.fromkeys(name for name in names if name))
    contents = f"They contain {format_names(found, 3)}." if found else "They contain no tensor."
    return problem("FSDP-E471", path, f"{where} differ from what was saved. {contents}", REPLACE_FILE)


_RUN = 4 << 20
"""Maximum number of bytes of whole blocks that are read at once: few, so that they are hashed in the CPU cache."""
_MAX_KEPT = 64 << 20
"""A block of which a read needs only a part is kept for the next read. Maximum number of bytes of all kept blocks."""
_MAX_KEPT_IN_ORDER = 2 << 20
"""Maximum number of kept bytes if files are read from start to end: two of the largest blocks that are written."""
_MAX_BLOCK = 16 << 20
"""Maximum size in bytes of a block that is kept. Files without tensors, and earlier manifests, have larger ranges."""


def files_of_checkpoint(checkpoint: Path, stored: StoredModel | StoredOptimizer, *, verify: bool) -> InputFiles:
    """Return the files of a model or an optimizer, verified if there is a manifest and ``verify`` is set.

    They are meant to be read in the order of their bytes.

    Args:
        checkpoint: the folder of the checkpoint, or of its model or optimizer.
    """
    folder = inspection.checkpoint_of(checkpoint)
    manifest = read_manifest(folder) if verify else None
    return InputFiles(stored.root) if manifest is None else VerifiedFiles(stored.root, manifest, folder, in_order=True)


def check_headers(files: InputFiles, stored: StoredModel | StoredOptimizer, rank: int = 0, world_size: int = 1) -> None:
    """Compare the bytes that :meth:`InputFiles.read` does not read: headers, metadata, and values without a tensor.

    Each rank compares some of the files.

    Raises:
        CheckpointError: bytes differ from those that were saved.
    """
    if not isinstance(files, VerifiedFiles):
        return
    places: dict[str, list[tuple[int, int]]] = {file: [] for file in stored.files[rank::world_size]}
    for _, tensor in labelled_tensors(stored):
        if isinstance(tensor.pieces, PieceTable):
            continue  # its files have not been read
        for piece in tensor.pieces:
            if piece.file in places:
                size = element_span(piece.strides, piece.box.sizes) * dtype_size(tensor.dtype)
                places[piece.file].append((piece.offset, piece.offset + size))
    for file, taken in places.items():
        taken.sort()
        at = 0
        for block in files.blocks_of(file):
            while at < len(taken) and taken[at][1] <= block.start:
                at += 1
            if at == len(taken) or taken[at][0] >= block.stop:
                files.check_block(file, block)


class VerifiedFiles(InputFiles):
    """The files below ``root``. A read raises ``CheckpointError`` if it returns bytes that differ from the saved ones.

    Args:
        manifest: the manifest of the checkpoint ``folder``, which contains ``root``.
        in_order: each file is read from its start to its end, so that few blocks have to be kept.
    """

    def __init__(self, root: Path, manifest: Manifest, folder: Path, in_order: bool = False) -> None:
        super().__init__(root)
        self._max_kept = _MAX_KEPT_IN_ORDER if in_order else _MAX_KEPT
        self._folder = folder
        self._below = root.resolve().relative_to(folder.resolve())
        self._records = {record.path: record for record in manifest.files}
        self._blocks: dict[str, Sequence[FileRange]] = {}
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._checked: set[tuple[str, int]] = set()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._kept.clear()
        self._checked.clear()

    def read(self, file: str, offset: int, out: memoryview) -> None:
        blocks = self.blocks_of(file)
        index = bisect_right(blocks, offset, key=attrgetter("stop"))
        stop = offset + len(out)
        while offset < stop and index < len(blocks):
            run = self._whole_blocks(blocks, index, offset, stop)
            if run:
                part, out = out[: run[-1].stop - offset], out[run[-1].stop - offset :]
                super().read(file, offset, part)
                for block in run:
                    self._compare(file, block, hash_bytes(part[block.start - offset : block.stop - offset]))
                offset, index = run[-1].stop, index + len(run)
                continue
            block = blocks[index]
            count = min(stop, block.stop) - offset
            self._read_part(file, block, offset, out[:count])
            offset, out, index = offset + count, out[count:], index + 1
        if offset < stop:
            super().read(file, offset, out)  # raises an error: the file ended here when it was saved

    def check_file(self, file: str) -> None:
        """Compare all bytes of a file."""
        for block in self.blocks_of(file):
            self.check_block(file, block)

    def blocks_of(self, file: str) -> Sequence[FileRange]:
        if file not in self._blocks:
            path = (self._below / file).as_posix()
            if path not in self._records:
                raise CheckpointError([unlisted_problem(self._folder / path)])
            self._blocks[file] = self._records[path].ranges
        return self._blocks[file]

    def _whole_blocks(self, blocks: Sequence[FileRange], index: int, start: int, stop: int) -> list[FileRange]:
        """Return the next blocks that are completely in the bytes ``[start, stop)``, up to ``_RUN`` bytes."""
        run: list[FileRange] = []
        for number in range(index, len(blocks)):
            block = blocks[number]
            if block.start < start or block.stop > stop or (run and block.stop - start > _RUN):
                break
            run.append(block)
        return run

    def _read_part(self, file: str, block: FileRange, offset: int, out: memoryview) -> None:
        """Read a part of a block. The block is read and compared once, and kept for the next read."""
        if block.stop - block.start > _MAX_BLOCK:
            self.check_block(file, block)
            super().read(file, offset, out)
            return
        key = file, block.start
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            data = memoryview(bytearray(block.stop - block.start))
            super().read(file, block.start, data)
            self._compare(file, block, hash_bytes(data))
            self._kept[key] = data
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._max_kept:
                self._kept.popitem(last=False)
        begin = offset - block.start
        out[:] = self._kept[key][begin : begin + len(out)]

    def check_block(self, file: str, block: FileRange) -> None:
        """Read and compare a block of any size once."""
        if (file, block.start) not in self._checked:
            self._compare(file, block, hash_file(self._root / file, block.start, block.stop))
            self._checked.add((file, block.start))

    def _compare(self, file: str, block: FileRange, found: str) -> None:
        if found != block.hash:
            path = self._folder / self._below / file
            raise CheckpointError([damage_problem(path, [block], len(self.blocks_of(file)), [block.name])])


def unlisted_problem(path: Path) -> Problem:
    message = f"is not listed in {MANIFEST_NAME}, so its bytes cannot be verified."
    fix = f"Restore the checkpoint's own files. If you replaced them on purpose, delete {MANIFEST_NAME}."
    return problem("FSDP-E459", path, message, fix)


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
        return [name for offset, name in offsets().get(path, ()) if start <= offset < stop]

    problems: list[Problem] = []
    ranges: dict[Path, list[FileRange]] = {}
    for path in files:
        entries = inspection.archive_entries(path, problems, REPLACE_FILE, partial(names_between, path, 0))
        ranges[path] = [FileRange(start=each.start, stop=each.stop, hash=str(each.crc)) for each in entries if each.crc]
    damaged, unreadable = damaged_ranges(ranges, lambda *place: str(crc_file(*place)), progress)
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
            for label, tensor in labelled_tensors(stored) if stored is not None else ():
                for piece in tensor.pieces:
                    found.setdefault(folder / piece.file, []).append((piece.offset, label))
    return {path: sorted(offsets) for path, offsets in found.items()}
