"""Compares bytes of a checkpoint with the hashes of its manifest.

A rank that resumes reads parts of some files. It reads and compares the blocks of the manifest that contain these
parts, and no others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking import completeness
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, Manifest, hash_bytes, hash_file, read_manifest
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredOptimizer, labelled_tensors
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names

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


_STEP = 4 << 20
"""Maximum size in bytes of a block that is kept for further reads. Larger ones are hashed in the file."""


def files_of_checkpoint(checkpoint: Path, stored: StoredModel | StoredOptimizer, *, verify: bool) -> InputFiles:
    """Return the files of a model or an optimizer, verified if there is a manifest and ``verify`` is set.

    They are meant to be read in the order of their bytes.

    Args:
        checkpoint: the folder of the checkpoint, or of its model or optimizer.
    """
    folder = completeness.checkpoint_of(checkpoint)
    manifest = read_manifest(folder) if verify else None
    return InputFiles(stored.root) if manifest is None else VerifiedFiles(stored.root, manifest, folder)


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
        for piece in tensor.pieces:
            if piece.file in places:
                places[piece.file].append((piece.offset, piece.stop(tensor.dtype)))
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
    """

    def __init__(self, root: Path, manifest: Manifest, folder: Path) -> None:
        super().__init__(root)
        below = root.resolve().relative_to(folder.resolve())
        listed = {record.path: record.ranges for record in manifest.files if Path(record.path).is_relative_to(below)}
        self._blocks = {Path(path).relative_to(below).as_posix(): ranges for path, ranges in listed.items()}
        self._checked: set[tuple[str, int]] = set()
        self._kept: dict[tuple[str, int], memoryview] = {}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._kept.clear()
        self._checked.clear()

    def read(self, file: str, offset: int, out: memoryview) -> None:
        blocks = self.blocks_of(file)
        index = bisect_right(blocks, offset, key=attrgetter("stop"))
        while out and index < len(blocks):
            block = blocks[index]
            part, out = out[: block.stop - offset], out[block.stop - offset :]
            if len(part) == block.stop - block.start:
                super().read(file, offset, part)
                self._compare(file, block, hash_bytes(part))
            else:
                self.check_block(file, block)
                if (kept := self._kept.get((file, block.start))) is not None:
                    begin = offset - block.start
                    part[:] = kept[begin : begin + len(part)]
                else:
                    super().read(file, offset, part)
            offset, index = block.stop, index + 1
        super().read(file, offset, out)  # the file ended here when it was saved: an error, unless nothing is left

    def check_file(self, file: str) -> None:
        """Compare all bytes of a file."""
        for block in self.blocks_of(file):
            self.check_block(file, block)

    def blocks_of(self, file: str) -> Sequence[FileRange]:
        if file not in self._blocks:
            raise CheckpointError([unlisted_problem(self._root / file)])
        return self._blocks[file]

    def check_block(self, file: str, block: FileRange) -> None:
        """Read and compare a block once. A small one is kept until the next one is read."""
        key, size = (file, block.start), block.stop - block.start
        if key in self._checked:
            return
        if size <= _STEP:
            data = memoryview(bytearray(size))
            super().read(file, block.start, data)
            self._compare(file, block, hash_bytes(data))
            self._kept = {key: data}
        else:
            self._compare(file, block, hash_file(self._root / file, block.start, block.stop))
        self._checked.add(key)

    def _compare(self, file: str, block: FileRange, found: str) -> None:
        if found != block.hash:
            raise CheckpointError([damage_problem(self._root / file, [block], len(self.blocks_of(file)), [block.name])])


def unlisted_problem(path: Path) -> Problem:
    message = f"is not listed in {MANIFEST_NAME}, so its bytes cannot be verified."
    fix = f"Restore the checkpoint's own files. If you replaced them on purpose, delete {MANIFEST_NAME}."
    return problem("FSDP-E459", path, message, fix)
