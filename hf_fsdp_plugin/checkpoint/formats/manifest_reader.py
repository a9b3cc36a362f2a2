"""The reader of manifests: checks every field, and reports all problems at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.manifest import (
    FORMAT,
    RECORD_SIZE,
    VERSION,
    BlockTable,
    FileRange,
    FileRecord,
    Manifest,
    hash_entry,
)
from hf_fsdp_plugin.checkpoint.io import HASH, hash_bytes, parse_json, read_file
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind

_NO_LINKS = "Copy the checkpoint with its links resolved (cp -rL), and use the copy."

_FORBIDDEN = re.compile("[\\\\\0\ud800-\udfff]")

_T = TypeVar("_T")
_EXPECTED: Mapping[type, str] = {str: "a string", bool: "true or false", dict: "an object", list: "a list"}


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
    reader = _Reader(path)
    manifest = reader.manifest(tree)
    for record in manifest.files:
        reader.check_links(folder, record.path)
    if reader.num_blocks:
        reader.check_block_file(folder)
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
    version = tree.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        message = f"has manifest version {version}, but this hf_fsdp_plugin reads manifest versions up to {VERSION}."
        refuse("FSDP-E465", path, message, "Install the hf_fsdp_plugin that wrote the checkpoint, or a later one.")
    if not _hash_matches(data, tree.get("manifest_hash")):
        refuse("FSDP-E464", path, "is damaged: its manifest_hash does not match its contents.")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1 or tree.get("hash") != HASH:
        found = f"version {_shown(version)} and hash {_shown(tree.get('hash'))}"
        refuse("FSDP-E465", path, f"has {found}; expected version 1 to {VERSION} and hash '{HASH}'.")
    return tree


def _hash_matches(data: bytes, digest: Any) -> bool:
    """Whether ``data`` with an empty digest has this hash. The hash covers every byte, including whitespace."""
    return hash_bytes(data.replace(hash_entry(str(digest)).encode(), hash_entry("").encode())) == digest


class _Reader:
    """Converts JSON values to typed ones, and collects all problems."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self._links: dict[str, frozenset[str] | None] = {}
        self.num_blocks = 0
        self.block_names: tuple[str, ...] = ()

    def manifest(self, tree: Mapping[str, Any]) -> Manifest:
        step = tree.get("step")
        kind = self.field(tree, "kind", str)
        if kind not in get_args(StateDictKind):
            self.report("kind", kind, "one of " + ", ".join(get_args(StateDictKind)))
        if tree["version"] > 1:
            self.num_blocks = self.count(tree.get("num_blocks"), "num_blocks")
            self.block_names = self.names(tree.get("names"), "names")
        return Manifest(
            kind=kind,
            backend=self.field(tree, "backend", str),
            world_size=self.count(tree.get("world_size"), "world_size", minimum=1),
            mesh={axis: self.count(size, f"mesh.{axis}") for axis, size in self.field(tree, "mesh", dict).items()},
            strategy=self.field(tree, "strategy", str),
            step=None if step is None else self.count(step, "step"),
            asynchronous=self.field(tree, "asynchronous", bool),
            created=self.field(tree, "created", str),
            versions={name: str(version) for name, version in self.field(tree, "versions", dict).items()},
            settings=self.field(tree, "settings", dict),
            parameters=self.parameters(self.field(tree, "parameters", dict)),
            ties=tuple(self.names(tie, "ties") for tie in self.field(tree, "ties", list)),
            files=self.files(self.field(tree, "files", list)),
            batch=self.field(tree, "batch", dict),
            run=self.field(tree, "run", dict) if "run" in tree else {},
        )

    def report(self, place: str, value: Any, expected: str) -> None:
        message = f"{place} is {_shown(value)}, expected {expected}."
        self.problems.append(problem("FSDP-E463", self.path, message, COPY_AGAIN))

    def field(self, tree: Mapping[str, Any], key: str, kind: type[_T], place: str = "") -> _T:
        """Return a field of the type ``kind``; an empty value of this type if the field has another type."""
        value = tree.get(key)
        if not isinstance(value, kind):
            self.report(place + key, value, _EXPECTED[kind])
            return kind()
        return value

    def count(self, value: Any, place: str, minimum: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.report(place, value, f"an integer of at least {minimum}")
            return minimum
        return value

    def names(self, value: Any, place: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.report(place, value, "a list of names")
            return ()
        return tuple(value)

    def parameters(self, table: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        found = {}
        for name, value in table.items():
            match value:
                case [str(dtype), list(shape)]:
                    found[name] = (dtype, tuple(self.count(size, f"parameters.{name}") for size in shape))
                case _:
                    self.report(f"parameters.{name}", value, "a dtype and a shape")
        return found

    def files(self, values: list[Any]) -> tuple[FileRecord, ...]:
        records: dict[str, FileRecord] = {}
        for position, value in enumerate(values):
            place = f"files[{position}]"
            if not isinstance(value, dict):
                self.report(place, value, "an object")
                continue
            path = self.relative(value.get("path"), place)
            if path in records:
                self.report(f"{place}.path", path, "each file once")
            size = self.count(value.get("size"), f"{place}.size")
            ranges: Sequence[FileRange]
            if self.num_blocks and "ranges" not in value:
                ranges = self.blocks(value, size, place)
            else:
                ranges = self.ranges(self.field(value, "ranges", list, f"{place}."), size, place)
            records[path] = FileRecord(path=path, size=size, ranges=ranges)
        return tuple(records.values())

    def blocks(self, value: Mapping[str, Any], size: int, place: str) -> Sequence[FileRange]:
        match value.get("blocks"), value.get("hash"):
            case [int(first), int(count)], str(digest) if 0 <= first <= first + count <= self.num_blocks:
                path = self.path.with_name(BLOCK_FILE)
                return BlockTable(path, first, count, size=size, digest=digest, names=self.block_names)
        self.report(f"{place}.blocks", value.get("blocks"), f"the first and the number of {self.num_blocks} records")
        return ()

    def check_block_file(self, folder: Path) -> None:
        """Report a file of hashes that is missing, is a link or has another size."""
        path = folder / BLOCK_FILE
        self.check_links(folder, BLOCK_FILE)
        expected = self.num_blocks * RECORD_SIZE
        if not path.is_file():
            self.problems.append(problem("FSDP-E457", path, "is missing; it contained the hashes.", COPY_AGAIN))
        elif path.stat().st_size != expected:
            message = f"has {path.stat().st_size:,} bytes; {expected:,} were saved."
            self.problems.append(problem("FSDP-E470", path, message, COPY_AGAIN))

    def ranges(self, values: list[Any], size: int, place: str) -> tuple[FileRange, ...]:
        ranges = []
        for value in values:
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

    def relative(self, value: Any, place: str) -> str:
        if not isinstance(value, str):
            self.report(f"{place}.path", value, "a string")
        elif not _is_inside(value):
            message = f"{place}.path is {_shown(value)}, which is not the path of a file inside the checkpoint."
            self.problems.append(problem("FSDP-E456", self.path, message, COPY_AGAIN))
        return str(value)

    def check_links(self, folder: Path, relative: str) -> None:
        """Report a symbolic link in the path of a file, which could lead out of the checkpoint."""
        # A folder is read once: all ranks read the manifest, and the files are several for each rank.
        above = str(folder)
        for part in relative.split("/"):
            if above not in self._links:
                self._links[above] = _links_in(above)
            place = f"{above}/{part}"
            links = self._links[above]
            if (links is None or part in links) and _is_foreign_link(folder, Path(place)):
                message = "is a symbolic link in the path of a file of the manifest."
                self.problems.append(problem("FSDP-E456", place, message, _NO_LINKS))
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
