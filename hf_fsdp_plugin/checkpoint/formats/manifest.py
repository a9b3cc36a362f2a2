"""The manifest of a checkpoint: its contents, its settings, and hashes of all bytes. It marks a finished checkpoint.

``fsdp_manifest.json`` is written last, after every file that it lists. ``docs/manifest.md`` is its specification.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats import block_file
from hf_fsdp_plugin.checkpoint.formats.hashing import HASH, hash_bytes, hash_file
from hf_fsdp_plugin.checkpoint.formats.ranges import FileRange, FileRecord
from hf_fsdp_plugin.checkpoint.io import write_bytes, write_text
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME

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
        if isinstance(record.ranges, block_file.PackedRanges):  # of a rank: with many ranks, no loop over ranges
            data = record.ranges.packed(names, numbers)
        else:
            data = block_file.pack(record.ranges, names)
        count = len(data) // block_file.RECORD_SIZE
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
