"""The manifest of a checkpoint: its contents, its settings, and hashes of all bytes. It marks a finished checkpoint.

``fsdp_manifest.json`` is written last, after every file that it lists. ``docs/manifest.md`` is its specification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from hf_fsdp_plugin.checkpoint.errors import name_problem, raise_if_any, read_errors_as_problems, refuse
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading, read_file, without_collection, write_atomically
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind

MAX_RANGE = 1 << 20
"""Maximum size in bytes of a range of a file with tensors. It ends at a multiple of this number, or with its tensor.

A rank that needs a part of a range reads and hashes all of it: if 1,024 ranks read shards of 64 MiB that 8 ranks have
saved, they read each byte twice, and with ranges of 16 MiB 32 times.
"""


class FileRange(NamedTuple):
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
    """A file: its path relative to the checkpoint (with ``/``), its size in bytes, and the ranges that tile it.

    A file of an earlier version, whose hashes are not read, has no ranges.
    """

    path: str
    size: int
    ranges: Sequence[FileRange]


FORMAT = "hf_fsdp_plugin checkpoint"
VERSION = 1
HASH = "xxh3_128"
_WITH_HASH_FILE = 2
"""The version of manifests of earlier versions whose hashes are in ``fsdp_manifest.hashes``. They are not read."""

_BLOCK = 4 << 20
"""Bytes read at once: large enough for a disk, and small enough to be in the CPU cache when they are hashed."""


def hash_bytes(data: Any) -> str:
    """Return the xxh3_128 of contiguous bytes (bytes, memoryview, an array), in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path, start: int, stop: int) -> str:
    """Return the xxh3_128 of the bytes ``[start, stop)`` of a file. The GIL is released while they are read and hashed.

    Raises:
        CheckpointError: the file ends before ``stop``.
    """
    hasher, position = xxhash.xxh3_128(), start
    with open_for_reading(path, buffering=0) as file:
        file.seek(start)
        while position < stop and (block := file.read(min(_BLOCK, stop - position))):
            hasher.update(block)
            position += len(block)
    if position < stop:
        refuse("FSDP-E453", path, f"ends at byte {position:,}; expected {stop:,} bytes.")
    return hasher.hexdigest()


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
    """Return the manifest as JSON with its own hash.

    Numbers that JSON does not support (inf, nan) become text.
    """
    plain = {each.name: _plain(getattr(m, each.name)) for each in fields(m) if each.name != "files"}
    parameters = plain.pop("parameters")
    if not m.run:
        del plain["run"]
    files = [{"path": file.path, "size": file.size, "ranges": file.ranges} for file in m.files]
    tree = {"format": FORMAT, "version": VERSION, "hash": HASH, **plain}
    tree |= {"parameters": parameters, "files": files, "manifest_hash": ""}
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {_by_line(key, value)}" for key, value in tree.items()) + "\n}\n"
    return text.replace(_hash_entry(""), _hash_entry(hash_bytes(text.encode())))


def write_manifest(folder: Path, m: Manifest) -> None:
    """Write ``fsdp_manifest.json`` to ``folder``, atomically."""
    write_atomically(folder / MANIFEST_NAME, to_text(m))


def record_file(root: Path, relative: str) -> FileRecord:
    """Return the record of a file without tensors: the whole file is one range."""
    path = root / relative
    size = path.stat().st_size
    whole = FileRange(0, size, hash_file(path, 0, size))
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


def _by_line(key: str, value: Any) -> str:
    """Return the JSON of a field, with one line per file or parameter."""
    if key == "parameters" and value:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
        return "{\n" + lines + "\n  }"
    if key == "files" and value:
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


@without_collection()
def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint folder, or ``None`` if there is none.

    Raises:
        CheckpointError: the manifest is not JSON, is damaged, or has a later version; or it names a file outside of the
            folder.
    """
    path = folder / MANIFEST_NAME
    with read_errors_as_problems(path, "Check its permissions and the disk."):
        try:
            data = read_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    tree = _parse(path, data)
    try:
        manifest = _of_tree(tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        refuse("FSDP-E463", path, f"is not in the form of a manifest ({type(error).__name__}: {error}).")
    raise_if_any([found for file in manifest.files if (found := name_problem(file.path, path)) is not None])
    return manifest


def readable_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; ``None`` if it is missing or damaged."""
    with suppress(CheckpointError):
        return read_manifest(folder)
    return None


def _of_tree(tree: Mapping[str, Any]) -> Manifest:
    values = {each.name: tree[each.name] for each in fields(Manifest) if each.name != "run"}
    parameters = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tree["parameters"].items()}
    files = [
        FileRecord(
            path=file["path"],
            size=file["size"],
            # Tensors without elements have empty ranges in earlier versions.
            ranges=tuple(FileRange(*each) for each in file.get("ranges", ()) if each[0] < each[1]),
        )
        for file in tree["files"]
    ]
    values |= {"parameters": parameters, "files": tuple(files), "ties": tuple(map(tuple, tree["ties"]))}
    return Manifest(**values, run=tree.get("run", {}))


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object of the manifest. Raises ``CheckpointError`` if it is damaged or of an unknown version."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        refuse("FSDP-E463", path, f"is not valid JSON: {error}.")
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else tree
        refuse("FSDP-E463", path, f"is not a manifest: its format is {found!r:.60}, expected '{FORMAT}'.")
    version: Any = tree.get("version")
    if version not in (VERSION, _WITH_HASH_FILE) or tree.get("hash") != HASH:
        message = f"has manifest version {version!r:.60} and hash {tree.get('hash')!r:.60}; this hf_fsdp_plugin reads "
        fix = "Install the hf_fsdp_plugin that wrote the checkpoint, or a later one."
        refuse("FSDP-E465", path, f"{message}version {VERSION} with hash '{HASH}'.", fix)
    # The hash covers every byte, including whitespace.
    digest = tree.get("manifest_hash")
    if hash_bytes(data.replace(_hash_entry(str(digest)).encode(), _hash_entry("").encode())) != digest:
        refuse("FSDP-E464", path, "is damaged: its manifest_hash does not match its contents.")
    return tree
