"""The manifest of a checkpoint: its contents, its settings, and hashes of all bytes. It marks a finished checkpoint.

``fsdp_manifest.json`` is written last, after every file that it lists. ``docs/manifest.md`` is its specification. The
hashes of a large checkpoint are in a file of their own, a table with records of fixed size, of which a rank reads only
the records of the files that it reads. :func:`read_manifest` checks every field, and reports all problems at once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hf_fsdp_plugin.checkpoint import io
from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind

MAX_RANGE = 1 << 20
"""Maximum size in bytes of a range of a file with tensors. It ends at a multiple of this number, or with its tensor.

A rank that needs a part of a range reads and hashes all of it: if 1,024 ranks read shards of 64 MiB that 8 ranks have
saved, they read each byte twice, and with ranges of 16 MiB 32 times.
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


def _packed(ranges: Iterable[FileRange], names: dict[str, int]) -> bytes:
    """Return ranges as records. New names are added to ``names``, with their index."""
    return b"".join(
        _RECORD.pack(item.start, item.stop, names.setdefault(item.name, len(names)), bytes.fromhex(item.hash))
        for item in ranges
    )


class BlockTable(Sequence[FileRange]):
    """The ranges of one file of the checkpoint, whose records are read when they are needed.

    A range is created only when it is accessed.

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
        self._names = names
        self._path, self._first, self._count = path, first, count
        self._size, self._digest = size, digest

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]  # raises IndexError
        start, stop, name, digest = _RECORD.unpack_from(self._data, number * RECORD_SIZE)
        return FileRange(start=start, stop=stop, hash=digest.hex(), name=self._names[name])

    @cached_property
    def _data(self) -> bytes:
        try:
            data = io.read_range(self._path, self._first * RECORD_SIZE, self._count * RECORD_SIZE)
        except OSError as error:
            refuse("FSDP-E472", self._path, f"cannot be read: {error.strerror}.")
        if io.hash_bytes(data) != self._digest:
            self._damaged("its records differ from what was saved")
        at = 0
        for start, stop, name, _ in _RECORD.iter_unpack(data):
            if start != at or start >= stop or name >= len(self._names):
                self._damaged(f"the record of the bytes {start:,} to {stop:,} is not valid")
            at = stop
        if at != self._size:
            self._damaged(f"its records end at byte {at:,} of {self._size:,}")
        return data

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
        backend: ``fsdp1`` or ``fsdp2``; ``deepspeed`` if `hf-fsdp convert` wrote the checkpoint.
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

    kind: StateDictKind
    backend: str
    world_size: int
    mesh: dict[str, int]
    strategy: str
    step: int | None
    asynchronous: bool = False
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
        io.write_atomically(folder / MANIFEST_NAME, to_text(m))
        return
    names: dict[str, int] = {}
    packed, files, first = [], [], 0
    for record in m.files:
        if len(record.ranges) < 2:
            files.append(_file_tree(record))
            continue
        data = _packed([each for each in record.ranges if each.start < each.stop], names)
        count = len(data) // RECORD_SIZE
        files.append({"path": record.path, "size": record.size, "blocks": [first, count], "hash": io.hash_bytes(data)})
        packed.append(data)
        first += count
    io.write_atomically(folder / BLOCK_FILE, *packed)
    io.write_atomically(folder / MANIFEST_NAME, _text(m, 2, files, num_blocks=first, names=list(names)))


def _text(m: Manifest, version: int, files: list[Any], **more: Any) -> str:
    plain = {each.name: _plain(getattr(m, each.name)) for each in fields(m) if each.name != "files"}
    parameters = plain.pop("parameters")
    if not m.run:
        del plain["run"]
    tree = {"format": FORMAT, "version": version, "hash": io.HASH, **plain, **more}
    tree |= {"parameters": parameters, "files": files, "manifest_hash": ""}
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {_by_line(key, value)}" for key, value in tree.items()) + "\n}\n"
    return text.replace(_hash_entry(""), _hash_entry(io.hash_bytes(text.encode())))


def record_file(root: Path, relative: str) -> FileRecord:
    """Return the record of a file without tensors: the whole file is one range."""
    path = root / relative
    size = path.stat().st_size
    whole = FileRange(start=0, stop=size, hash=io.hash_file(path, 0, size))
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
"""Characters that a path in a manifest does not contain. File systems do not accept surrogates."""


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint folder, or ``None`` if there is none.

    Raises:
        CheckpointError: the manifest is not JSON, is damaged, or has a later version; with all problems of its fields:
            values of another type; with all problems of its files: outside the folder, or not tiled by ranges; or with
            all symbolic links that lead to a file.
    """
    path = folder / MANIFEST_NAME
    if _is_foreign_link(folder, path):
        refuse("FSDP-E456", path, "is a symbolic link.", _NO_LINKS)
    try:
        data = io.read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        refuse("FSDP-E472", path, f"cannot be read: {error.strerror}.", "Check its permissions and the disk.")
    reader = _Reader(path)
    tree = {"num_blocks": 0, "names": [], "run": {}, **_parse(path, data)}
    kinds = get_type_hints(Manifest) | {
        "files": tuple[dict[str, Any], ...],
        "num_blocks": int,
        "names": tuple[str, ...],
    }
    values = {key: reader.value(kind, tree.get(key), key) for key, kind in kinds.items()}
    if values["world_size"] == 0:
        reader.report("world_size", 0, "an integer of at least 1")
    if values["files"] == ():
        reader.report("files", [], "at least one file")
    raise_if_any(reader.problems)
    num_blocks, names = values.pop("num_blocks"), values.pop("names")
    _check_files(reader, folder, values["files"], num_blocks)
    raise_if_any(reader.problems)
    return Manifest(**{**values, "files": tuple(_record(folder, file, names) for file in values["files"])})


def readable_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; ``None`` if it is missing or damaged."""
    with suppress(CheckpointError):
        return read_manifest(folder)
    return None


def _record(folder: Path, file: Mapping[str, Any], names: Sequence[str]) -> FileRecord:
    """Return the record of a file whose fields have been checked."""
    ranges: Sequence[FileRange]
    if "ranges" in file:
        # Tensors without elements have empty ranges, which may be anywhere in the file.
        filled = [piece for piece in file["ranges"] if piece[0] < piece[1]]
        ranges = tuple(FileRange(start=low, stop=high, hash=digest, name=name) for low, high, digest, name in filled)
    else:
        path, (first, count) = folder / BLOCK_FILE, file["blocks"]
        ranges = BlockTable(path, first, count, size=file["size"], digest=file["hash"], names=names)
    return FileRecord(path=file["path"], size=file["size"], ranges=ranges)


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object of the manifest. Raises ``CheckpointError`` if it is damaged or of an unknown version."""
    try:
        tree = io.parse_json(data, only_finite=True)
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
    # The hash covers every byte, including whitespace.
    digest = tree.get("manifest_hash")
    if io.hash_bytes(data.replace(_hash_entry(str(digest)).encode(), _hash_entry("").encode())) != digest:
        refuse("FSDP-E464", path, "is damaged: its manifest_hash does not match its contents.")
    if not is_number or version < 1 or tree.get("hash") != io.HASH:
        found = f"version {_shown(version)} and hash {_shown(tree.get('hash'))}"
        refuse("FSDP-E465", path, f"has {found}; expected version 1 to {VERSION} and hash '{io.HASH}'.")
    return tree


class _Reader:
    """Converts JSON values to the types of fields, and collects all problems."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problems: list[Problem] = []

    def report(self, place: str, value: Any, expected: str, code: str = "FSDP-E463") -> None:
        message = f"{place} is {_shown(value)}, expected {expected}."
        self.problems.append(problem(code, self._path, message, COPY_AGAIN))

    def value(self, kind: Any, value: Any, place: str) -> Any:
        """Return a JSON value as an object of this type; a value of another type unchanged. Numbers are not negative.

        Args:
            kind: a type without classes of this package: ``dict[str, tuple[int, ...]]``.
            place: path of the value in the manifest.
        """
        origin, inner = _parts_of(kind)
        if origin is UnionType:  # the other type is that of None
            return None if value is None else self.value(inner[0], value, place)
        if origin is Literal:
            is_valid, expected = value in inner, f"one of {', '.join(inner)}"
        elif origin is int:
            is_valid, expected = type(value) is int and value >= 0, "an integer of at least 0"
        elif origin is tuple and inner[-1] is not ...:
            is_valid, expected = isinstance(value, list) and len(value) == len(inner), f"{len(inner)} values in a list"
        else:
            is_valid, expected = isinstance(value, list if origin is tuple else origin), _EXPECTED[origin]
        if not is_valid:
            self.report(place, value, expected)
        elif origin is dict and inner[1] is not Any:
            return {key: self.value(inner[1], item, f"{place}.{key}") for key, item in value.items()}
        elif origin is tuple:
            kinds = inner[:1] * len(value) if inner[-1] is ... else inner
            items = enumerate(zip(kinds, value, strict=True))
            return tuple(self.value(each, item, f"{place}[{position}]") for position, (each, item) in items)
        return value


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the class of a type, and its arguments."""
    return get_origin(kind) or kind, get_args(kind)


_EXPECTED = {str: "a string", bool: "true or false", dict: "an object", tuple: "a list"}


def _is_range(value: Any) -> bool:
    match value:
        case [int(), int(), str(digest), str()]:
            return len(digest) == 32
    return False


def _is_path(path: str) -> bool:
    """Whether a path is in normal form and inside the checkpoint."""
    if path in (MANIFEST_NAME, BLOCK_FILE) or _FORBIDDEN.search(path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def _check_files(reader: _Reader, folder: Path, files: Sequence[dict[str, Any]], num_blocks: int) -> None:
    """Report the files of the manifest that are not valid, and symbolic links that lead to a file."""
    seen: set[str] = set()
    for position, file in enumerate(files):
        place = f"files[{position}]"
        path = reader.value(str, file.get("path"), f"{place}.path")
        size = reader.value(int, file.get("size"), f"{place}.size")
        if not isinstance(path, str):
            continue
        if not _is_path(path):
            reader.report(f"{place}.path", path, "the path of a file inside the checkpoint", "FSDP-E456")
        elif path in seen:
            reader.report(f"{place}.path", path, "each file once")
        else:
            seen.add(path)
        if num_blocks and "ranges" not in file:
            match file.get("blocks"), file.get("hash"):
                case [int(first), int(count)], str() if 0 <= first <= first + count <= num_blocks:
                    continue
            expected = f"the first and the number of {num_blocks} records"
            reader.report(f"{place}.blocks", file.get("blocks"), expected)
        elif not isinstance(ranges := file.get("ranges"), list) or not all(map(_is_range, ranges)):
            reader.report(f"{place}.ranges", ranges, "a list of ranges: start, stop, hash and name")
        else:
            filled = [[start, stop] for start, stop, *_ in ranges if start != stop]
            ends, starts = [0, *(stop for _, stop in filled)], [*(start for start, _ in filled), size]
            if ends != starts or any(start > stop for start, stop in filled):
                reader.report(f"{place}.ranges", filled, f"contiguous ranges from 0 to {size}")
    raise_if_any(reader.problems)
    reader.problems += _link_problems(folder, [*seen, BLOCK_FILE] if num_blocks else seen)
    blocks, expected_size = folder / BLOCK_FILE, num_blocks * RECORD_SIZE
    if num_blocks and not blocks.is_file():
        reader.problems.append(problem("FSDP-E457", blocks, "is missing; it contained the hashes.", COPY_AGAIN))
    elif num_blocks and (num_bytes := blocks.stat().st_size) != expected_size:
        message = f"has {num_bytes:,} bytes; {expected_size:,} were saved."
        reader.problems.append(problem("FSDP-E470", blocks, message, COPY_AGAIN))


def _link_problems(folder: Path, files: Iterable[str]) -> Iterator[Problem]:
    """Yield an error for each symbolic link in the path of a file, which could lead out of the checkpoint.

    A folder is read once: all ranks read the manifest, and the files are several for each rank.
    """
    by_folder: dict[str, set[str]] = {}
    for path in files:
        while path:
            above, _, name = path.rpartition("/")
            by_folder.setdefault(above, set()).add(name)
            path = above
    for above, names in by_folder.items():
        try:
            with os.scandir(folder / above) as entries:
                links = [entry.name for entry in entries if entry.name in names and entry.is_symlink()]
        except OSError:
            links = sorted(names)
        for place in (folder / above / name for name in links):
            if _is_foreign_link(folder, place):
                message = "is a symbolic link in the path of a file of the manifest."
                yield problem("FSDP-E456", place, message, _NO_LINKS)


def _is_foreign_link(folder: Path, place: Path) -> bool:
    """Whether a path is a symbolic link, except links of the Hugging Face cache from a snapshot to its blobs."""
    if not place.is_symlink():
        return False
    snapshots = folder.resolve().parent
    return snapshots.name != "snapshots" or not place.resolve().is_relative_to(snapshots.parent / "blobs")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
