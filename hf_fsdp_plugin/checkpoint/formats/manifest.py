"""The manifest of a checkpoint: its contents, its settings, and hashes of all bytes. It marks a finished checkpoint.

``fsdp_manifest.json`` is written last, after every file that it lists. ``docs/manifest.md`` is its specification. The
hashes of a large checkpoint are in a file of their own, a table with records of fixed size, of which a rank reads only
the records of the files that it reads. :func:`read_manifest` checks every field, and reports all problems at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.io import (
    HASH,
    hash_bytes,
    hash_file,
    parse_json,
    read_file,
    read_range,
    write_bytes,
    write_text,
)
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind

MAX_RANGE = 1 << 20
"""Maximum size in bytes of a range of a file with tensors. It ends at a multiple of this number, or with its tensor.

A rank that needs a part of a range reads and hashes all of it. Measured by ``scripts/bench/measure/verified_reads.py``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """The bytes ``[start, stop)`` of a file.

    Attributes:
        hash: xxh3_128 of these bytes, in hexadecimal.
        name: name of the tensor in this range; empty for headers, padding and files without tensors.
    """

    start: int
    stop: int
    hash: str
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file: its path relative to the checkpoint (with ``/``), its size in bytes, and the ranges that tile it."""

    path: str
    size: int
    ranges: Sequence[FileRange]


_RECORD = struct.Struct("<QQI16s")
RECORD_SIZE = _RECORD.size
_FIELDS = [("start", "<u8"), ("stop", "<u8"), ("name", "<u4"), ("hash", "V16")]


class PackedRanges(Sequence[FileRange]):
    """The ranges of one file as records: a range is created only when it is accessed."""

    def __init__(self, data: bytes | memoryview, names: Sequence[str]) -> None:
        self.data, self.names = data, names

    @classmethod
    def of(cls, ranges: Iterable[FileRange], names: dict[str, int]) -> PackedRanges:
        """Return ranges as records. New names are added to ``names``, with their index."""
        records = [
            _RECORD.pack(item.start, item.stop, names.setdefault(item.name, len(names)), bytes.fromhex(item.hash))
            for item in ranges
        ]
        return cls(b"".join(records), list(names))

    def __len__(self) -> int:
        return len(self.data) // RECORD_SIZE

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]  # raises IndexError
        start, stop, name, digest = _RECORD.unpack_from(self.data, number * RECORD_SIZE)
        return FileRange(start=start, stop=stop, hash=digest.hex(), name=self.names[name])

    def packed(self, names: dict[str, int], numbers: dict[int, Any]) -> bytes:
        """Return the records of the ranges that are not empty, with other numbers of the names.

        Args:
            names: name -> its number in the result. New names are added.
            numbers: the numbers of the names of earlier calls with the same ``names``, by the id of the sequence.
        """
        import numpy

        if id(self.names) not in numbers:  # the sequence is kept, so that no other one gets its id
            found = numpy.array([names.setdefault(name, len(names)) for name in self.names], "<u4")
            numbers[id(self.names)] = self.names, found
        records = numpy.frombuffer(self.data, _FIELDS)
        records = records[records["start"] < records["stop"]]
        if len(records):
            records["name"] = numbers[id(self.names)][1][records["name"]]
        return records.tobytes()


class BlockTable(PackedRanges):
    """The ranges of one file of the checkpoint, whose records are read when they are needed.

    Args:
        path: the file with the records.
        first, count: the records of this file.
        size: size of the file that they describe, in bytes.
        digest: hash of the records.
        names: the names to which records refer.

    Raises:
        CheckpointError: from every access except the length, if the records are damaged.
    """

    def __init__(self, path: Path, first: int, count: int, *, size: int, digest: str, names: Sequence[str]) -> None:
        self.names = names
        self._path, self._first, self._count = path, first, count
        self._size, self._digest = size, digest

    def __len__(self) -> int:
        return self._count

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]
        try:
            data = read_range(self._path, self._first * RECORD_SIZE, self._count * RECORD_SIZE)
        except OSError as error:
            refuse("FSDP-E472", self._path, f"cannot be read: {error.strerror}.")
        if hash_bytes(data) != self._digest:
            self._damaged("its records differ from what was saved")
        at = 0
        for start, stop, name, _ in _RECORD.iter_unpack(data):
            if start != at or start >= stop or name >= len(self.names):
                self._damaged(f"the record of the bytes {start:,} to {stop:,} is not valid")
            at = stop
        if at != self._size:
            self._damaged(f"its records end at byte {at:,} of {self._size:,}")
        return data

    def _damaged(self, how: str) -> None:
        refuse("FSDP-E464", self._path, f"is damaged: {how}.")


def _packed(ranges: Sequence[FileRange]) -> PackedRanges:
    return ranges if isinstance(ranges, PackedRanges) else PackedRanges.of(ranges, {})


def joined_ranges(parts: Sequence[Sequence[FileRange]]) -> Sequence[FileRange]:
    """Return the ranges of a file that several ranks have written, in the order of their bytes."""
    if len(parts) == 1:
        return parts[0]
    import numpy

    names: dict[str, int] = {}
    numbers: dict[int, Any] = {}
    packed = []
    for part in parts:
        packed.append(_packed(part).packed(names, numbers))
    records = numpy.frombuffer(b"".join(packed), _FIELDS)
    return PackedRanges(records[numpy.argsort(records["start"], kind="stable")].tobytes(), tuple(names))


FORMAT = "hf_fsdp_plugin checkpoint"
VERSION = 2
"""The latest version. A manifest with all hashes in it has version 1."""
MAX_INLINE = 10_000
"""Maximum number of ranges in the manifest itself, about 1 MB. More are written to a file of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of a manifest: everything about a checkpoint except the values of its tensors.

    Attributes:
        kind: ``sharded``, ``full`` or ``local``.
        backend: ``fsdp1`` or ``fsdp2``.
        world_size: number of ranks that wrote the checkpoint.
        mesh: axis -> size.
        strategy: the sharding strategy, by its canonical name.
        step: number of optimizer steps; ``None`` if unknown.
        asynchronous: whether the checkpoint was written in the background.
        created: time of the save in UTC, in ISO 8601.
        versions: package -> version.
        settings: the resolved settings, by canonical name.
        parameters: canonical name -> dtype (``bfloat16``) and global shape, buffers included.
        ties: names that share one tensor, a tuple for each such tensor.
        files: all files of the checkpoint except the manifest.
        batch: batch sizes, gradient accumulation and number of samples seen, to resume at the same sample.
        run: the run that wrote the checkpoint: ``id``, ``steps``, ``training`` and, in a batch system, ``job``;
            empty if no launcher identifies it.
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
    run: dict[str, Any] = field(default_factory=dict)


def to_text(m: Manifest) -> str:
    """Return the manifest as JSON with its own hash and all ranges.

    Numbers that JSON does not support (inf, nan) become text.
    """
    return _text(m, 1, [_file_tree(record) for record in m.files])


def write_manifest(folder: Path, m: Manifest) -> None:
    """Write ``fsdp_manifest.json`` to ``folder``, atomically; before it ``fsdp_manifest.hashes`` if there are many."""
    if sum(len(record.ranges) for record in m.files) <= MAX_INLINE:
        write_text(folder / MANIFEST_NAME, to_text(m))
        return
    names: dict[str, int] = {}
    numbers: dict[int, Any] = {}
    packed, files, first = [], [], 0
    for record in m.files:
        if len(record.ranges) < 2:
            files.append(_file_tree(record))
            continue
        data = _packed(record.ranges).packed(names, numbers)
        count = len(data) // RECORD_SIZE
        files.append({"path": record.path, "size": record.size, "blocks": [first, count], "hash": hash_bytes(data)})
        packed.append(data)
        first += count
    write_bytes(folder / BLOCK_FILE, *packed)
    write_text(folder / MANIFEST_NAME, _text(m, 2, files, num_blocks=first, names=list(names)))


def _text(m: Manifest, version: int, files: list[Any], **more: Any) -> str:
    plain = {each.name: _plain(getattr(m, each.name)) for each in fields(m) if each.name != "files"}
    parameters = plain.pop("parameters")
    if not m.run:
        del plain["run"]
    tree = {"format": FORMAT, "version": version, "hash": HASH, **plain, **more}
    tree |= {"parameters": parameters, "files": files, "manifest_hash": ""}
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {_by_line(key, value)}" for key, value in tree.items()) + "\n}\n"
    return text.replace(_hash_entry(""), _hash_entry(hash_bytes(text.encode())))


def record_file(root: Path, relative: str) -> FileRecord:
    """Return the record of a file without tensors: the whole file is one range."""
    path = root / relative
    size = path.stat().st_size
    whole = FileRange(start=0, stop=size, hash=hash_file(path, 0, size))
    return FileRecord(path=relative, size=size, ranges=(whole,) if size else ())


def _hash_entry(digest: str) -> str:
    """Return the JSON member with the manifest's own hash, which is computed with an empty digest in it."""
    return f'"manifest_hash": "{digest}"'


def _plain(value: Any) -> Any:
    """Convert a value to the types that ``json.loads`` returns."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or is_number else str(value)


def _file_tree(record: FileRecord) -> dict[str, Any]:
    ranges = [[piece.start, piece.stop, piece.hash, piece.name] for piece in record.ranges]
    return {"path": record.path, "size": record.size, "ranges": ranges}


def _by_line(key: str, value: Any) -> str:
    """Return the JSON of a field, with one line per file or parameter."""
    if key == "parameters" and value:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
        return "{\n" + lines + "\n  }"
    if key == "files" and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


_NO_LINKS = "Copy the checkpoint with its links resolved (cp -rL), and use the copy."

_FORBIDDEN = re.compile("[\\\\\0\ud800-\udfff]")

_T = TypeVar("_T")
_EXPECTED: Mapping[type, str] = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}
_PLAIN: Final[Mapping[str, type]] = {
    "kind": str, "backend": str, "strategy": str, "asynchronous": bool, "created": str, "settings": dict, "batch": dict,
}  # fmt: skip
"""The fields whose values are kept as they are."""


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint folder, or ``None`` if there is none.

    Raises:
        CheckpointError: with all problems: the manifest is not JSON, is damaged, has a later version or fields of the
            wrong type; or a file is outside the folder, behind a symbolic link, or not tiled by its ranges.
    """
    path = folder / MANIFEST_NAME
    if _is_foreign_link(folder, path):
        refuse("FSDP-E456", path, "is a symbolic link.", _NO_LINKS)
    try:
        data = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        refuse("FSDP-E472", path, f"cannot be read: {error.strerror}.", "Check its permissions and the disk.")
    tree = _parse(path, data)
    reader = _Reader(folder)
    manifest = reader.manifest(tree)
    for record in manifest.files:
        reader.check_links(record.path)
    if reader.num_blocks:
        reader.check_block_file()
    raise_if_any(reader.problems)
    return manifest


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object of the manifest. Raises ``CheckpointError`` if it is damaged or of an unknown version."""
    try:
        tree = parse_json(data, only_finite=True)
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E463", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        refuse("FSDP-E463", path, f"is not a manifest: its format is {_shown(found)}, expected '{FORMAT}'.")
    version: Any = tree.get("version")
    is_number = type(version) is int
    if is_number and version > VERSION:
        message = f"has manifest version {version}, but this hf_fsdp_plugin reads manifest versions up to {VERSION}."
        refuse("FSDP-E465", path, message, "Install the hf_fsdp_plugin that wrote the checkpoint, or a later one.")
    if not _hash_matches(data, tree.get("manifest_hash")):
        refuse("FSDP-E464", path, "is damaged: its manifest_hash does not match its contents.")
    if not is_number or version < 1 or tree.get("hash") != HASH:
        found = f"version {_shown(version)} and hash {_shown(tree.get('hash'))}"
        refuse("FSDP-E465", path, f"has {found}; expected version 1 to {VERSION} and hash '{HASH}'.")
    return tree


def _hash_matches(data: bytes, digest: Any) -> bool:
    """Whether ``data`` with an empty digest has this hash. The hash covers every byte, including whitespace."""
    return hash_bytes(data.replace(_hash_entry(str(digest)).encode(), _hash_entry("").encode())) == digest


class _Reader:
    """Converts JSON values to typed ones, and collects all problems."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / MANIFEST_NAME
        self.problems: list[Problem] = []
        self._links: dict[str, frozenset[str] | None] = {}
        self.num_blocks = 0
        self.block_names: tuple[str, ...] = ()

    def manifest(self, tree: Mapping[str, Any]) -> Manifest:
        plain: dict[str, Any] = {key: self.typed(tree.get(key), kind, key) for key, kind in _PLAIN.items()}
        if plain["kind"] not in get_args(StateDictKind):
            self.report("kind", plain["kind"], "one of " + ", ".join(get_args(StateDictKind)))
        if tree["version"] > 1:
            self.num_blocks = self.count(tree.get("num_blocks"), "num_blocks")
            self.block_names = self.names(tree.get("names"), "names")
        tables = {key: self.typed(tree.get(key), dict, key) for key in ("mesh", "versions", "parameters")}
        lists = {key: self.typed(tree.get(key), list, key) for key in ("ties", "files")}
        return Manifest(
            **plain,
            world_size=self.count(tree.get("world_size"), "world_size", minimum=1),
            mesh={axis: self.count(size, f"mesh.{axis}") for axis, size in tables["mesh"].items()},
            step=None if tree.get("step") is None else self.count(tree["step"], "step"),
            versions={name: str(version) for name, version in tables["versions"].items()},
            parameters={name: self.parameter(name, value) for name, value in tables["parameters"].items()},
            ties=tuple(self.names(tie, "ties") for tie in lists["ties"]),
            files=self.files(lists["files"]),
            run=self.typed(tree.get("run", {}), dict, "run"),
        )

    def report(self, place: str, value: Any, expected: str) -> None:
        self.add(f"{place} is {_shown(value)}, expected {expected}.")

    def add(self, message: str, *, code: str = "FSDP-E463", place: Path | str = "", fix: str = COPY_AGAIN) -> None:
        self.problems.append(problem(code, place or self.path, message, fix))

    def typed(self, value: Any, kind: type[_T], place: str) -> _T:
        """Return the value; an empty one of the type ``kind`` if it has another type."""
        if not isinstance(value, kind):
            self.report(place, value, _EXPECTED[kind])
            return kind()
        return value

    def count(self, value: Any, place: str, minimum: int = 0) -> int:
        if type(value) is not int or value < minimum:
            self.report(place, value, f"an integer of at least {minimum}")
            return minimum
        return value

    def names(self, value: Any, place: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.report(place, value, "a list of names")
            return ()
        return tuple(value)

    def parameter(self, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
        match value:
            case [str(dtype), list(shape)]:
                return dtype, tuple(self.count(size, f"parameters.{name}") for size in shape)
        self.report(f"parameters.{name}", value, "a dtype and a shape")
        return "", ()

    def files(self, values: list[Any]) -> tuple[FileRecord, ...]:
        records: dict[str, FileRecord] = {}
        for position, value in enumerate(values):
            place = f"files[{position}]"
            if not isinstance(value, dict):
                self.report(place, value, "an object")
                continue
            path = self.typed(value.get("path"), str, f"{place}.path")
            if path == value.get("path") and not _is_inside(path):
                message = f"{place}.path is {_shown(path)}, which is not the path of a file inside the checkpoint."
                self.add(message, code="FSDP-E456")
            if path in records:
                self.report(f"{place}.path", path, "each file once")
            size = self.count(value.get("size"), f"{place}.size")
            in_table = self.num_blocks and "ranges" not in value
            ranges = self.blocks(value, size, place) if in_table else self.ranges(value.get("ranges"), size, place)
            records[path] = FileRecord(path=path, size=size, ranges=ranges)
        return tuple(records.values())

    def blocks(self, value: Mapping[str, Any], size: int, place: str) -> Sequence[FileRange]:
        match value.get("blocks"), value.get("hash"):
            case [int(first), int(count)], str(digest) if 0 <= first <= first + count <= self.num_blocks:
                path = self.folder / BLOCK_FILE
                return BlockTable(path, first, count, size=size, digest=digest, names=self.block_names)
        self.report(f"{place}.blocks", value.get("blocks"), f"the first and the number of {self.num_blocks} records")
        return ()

    def check_block_file(self) -> None:
        """Report a file of hashes that is missing, is a link or has another size."""
        path, expected = self.folder / BLOCK_FILE, self.num_blocks * RECORD_SIZE
        self.check_links(BLOCK_FILE)
        if not path.is_file():
            self.add("is missing; it contained the hashes.", code="FSDP-E457", place=path)
        elif (size := path.stat().st_size) != expected:
            self.add(f"has {size:,} bytes; {expected:,} were saved.", code="FSDP-E470", place=path)

    def ranges(self, values: Any, size: int, place: str) -> tuple[FileRange, ...]:
        ranges = []
        for value in self.typed(values, list, f"{place}.ranges"):
            match value:
                case [int(start), int(stop), str(digest), str(name)] if len(digest) == 32:
                    ranges.append(FileRange(start=start, stop=stop, hash=digest, name=name))
                case _:
                    self.report(f"{place}.ranges", value, "start, stop, hash and name")
                    return ()
        # Tensors without elements have empty ranges, which may be anywhere in the file.
        filled = [piece for piece in ranges if piece.start != piece.stop]
        ends, starts = [0, *(piece.stop for piece in filled)], [*(piece.start for piece in filled), size]
        if ends != starts or any(piece.stop < piece.start for piece in filled):
            found = [[piece.start, piece.stop] for piece in filled]
            self.report(f"{place}.ranges", found, f"contiguous ranges from 0 to {size}")
        return tuple(ranges)

    def check_links(self, relative: str) -> None:
        """Report a symbolic link in the path of a file, which could lead out of the checkpoint."""
        # A folder is read once: all ranks read the manifest, and the files are several for each rank.
        above = str(self.folder)
        for part in relative.split("/"):
            if above not in self._links:
                self._links[above] = _links_in(above)
            place = f"{above}/{part}"
            links = self._links[above]
            if (links is None or part in links) and _is_foreign_link(self.folder, Path(place)):
                message = "is a symbolic link in the path of a file of the manifest."
                self.add(message, code="FSDP-E456", place=place, fix=_NO_LINKS)
                return
            above = place


def _links_in(folder: str) -> frozenset[str] | None:
    """Return the names of the symbolic links in a folder; ``None`` if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries if entry.is_symlink())
    except OSError:
        return None


def _is_foreign_link(folder: Path, place: Path) -> bool:
    """Whether a path is a symbolic link, except links of the Hugging Face cache from a snapshot to its blobs."""
    if not place.is_symlink():
        return False
    snapshots = folder.resolve().parent
    return snapshots.name != "snapshots" or not place.resolve().is_relative_to(snapshots.parent / "blobs")


def _is_inside(path: str) -> bool:
    """Whether a path is in normal form and inside the checkpoint."""
    # File systems do not accept surrogates.
    if path in (MANIFEST_NAME, BLOCK_FILE) or _FORBIDDEN.search(path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
