"""The manifest of a checkpoint: its contents, its settings, and hashes of all bytes. It marks a finished checkpoint.

``fsdp_manifest.json`` is written last, after every file that it lists. ``docs/manifest.md`` is its specification. The
hashes of a large checkpoint are in a file of their own, a table of blocks with records of fixed size, of which a rank
reads only the records of the bytes that it reads.
"""

from __future__ import annotations

import json
import math
import os
import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, overload

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.io import HASH, hash_bytes, hash_file, reading, write_bytes, write_text
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME

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
_PAGE = 1024
"""Number of records that are read at once."""


class _Ranges(Sequence[FileRange]):
    """Ranges of one file that are created when they are accessed."""

    @overload
    def __getitem__(self, index: int) -> FileRange: ...
    @overload
    def __getitem__(self, index: slice) -> list[FileRange]: ...
    def __getitem__(self, index: int | slice) -> FileRange | list[FileRange]:
        numbers = range(len(self))[index]  # raises IndexError
        return [self._at(number) for number in numbers] if isinstance(numbers, range) else self._at(numbers)

    @abstractmethod
    def _at(self, number: int) -> FileRange:
        """Return the range with this number, which is at least 0 and below the length."""


class PackedRanges(_Ranges):
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

    def _at(self, number: int) -> FileRange:
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


class BlockTable(_Ranges):
    """The blocks of one file of the checkpoint, read in pages when they are needed.

    Args:
        path: the file with the records.
        first, count: the records of this file.
        size: size of the file that they describe, in bytes.
        digest: hash of the records.
        names: the names to which records refer.

    Raises:
        CheckpointError: from every access, if the records are damaged.
    """

    def __init__(self, path: Path, first: int, count: int, *, size: int, digest: str, names: Sequence[str]) -> None:
        self._path, self._first, self._count = path, first, count
        self._size, self._digest, self._names = size, digest, names
        self._pages: dict[int, list[FileRange]] = {}

    def __len__(self) -> int:
        return self._count

    def _at(self, number: int) -> FileRange:
        page, position = divmod(number, _PAGE)
        if page not in self._pages:
            self._pages[page] = self._read(page * _PAGE)
        return self._pages[page][position]

    def check(self) -> None:
        """Compare all records of the file with their hash. Raises ``CheckpointError`` if they differ."""
        start = self._first * RECORD_SIZE
        if hash_file(self._path, start, start + self._count * RECORD_SIZE) != self._digest:
            self._damaged("its records differ from what was saved")

    def _read(self, start: int) -> list[FileRange]:
        count = min(_PAGE, self._count - start)
        try:
            with reading(self._path) as file:
                data = os.pread(file.fileno(), count * RECORD_SIZE, (self._first + start) * RECORD_SIZE)
        except OSError as error:
            refuse("FSDP-E472", self._path, f"cannot be read: {error.strerror}.")
        if len(data) < count * RECORD_SIZE:
            self._damaged("it ends too early")
        found = []
        at = 0 if start == 0 else None
        for low, high, name, digest in _RECORD.iter_unpack(data):
            if (at is not None and low != at) or low >= high or name >= len(self._names):
                self._damaged(f"the record of the bytes {low:,} to {high:,} is not valid")
            found.append(FileRange(start=low, stop=high, hash=digest.hex(), name=self._names[name]))
            at = high
        if start + count == self._count and at != self._size:
            self._damaged(f"its records end at byte {at:,} of {self._size:,}")
        return found

    def _damaged(self, how: str) -> None:
        refuse("FSDP-E464", self._path, f"is damaged: {how}.")


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
    return _text(m, {"version": 1, "files": [_file_tree(record) for record in m.files]})


def _with_block_file(m: Manifest) -> tuple[str, list[bytes]]:
    """Return the manifest as JSON, and the records of the files that have more than one range."""
    names: dict[str, int] = {}
    numbers: dict[int, Any] = {}
    packed, files = [], []
    first = 0
    for record in m.files:
        if len(record.ranges) < 2:
            files.append(_file_tree(record))
            continue
        data = _packed(record.ranges).packed(names, numbers)
        count = len(data) // RECORD_SIZE
        files.append({"path": record.path, "size": record.size, "blocks": [first, count], "hash": hash_bytes(data)})
        packed.append(data)
        first += count
    return _text(m, {"version": 2, "files": files, "num_blocks": first, "names": list(names)}), packed


def _text(m: Manifest, contents: Mapping[str, Any]) -> str:
    tree = _plain({each.name: getattr(m, each.name) for each in fields(m) if each.name != "files"})
    if not m.run:
        del tree["run"]
    tree |= {"format": FORMAT, "hash": HASH, **contents, "manifest_hash": ""}
    first = ("format", "version", "hash")
    last = ("parameters", "files", "manifest_hash")
    order = [*first, *(key for key in tree if key not in first + last), *last]
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {_by_line(key, tree[key])}" for key in order) + "\n}\n"
    return text.replace(hash_entry(""), hash_entry(hash_bytes(text.encode())))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``fsdp_manifest.json`` to ``folder``, atomically; before it ``fsdp_manifest.hashes`` if there are many."""
    if sum(len(record.ranges) for record in manifest.files) <= MAX_INLINE:
        write_text(folder / MANIFEST_NAME, to_text(manifest))
        return
    text, packed = _with_block_file(manifest)
    write_bytes(folder / BLOCK_FILE, *packed)
    write_text(folder / MANIFEST_NAME, text)


def record_file(root: Path, relative: str) -> FileRecord:
    """Return the record of a file without tensors: the whole file is one range."""
    path = root / relative
    size = path.stat().st_size
    whole = FileRange(start=0, stop=size, hash=hash_file(path, 0, size))
    return FileRecord(path=relative, size=size, ranges=(whole,) if size else ())


def hash_entry(digest: str) -> str:
    """Return the JSON member with the manifest's own hash, which is computed with an empty digest in it."""
    return f'"manifest_hash": "{digest}"'


def _plain(value: Any) -> Any:
    """Convert a value to the types that ``json.loads`` returns."""
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


def _by_line(key: str, value: Any) -> str:
    """Return the JSON of a field, with one line per file or parameter."""
    if key == "parameters" and value:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
        return "{\n" + lines + "\n  }"
    if key == "files" and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)
