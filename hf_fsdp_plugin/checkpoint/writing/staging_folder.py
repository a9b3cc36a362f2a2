"""The folder in which a checkpoint is written until its commit, and the records of the ranks in it.

A checkpoint is written to a hidden folder, which the commit renames::

    run/.checkpoint-20.saving/checkpoint-20/      files of the ranks, of Accelerate and of Transformers
    run/.checkpoint-20.saving/parts/rank0.record  record of what rank 0 has written, once all of it is synced
    run/.checkpoint-20.saving/parts/rank0.failed  the error of rank 0, if it could not write its part
    run/checkpoint-20/                            after the rename
    run/.checkpoint-20.replaced/                  during the commit, the folder that had this name before
    run/.checkpoint-10.removed.saving/            a checkpoint during its removal

For code that computes the path of the checkpoint itself, ``run/checkpoint-20`` is a link to it until the rename.

For a checkpoint that is committed in a storage, each rank has a folder on its machine's disk, also if several ranks
have one disk. It uploads its files and then its record, and removes the folder. When rank 0 finds the records of all
ranks in the storage, it uploads the files that need all of them, the manifest and the marker. An error of an upload is
a warning: the training goes on.

Ranks communicate through files, because collectives of a background save would interleave with collectives of training.
"""

from __future__ import annotations

import errno
import hmac
import pickle
import secrets
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint import folders
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems, refuse
from hf_fsdp_plugin.checkpoint.file_io import sync, without_collection, write_atomically
from hf_fsdp_plugin.checkpoint.formats import manifest as manifests
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME, SAVING, accelerate_rng_file, hidden_path, trainer_rng_file
from hf_fsdp_plugin.checkpoint.storage import PARTS, Storage
from hf_fsdp_plugin.checkpoint.writing.dcp_files import FolderEntries, complete_folders
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The files that one rank has written and synced, and the entries in them. Pickled for rank 0 of the same run."""

    files: tuple[manifests.FileRecord, ...]
    entries: tuple[FolderEntries, ...]


class StagingFolder:
    """The folder in which one checkpoint is written until its commit.

    Attributes:
        final: path of the checkpoint after the commit.
        folder: path of the checkpoint until then.
        root: path of the staging folder itself.
    """

    is_shared = True
    """Whether all ranks write to this folder."""
    poll_interval = 0.02
    """Seconds between checks for the records of other ranks."""

    def __init__(self, final: Path, *, into: bool = False, linked: bool = False, suffix: str = SAVING) -> None:
        """
        Args:
            into: add the files to the folder ``final`` instead of replacing it.
            linked: ``final`` is a link to the folder until the commit.
            suffix: suffix of the root.
        """
        self.abandoned = threading.Event()  # set when a rank has failed
        # The target of a user's link is replaced, not the link.
        is_users = final.is_symlink() and not folders.is_staging_link(final)
        self.final = final = final.resolve() if is_users else final
        self._into, self._linked = into, linked
        # With ``into``, the folder exists, and its parent may not be writable.
        self.root = final / suffix if into else hidden_path(final, suffix)
        self.folder = self.root / final.name
        self._records = self.root / "parts"

    def create(self) -> None:
        """Create the folder, empty, and check that all ranks see it. Collective."""
        try:
            with on_all_ranks(f"preparing {self.root}"), os_errors_as_problems(self.final):
                if dist.get_rank() == 0:
                    self._create()
            with on_all_ranks(f"preparing {self.root}"):
                folders.check_visible(self.folder, "created")
                if self._linked:
                    folders.check_visible(self.final, "created")
        except CheckpointError:
            if dist.get_rank() == 0:
                self.discard()
            raise

    def _create(self) -> None:
        if self.final.exists() and not self.final.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file of that name exists")
        folders.recover_interrupted_commit(self.final)
        shutil.rmtree(self.root, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._records.mkdir()
        if self._linked:
            folders.link_staging(self.final)

    def discard(self) -> None:
        """Remove the folder. Called by rank 0 after all ranks have stopped writing."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._linked:
            folders.restore_replaced(self.final)

    def report(self, error: CheckpointError) -> NoReturn:
        """Raise the error of a save in the background."""
        raise error

    def write_record(self, rank: int, record: RankRecord) -> None:
        """Write the record of a rank, with the files that only this rank has written for the Trainer or Accelerate."""
        own = [name for name in (trainer_rng_file(rank), accelerate_rng_file(rank)) if (self.folder / name).is_file()]
        record = replace(record, files=(*record.files, *(_synced(self.folder, name) for name in own)))
        write_atomically(self._record_path(rank), pickle.dumps(record))

    def _record_path(self, rank: int) -> Path:
        return self._records / f"rank{rank}.record"

    def write_failure(self, rank: int, text: str) -> None:
        """Write the error of a rank instead of its record. If this fails too, rank 0 stops waiting at the next poll."""
        write_atomically(self._records / f"rank{rank}.failed", text)

    def read_failures(self) -> dict[int, str]:
        """Return the errors that ranks have written, by rank.

        Reads the whole folder: then clients of NFS also see records that did not exist when they asked for them.
        """
        return {
            int(path.stem.removeprefix("rank")): path.read_text(encoding="utf-8")
            for path in sorted(self._records.glob("*.failed"))
        }

    def missing_record(self, first: int, world_size: int) -> int:
        """Return the first rank from ``first`` on that has not written its record; ``world_size`` if all have."""
        return next((rank for rank in range(first, world_size) if not self._record_path(rank).exists()), world_size)

    @without_collection()
    def read_records(self, world_size: int) -> list[RankRecord]:
        """Return the records of all ranks, in rank order."""
        return [pickle.loads(self._record_path(rank).read_bytes()) for rank in range(world_size)]

    def commit(self, ranks: Sequence[RankRecord], manifest: manifests.Manifest) -> None:
        """Complete the checkpoint, sync it and rename it. Called by rank 0 when all ranks have written their records.

        A power failure between two steps leaves the folder that was there before, or the new one.

        Args:
            manifest: the manifest, complete except for ``files``.
        """
        complete_checkpoint(self.folder, ranks, manifest)
        # Rename the folder; one that is there is renamed before, and deleted afterwards.
        if self._into:
            folders.move_files(self.folder, self.final)
        elif (replaced := folders.put_in_place(self.folder, self.final)) is not None:
            folders.remove_replaced(replaced, self.final)
        self.discard()


def complete_checkpoint(folder: Path, ranks: Sequence[RankRecord], manifest: manifests.Manifest) -> None:
    """Write the files of a checkpoint that need the records of all ranks, and sync everything.

    Args:
        manifest: the manifest, complete except for ``files``.
    """
    # 1. The files that need the entries of all ranks.
    written = [file for record in ranks for file in record.files]
    written += complete_folders(folder, [record.entries for record in ranks])
    parts_of: dict[str, list[manifests.FileRecord]] = {}  # of a file, several ranks may have written parts
    for file in written:
        parts_of.setdefault(file.path, []).append(file)
    records = {
        path: replace(parts[0], ranges=sorted(each for part in parts for each in part.ranges))
        for path, parts in parts_of.items()
    }
    # 2. Files that others have written, such as the state of the Trainer: sync and hash them.
    (folder / MANIFEST_NAME).unlink(missing_ok=True)  # of a model that was saved to this folder
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if relative not in records and path.is_file():
            records[relative] = _synced(folder, relative)
    # 3. The manifest names all of them. Then the names in the folders are synced.
    manifests.write_manifest(folder, replace(manifest, files=tuple(records[path] for path in sorted(records))))
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(inner)


def _synced(folder: Path, relative: str) -> manifests.FileRecord:
    sync(folder / relative)
    return manifests.record_file(folder, relative)


class StoredStaging(StagingFolder):
    """The staging folder of this rank.

    Args:
        storage: where the checkpoint is committed.
        owner: the token with which this run has claimed the storage.
    """

    is_shared, poll_interval = False, 1.0

    def __init__(self, final: Path, storage: Storage, owner: str) -> None:
        self._rank = dist.get_rank()
        super().__init__(final, suffix=f".rank{self._rank}{SAVING}")
        self._storage, self._owner = storage, owner
        self._files, self._key = "", b""
        self._uploaded: set[str] = set()

    def create(self) -> None:
        """Create the folder of each rank, and agree on a name and a key of the save. Collective."""
        with on_all_ranks(f"preparing {self.root}"), os_errors_as_problems(self.final):
            for interrupted in self.final.parent.glob(f".*.rank{self._rank}{SAVING}"):
                shutil.rmtree(interrupted, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._files, self._key = broadcast_object((secrets.token_hex(8), secrets.token_bytes(32)))

    @property
    def _stored(self) -> str:
        return f"{self.final.name}/{self._files}"

    def discard(self) -> None:
        """Remove the folder of this rank. What it has uploaded is removed at the next commit."""
        shutil.rmtree(self.root, ignore_errors=True)

    def report(self, error: CheckpointError) -> None:  # type: ignore[override]
        """Warn of the error of a save: the training goes on."""
        for problem in error.problems[:1]:
            message = f"{self.final.name} was not stored in {self._storage.url}. {problem.message}"
            fix = f"{problem.fix} The training goes on, and earlier checkpoints are unchanged."
            print_once(Problem(code="FSDP-W428", message=message, fix=fix, rank=problem.rank))

    def _upload(self) -> None:
        """Upload the files that were not uploaded yet."""
        files = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        new = [file for file in files if file not in self._uploaded]
        self._storage.upload(self.folder, new, self._stored, self.abandoned.is_set)
        self._uploaded.update(new)

    def write_record(self, rank: int, record: RankRecord) -> None:
        """Upload the files of this rank, then its record, signed because pickles of others are not read."""
        self._upload()
        others = self._uploaded - {file.path for file in record.files}
        files = (*record.files, *(manifests.record_file(self.folder, path) for path in sorted(others)))
        data = pickle.dumps(replace(record, files=files))
        self._storage.write(f"{self._stored}/{PARTS}/rank{rank}.record", hmac.digest(self._key, data, "sha256") + data)
        if rank != 0:
            self.discard()

    def write_failure(self, rank: int, text: str) -> None:
        self._storage.write(f"{self._stored}/{PARTS}/rank{rank}.failed", text.encode())

    def _parts(self, suffix: str) -> list[int]:
        names = self._storage.sizes(f"{self._stored}/{PARTS}")
        return sorted(int(name[4:].removesuffix(suffix)) for name in names if name.endswith(suffix))

    def read_failures(self) -> dict[int, str]:
        parts = f"{self._stored}/{PARTS}"
        found = {rank: self._storage.read(f"{parts}/rank{rank}.failed") for rank in self._parts(".failed")}
        return {rank: (data or b"").decode(errors="replace") for rank, data in found.items()}

    def missing_record(self, first: int, world_size: int) -> int:
        known = {*self._parts(".record")}
        return next((rank for rank in range(first, world_size) if rank not in known), world_size)

    @without_collection()
    def read_records(self, world_size: int) -> list[RankRecord]:
        records = []
        for rank in range(world_size):
            place = f"{self._stored}/{PARTS}/rank{rank}.record"
            data = self._storage.read(place) or b""
            if not hmac.compare_digest(data[:32], hmac.digest(self._key, data[32:], "sha256")):
                refuse("FSDP-E419", f"{self._storage.url}/{place}", "has other bytes than those that were written.")
            records.append(pickle.loads(data[32:]))
        return records

    def commit(self, ranks: Sequence[RankRecord], manifest: manifests.Manifest) -> None:
        """Upload the files that need all records, then the marker. Called by rank 0."""
        complete_checkpoint(self.folder, ranks, manifest)
        self._upload()
        self._storage.check_owner(self._owner)
        marker = {"files": self._files, "created": manifest.created, "run": manifest.run}
        self._storage.commit(self.final.name, marker)
        with suppress(Exception):  # the checkpoint is complete; the next commit tries again
            self._storage.remove_uncommitted()
        self.discard()
