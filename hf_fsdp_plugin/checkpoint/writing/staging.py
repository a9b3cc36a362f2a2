"""A checkpoint comes to be in a folder beside its place and is renamed into it: it exists whole or not at all.

::

    run/.checkpoint-20.saving/checkpoint-20/      what the ranks and the host write
    run/.checkpoint-20.saving/parts/rank0.json    what rank 0 has written, there when all of it is synced
    run/.checkpoint-20.saving/parts/rank0.failed  instead of it, why there is none
    run/checkpoint-20/                            after the rename
    run/.checkpoint-20.replaced/                  for an instant, the folder that stood there before
    run/.checkpoint-10.removed.saving/            for an instant, one that is being removed

The parts are files, not messages: a save that goes on in the background must not mix with training's collectives.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord, Manifest, record_file, to_text
from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest
from hf_fsdp_plugin.checkpoint.io import sync, write_text
from hf_fsdp_plugin.checkpoint.names import CHECKPOINT_STEMS, MANIFEST_NAME, REPLACED, SAVING, hidden
from hf_fsdp_plugin.checkpoint.writing.dcp import Chunk, DcpPart, Small, last_files
from hf_fsdp_plugin.checkpoint.writing.failures import in_words
from hf_fsdp_plugin.checkpoint.writing.write import write_live
from hf_fsdp_plugin.problems import CheckpointError, Problem


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has written and synced."""

    files: tuple[FileRecord, ...]
    dcp: tuple[DcpPart, ...]


class Staging:
    """The folder in which one checkpoint comes to be.

    Attributes:
        final: where it is going to be.
        folder: where it is written.
    """

    def __init__(self, final: Path, *, into: bool = False) -> None:
        """``into``: the files are moved into ``final``, beside what is there, instead of replacing it."""
        # What a link stands for is replaced, not the link.
        self.final = final = final.resolve() if final.is_symlink() else final
        self._into = into
        # A folder that files are moved into exists, and may be the only place where we may write.
        self.root = final / SAVING if into else hidden(final, SAVING)
        self.folder = self.root / final.name
        self._parts = self.root / "parts"

    def open(self) -> None:
        """Collective: an empty folder, seen by all ranks."""
        try:
            self._make()
        except CheckpointError:
            if dist.get_rank() == 0:
                self.discard()
            raise

    def _make(self) -> None:
        with on_all_ranks(f"preparing {self.root}"), in_words(self.final):
            if dist.get_rank() == 0:
                if self.final.exists() and not self.final.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name")
                settle(self.final)
                shutil.rmtree(self.root, ignore_errors=True)
                self.folder.mkdir(parents=True)
                self._parts.mkdir()
        with on_all_ranks(f"preparing {self.root}"):
            if not self.folder.is_dir():
                raise CheckpointError([_not_shared(self.folder)])

    def discard(self) -> None:
        """By rank 0, when no rank writes any more."""
        shutil.rmtree(self.root, ignore_errors=True)

    def newest(self) -> int:
        """When a file was last written to, in nanoseconds; 0 where there is none. By any rank."""
        times = [0]
        with suppress(OSError):  # it may be renamed under our eyes
            times += [path.stat().st_mtime_ns for path in self.root.rglob("*")]
        return max(times)

    def put_part(self, rank: int, part: RankPart) -> None:
        write_text(self._parts / f"rank{rank}.json", json.dumps(asdict(part), default=_bytes_to_text))

    def put_failure(self, rank: int, text: str) -> None:
        """So that rank 0 does not wait for the part; if there is no room even for this, it has to."""
        write_text(self._parts / f"rank{rank}.failed", text)

    def failures(self) -> dict[int, str]:
        """What went wrong, by rank."""
        return {
            int(path.stem.removeprefix("rank")): path.read_text(encoding="utf-8")
            for path in sorted(self._parts.glob("*.failed"))
        }

    def parts(self, world_size: int) -> list[RankPart] | None:
        """All ranks' parts, in rank order; ``None`` as long as one is missing."""
        paths = [self._parts / f"rank{rank}.json" for rank in range(world_size)]
        if not all(path.exists() for path in paths):
            return None
        return [_read_part(path) for path in paths]

    def commit(self, parts: Sequence[RankPart], manifest: Manifest) -> None:
        """By rank 0, when all ranks have put their parts: write what is left, sync all, rename.

        Args:
            manifest: with everything but the files.
        """
        written = [record for part in parts for record in part.files]
        for folder in dict.fromkeys(dcp.folder for part in parts for dcp in part.dcp):
            dcps = [dcp for part in parts for dcp in part.dcp if dcp.folder == folder]
            written += write_live(self.folder, last_files(folder, dcps))
        records = joined(written)
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder).as_posix()
            if path.is_file() and relative not in records:
                sync(path)
                records[relative] = record_file(self.folder, relative)
        manifest = replace(manifest, files=tuple(records[path] for path in sorted(records)))
        write_text(self.folder / MANIFEST_NAME, to_text(manifest))
        for folder_path in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            sync(folder_path)
        _move_into(self.folder, self.final) if self._into else _put_in_place(self.folder, self.final)
        sync(self.final.parent)
        self.discard()


def settle(final: Path) -> None:
    """Undo a replacement that was cut off between its two renames, or end one that was cut off behind them."""
    before = _replaced(final)
    if before.is_dir():
        if final.exists():
            _clear_away(before, final)
        else:
            before.rename(final)


def settle_all(run: Path, prefix: str) -> None:
    """:func:`settle` every checkpoint of a run, and remove what saves that were cut off have left."""
    for path in run.glob(f".{prefix}*{REPLACED}"):
        settle(run / path.name.removeprefix(".").removesuffix(REPLACED))
    for path in run.glob(f".{prefix}*{SAVING}"):
        shutil.rmtree(path, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """A checkpoint goes as it has come, at once: while its files go, it has the name of a staging folder."""
    remains = checkpoint.with_name(f".{checkpoint.name.removeprefix('.')}.removed{SAVING}")
    shutil.rmtree(remains, ignore_errors=True)
    checkpoint.rename(remains)
    shutil.rmtree(remains, ignore_errors=True)


def joined(written: Sequence[FileRecord]) -> dict[str, FileRecord]:
    """One record a file, for files that several ranks have written parts of."""
    ranges: dict[str, list[FileRange]] = {}
    for record in written:
        ranges.setdefault(record.path, []).extend(record.ranges)
    sizes = {record.path: record.size for record in written}
    return {
        path: FileRecord(path=path, size=sizes[path], ranges=tuple(sorted(found, key=lambda item: item.start)))
        for path, found in ranges.items()
    }


def _replaced(final: Path) -> Path:
    """Where the folder goes that stands in the place of a new checkpoint."""
    return hidden(final, REPLACED)


def _put_in_place(folder: Path, final: Path) -> None:
    if not final.exists():
        folder.rename(final)
        return
    before = _replaced(final)
    final.rename(before)
    try:
        folder.rename(final)
    except OSError:
        before.rename(final)
        raise
    _clear_away(before, final)


def _clear_away(before: Path, final: Path) -> None:
    """Of a folder that was replaced, the user's files go to ``final``, and the rest goes."""
    for relative in _not_the_checkpoint(before):
        target = final / relative
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (before / relative).rename(target)
    remove(before)


def _not_the_checkpoint(folder: Path) -> list[Path]:
    """Files in a folder that is to be replaced that no checkpoint put there."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        manifest = None
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    if manifest is not None:
        listed = {record.path for record in manifest.files} | {MANIFEST_NAME}
        return [path for path in files if path.as_posix() not in listed]
    return [path for path in files if not path.parts[0].startswith(CHECKPOINT_STEMS)]


def _move_into(folder: Path, final: Path) -> None:
    """File by file, the manifest last; what an earlier manifest lists and this one does not is stale and goes."""
    final.mkdir(parents=True, exist_ok=True)
    try:
        before = read_manifest(final)
    except CheckpointError:
        before = None
    (final / MANIFEST_NAME).unlink(missing_ok=True)
    new = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for relative in sorted(new, key=lambda path: path.name == MANIFEST_NAME):
        (final / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).replace(final / relative)
    for record in before.files if before is not None else ():
        if Path(record.path) not in new:
            (final / record.path).unlink(missing_ok=True)
    sync(final)


def _read_part(path: Path) -> RankPart:
    tree = json.loads(path.read_text(encoding="utf-8"))
    files = [
        FileRecord(path=f["path"], size=f["size"], ranges=tuple(FileRange(**r) for r in f["ranges"]))
        for f in tree["files"]
    ]
    return RankPart(tuple(files), tuple(_read_dcp(dcp) for dcp in tree["dcp"]))


def _read_dcp(tree: dict[str, Any]) -> DcpPart:
    chunks = [
        Chunk(
            path=tuple(c["path"]), dtype=c["dtype"], shape=tuple(c["shape"]), offsets=tuple(c["offsets"]),
            sizes=tuple(c["sizes"]), file=c["file"], offset=c["offset"], length=c["length"],
        )
        for c in tree["chunks"]
    ]  # fmt: skip
    smalls = [Small(tuple(s["path"]), bytes.fromhex(s["data"]), s["dtype"], tuple(s["shape"])) for s in tree["smalls"]]
    aliases = [(tuple(alias), tuple(path)) for alias, path in tree["aliases"]]
    return DcpPart(tree["folder"], chunks, smalls, aliases)


def _bytes_to_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def _not_shared(folder: Path) -> Problem:
    return Problem(
        severity="error",
        message=f"rank 0 has made {folder}, and this rank does not see it: the ranks' file systems are not one.",
        fix="Save to a folder that all machines share.",
    )
