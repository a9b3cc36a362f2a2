"""The folder of one rank for a checkpoint that is committed in a storage, and its upload.

Each rank has a folder on its machine's disk, also if several ranks have one disk. It uploads its files and then its
record, and removes the folder. When rank 0 finds the records of all ranks in the storage, it uploads the files that
need all of them, the manifest and the marker. An error of an upload is a warning: the training goes on.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint.errors import os_errors_as_problems, refuse
from hf_fsdp_plugin.checkpoint.file_io import without_collection
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, record_file
from hf_fsdp_plugin.checkpoint.names import SAVING
from hf_fsdp_plugin.checkpoint.storage import PARTS, Storage
from hf_fsdp_plugin.checkpoint.writing.staging_folder import RankRecord, StagingFolder, complete_checkpoint
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem


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
        files = (*record.files, *(record_file(self.folder, path) for path in sorted(others)))
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

    def commit(self, ranks: Sequence[RankRecord], manifest: Manifest) -> None:
        """Upload the files that need all records, then the marker. Called by rank 0."""
        complete_checkpoint(self.folder, ranks, manifest)
        self._upload()
        self._storage.check_owner(self._owner)
        marker = {"files": self._files, "created": manifest.created, "run": manifest.run}
        self._storage.commit(self.final.name, marker)
        with suppress(Exception):  # the checkpoint is complete; the next commit tries again
            self._storage.remove_uncommitted()
        self.discard()
