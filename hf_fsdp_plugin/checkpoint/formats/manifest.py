"""The manifest of a checkpoint: what was saved, by whom, and the hash of every byte. Its presence says "finished".

``fsdp_manifest.json`` is written last, after every file it names. It is plain JSON, one file or parameter a line::

    {"format": "hf_fsdp_plugin checkpoint", "version": 1, "hash": "xxh3_128", "kind": "sharded", ...,
     "parameters": {NAME: [DTYPE, [SHAPE]]},
     "files": [{"path": PATH, "size": BYTES, "ranges": [[START, STOP, HASH, TENSOR]]}],
     "manifest_hash": HASH}

The ranges of a file tile it, so a hash covers each byte, and a damaged one leads to the tensor that it belongs to.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import xxhash

from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem
from hf_fsdp_plugin.spec.model import StateDictKind

FORMAT = "hf_fsdp_plugin checkpoint"
VERSION = 1
HASH = "xxh3_128"

_BLOCK = 4 << 20
"""Bytes read at once: enough for a disk, and still in the processor's cache when they are hashed."""
_RESAVE = "Take another checkpoint, or fetch this one again from where it came."


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """The bytes ``[start, stop)`` of a file.

    Attributes:
        hash: their xxh3_128, in hexadecimal.
        name: the tensor in them; empty for headers, padding and files without tensors.
    """

    start: int
    stop: int
    hash: str
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file by its posix path below the checkpoint, its size in bytes, and the ranges that tile it."""

    path: str
    size: int
    ranges: tuple[FileRange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that can be known about a checkpoint without opening its tensors.

    Attributes:
        kind: ``sharded``, ``full`` or ``local``.
        backend: ``fsdp1`` or ``fsdp2``, whichever ran.
        world_size: number of ranks that wrote it.
        mesh: axis -> size.
        strategy: the sharding strategy, by its canonical name.
        step: optimizer steps done; None where nobody counted.
        asynchronous: whether training went on while it was written.
        created: UTC, in ISO 8601.
        versions: package -> version.
        settings: the resolved settings, by canonical name.
        parameters: canonical name -> dtype (``bfloat16``) and global shape, buffers included.
        ties: names that share one tensor, a tuple for each such tensor.
        batch: what resuming at the same sample needs: batch sizes, accumulation, samples seen.
    """

    kind: str
    backend: str
    world_size: int
    mesh: dict[str, int]
    strategy: str
    step: int | None
    asynchronous: bool
    created: str
    versions: dict[str, str]
    settings: dict[str, Any]
    parameters: dict[str, tuple[str, tuple[int, ...]]]
    ties: tuple[tuple[str, ...], ...]
    files: tuple[FileRecord, ...]
    batch: dict[str, Any]


def to_text(m: Manifest) -> str:
    """The manifest as JSON, hashed over itself. Numbers that JSON does not have (inf, nan) become text."""
    tree = _plain({field.name: getattr(m, field.name) for field in fields(m) if field.name != "files"})
    tree |= {"format": FORMAT, "version": VERSION, "hash": HASH, "files": [_file_tree(record) for record in m.files]}
    tree["manifest_hash"] = ""
    first = ("format", "version", "hash")
    last = ("parameters", "files", "manifest_hash")
    order = [*first, *(key for key in tree if key not in first + last), *last]
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {_by_line(key, tree[key])}" for key in order) + "\n}\n"
    return text.replace(_hash_entry(""), _hash_entry(hash_bytes(text.encode())))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint folder; None where it has none.

    Raises:
        CheckpointError: it is not JSON, damaged, from a later version, wrongly typed, or names a file outside of the
            folder, through a link, or with ranges that do not tile it. All problems at once.
    """
    path = folder / MANIFEST_NAME
    if _is_foreign_link(folder, path):
        raise CheckpointError([_problem(path, "is a symbolic link.", _NO_LINKS)])
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError([_problem(path, f"cannot be read: {error.strerror}.", "Make it readable.")]) from error
    tree = _checked_tree(path, data)
    reader = _Reader(path)
    manifest = reader.manifest(tree)
    for record in manifest.files:
        reader.check_place(folder, record.path)
    if reader.problems:
        raise CheckpointError(reader.problems)
    return manifest


def hash_bytes(data: Any) -> str:
    """xxh3_128 of contiguous bytes (bytes, memoryview, an array), in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """xxh3_128 of ``[start, stop)`` of a file, up to its end without ``stop``. The GIL is free nearly all the time.

    Raises:
        CheckpointError: the file ends before ``stop``.
    """
    hasher = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK if stop is None else min(_BLOCK, max(stop - start, 1))))
    with open(path, "rb", buffering=0) as file:
        position = start
        while stop is None or position < stop:
            wanted = len(block) if stop is None else min(len(block), stop - position)
            count = os.preadv(file.fileno(), [block[:wanted]], position)
            if count == 0:
                break
            hasher.update(block[:count])
            position += count
    if stop is not None and position < stop:
        raise CheckpointError([_problem(path, f"ends at byte {position:,}; {stop:,} bytes were expected.", _RESAVE)])
    return hasher.hexdigest()


def record_file(root: Path, relative: str) -> FileRecord:
    """The record of a file as one range: right for small files, and for those that hold no tensors."""
    path = root / relative
    size = path.stat().st_size
    return FileRecord(
        path=relative, size=size, ranges=(FileRange(start=0, stop=size, hash=hash_file(path, 0, size)),) if size else ()
    )


_NO_LINKS = "Copy the checkpoint with its links resolved (cp -rL), and use the copy."


def _plain(value: Any) -> Any:
    """As it comes back from JSON, so that the hash of what is written is the hash of what is read."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (bool, int)):
        return value if value is None or isinstance(value, bool) else int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return str(value)


def _file_tree(record: FileRecord) -> dict[str, Any]:
    ranges = [[piece.start, piece.stop, piece.hash, piece.name] for piece in record.ranges]
    return {"path": record.path, "size": record.size, "ranges": ranges}


def _hash_entry(digest: str) -> str:
    return f'"manifest_hash": "{digest}"'


def _is_undamaged(data: bytes, digest: Any) -> bool:
    """Whether ``data`` had this hash when the place of the hash was empty: every byte counts, blanks too."""
    return hash_bytes(data.replace(_hash_entry(str(digest)).encode(), _hash_entry("").encode())) == digest


def _by_line(key: str, value: Any) -> str:
    """A file or parameter a line: readable, and not a line for every number of it."""
    if key == "parameters" and value:
        return (
            "{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items()) + "\n  }"
        )
    if key == "files" and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


def _problem(path: Path, message: str, fix: str = _RESAVE) -> Problem:
    return Problem(severity="error", message=message, fix=fix, origin=Origin(source=str(path)))


def _checked_tree(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON of a manifest that is one, of a version we know, and undamaged."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError([_problem(path, f"is no JSON: {error}.")]) from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        message = f"is no manifest: its format is {_shown(found)}, '{FORMAT}' was expected."
        raise CheckpointError([_problem(path, message)])
    version = tree.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        message = f"has version {version}; this hf_fsdp_plugin reads up to {VERSION}."
        raise CheckpointError([_problem(path, message, "Use the hf_fsdp_plugin that wrote it, or a later one.")])
    if not _is_undamaged(data, tree.get("manifest_hash")):
        raise CheckpointError([_problem(path, "is damaged: its hash is not that of what it says.")])
    if version != VERSION or tree.get("hash") != HASH:
        message = f"has version {_shown(version)} and hash {_shown(tree.get('hash'))}; {VERSION} and '{HASH}' expected."
        raise CheckpointError([_problem(path, message)])
    return tree


class _Reader:
    """Types what JSON left untyped, and collects what is wrong instead of stopping at the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []

    def manifest(self, tree: Mapping[str, Any]) -> Manifest:
        step = tree.get("step")
        kind = self.text(tree, "kind")
        if kind not in get_args(StateDictKind):
            self.complain("kind", kind, "one of " + ", ".join(get_args(StateDictKind)))
        return Manifest(
            kind=kind,
            backend=self.text(tree, "backend"),
            world_size=self.number(tree, "world_size", minimum=1),
            mesh={axis: self.count(size, f"mesh.{axis}") for axis, size in self.table(tree, "mesh").items()},
            strategy=self.text(tree, "strategy"),
            step=None if step is None else self.count(step, "step"),
            asynchronous=self.flag(tree, "asynchronous"),
            created=self.text(tree, "created"),
            versions={name: str(version) for name, version in self.table(tree, "versions").items()},
            settings=self.table(tree, "settings"),
            parameters=self.parameters(self.table(tree, "parameters")),
            ties=tuple(self.names(tie, "ties") for tie in self.items(tree, "ties")),
            files=self.files(self.items(tree, "files")),
            batch=self.table(tree, "batch"),
        )

    def complain(self, place: str, value: Any, expected: str) -> None:
        self.problems.append(_problem(self.path, f"{place}: {_shown(value)} was found, {expected} expected."))

    def text(self, tree: Mapping[str, Any], key: str) -> str:
        value = tree.get(key)
        if not isinstance(value, str):
            self.complain(key, value, "a text")
            return ""
        return value

    def flag(self, tree: Mapping[str, Any], key: str) -> bool:
        value = tree.get(key)
        if not isinstance(value, bool):
            self.complain(key, value, "true or false")
        return value is True

    def number(self, tree: Mapping[str, Any], key: str, minimum: int = 0) -> int:
        return self.count(tree.get(key), key, minimum)

    def count(self, value: Any, place: str, minimum: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.complain(place, value, f"a whole number from {minimum}")
            return minimum
        return value

    def table(self, tree: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = tree.get(key)
        if not isinstance(value, dict):
            self.complain(key, value, "an object")
            return {}
        return value

    def items(self, tree: Mapping[str, Any], key: str, place: str = "") -> list[Any]:
        value = tree.get(key)
        if not isinstance(value, list):
            self.complain(place + key, value, "a list")
            return []
        return value

    def names(self, value: Any, place: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.complain(place, value, "a list of names")
            return ()
        return tuple(value)

    def parameters(self, table: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        found = {}
        for name, value in table.items():
            match value:
                case [str(dtype), list(shape)]:
                    found[name] = (dtype, tuple(self.count(size, f"parameters.{name}") for size in shape))
                case _:
                    self.complain(f"parameters.{name}", value, "a dtype and a shape")
        return found

    def files(self, values: list[Any]) -> tuple[FileRecord, ...]:
        records: dict[str, FileRecord] = {}
        for position, value in enumerate(values):
            place = f"files[{position}]"
            if not isinstance(value, dict):
                self.complain(place, value, "an object")
                continue
            path = self.relative(value.get("path"), place)
            if path in records:
                self.complain(f"{place}.path", path, "every file once")
            size = self.count(value.get("size"), f"{place}.size")
            ranges = self.ranges(self.items(value, "ranges", f"{place}."), size, place)
            records[path] = FileRecord(path=path, size=size, ranges=ranges)
        return tuple(records.values())

    def ranges(self, values: list[Any], size: int, place: str) -> tuple[FileRange, ...]:
        ranges = []
        for value in values:
            match value:
                case [int(start), int(stop), str(digest), str(name)] if len(digest) == 32:
                    ranges.append(FileRange(start=start, stop=stop, hash=digest, name=name))
                case _:
                    self.complain(f"{place}.ranges", value, "start, stop, hash and name")
                    return ()
        # Tensors without elements have ranges without bytes, anywhere.
        held = [piece for piece in ranges if piece.start != piece.stop]
        ends, starts = [0, *(piece.stop for piece in held)], [*(piece.start for piece in held), size]
        if ends != starts or any(piece.stop < piece.start for piece in held):
            said = [[piece.start, piece.stop] for piece in held]
            self.complain(f"{place}.ranges", said, f"ranges that follow each other from 0 to {size}")
        return tuple(ranges)

    def relative(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not _stays_below(value):
            self.complain(f"{place}.path", value, "a file's path below the checkpoint")
        return str(value)

    def check_place(self, folder: Path, relative: str) -> None:
        """Complains of a link on the way: it could lead out of the checkpoint."""
        place = folder
        for part in PurePosixPath(relative).parts:
            place = place / part
            if _is_foreign_link(folder, place):
                self.problems.append(_problem(place, "is a symbolic link, and the manifest names it.", _NO_LINKS))
                return


def _is_foreign_link(folder: Path, place: Path) -> bool:
    """A link, other than those of the Hugging Face cache, from a snapshot to its blobs."""
    if not place.is_symlink():
        return False
    snapshots = folder.resolve().parent
    return snapshots.name != "snapshots" or not place.resolve().is_relative_to(snapshots.parent / "blobs")


def _stays_below(path: str) -> bool:
    """Whether a path leads to a file below the checkpoint, spelled in the one way there is."""
    # A surrogate is no name that a file system takes.
    if path == MANIFEST_NAME or any(c in "\\\0" or "\ud800" <= c <= "\udfff" for c in path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
