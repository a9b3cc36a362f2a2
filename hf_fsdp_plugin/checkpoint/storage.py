"""Checkpoints in a storage: an object store, or any other URL or path that fsspec knows. Does not import torch.

::

    s3://bucket/run/owner.json                           the run that writes here
    s3://bucket/run/checkpoint-20/complete.json          the folder with the files; the checkpoint exists since this one
    s3://bucket/run/checkpoint-20/FILES/…                the files of the checkpoint, and its manifest
    s3://bucket/run/checkpoint-20/FILES/.parts/rank3…    what rank 3 has uploaded, until the commit

Ranks write their files to their machine's disk, and upload them in the background (``StoredStaging`` in
``writing/staging_folder.py``). No object is written twice: each save has its own name for FILES, and the last object,
``complete.json``, selects it. So an interrupted save changes no checkpoint, also none of the same step.

A reader gets a folder on its own disk with the manifest and the small files, in which each file of shards is a hole of
its size. ``file_io.open_for_reading`` reads these from the storage, so that each rank gets the ranges that it needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint import uploading
from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.file_io import parse_object, stored_folders, write_atomically
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, read_manifest
from hf_fsdp_plugin.checkpoint.whole_weights import without_launcher
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.rank_variables import launched_rank
from hf_fsdp_plugin.spec.rules import STORAGE_DRIVERS
from hf_fsdp_plugin.state import process

MARKER: Final = "complete.json"
OWNER: Final = "owner.json"
PARTS: Final = ".parts"
_FILES: Final = re.compile("[0-9a-f]{16}")
"""Names of the folders with the files of a save: ``secrets.token_hex(8)``."""
_MIN_RATE: Final = 1e6
"""Bytes per second of an upload, below which it is ended as failed, after ``_START_TIME``."""
_START_TIME: Final = 600.0
_SMALL: Final = 256 << 20
"""Size in bytes up to which a file without tensors of shards is fetched."""
_BLOCK: Final = 4 << 20
"""Bytes that are read at once. Two blocks of each open file are kept: elements are read in the order of their bytes."""
_UNUSABLE: Final = (
    "Check the URL, its bucket, the credentials and their permissions (read, write, list, delete), and the network."
)


class Storage:
    """The checkpoints below one URL or path.

    Raises:
        CheckpointError: from every method, if the storage does not do what it is asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._system, self._root = uploading.open_url(self.url)
        except (ImportError, ValueError) as error:
            refuse("FSDP-E418", self.url, f"cannot be used as a storage of checkpoints: {error}.", STORAGE_DRIVERS)

    @contextmanager
    def _problems(self, doing: str) -> Iterator[None]:
        """Raise ``CheckpointError`` for the errors of a driver, which have no common class."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or "no reason given"
            refuse("FSDP-E419", self.url, f"cannot be {doing} ({type(error).__name__}: {why}).", _UNUSABLE)

    def read(self, path: str) -> bytes | None:
        """Return the bytes of an object; ``None`` if it does not exist."""
        with self._problems(f"read: {path}"):
            try:
                data: bytes = self._system.cat_file(f"{self._root}/{path}")
            except FileNotFoundError:
                return None
            return data

    def write(self, path: str, data: bytes) -> None:
        """Write an object as a whole, and read it again."""
        with self._problems(f"written: {path}"):
            self._system.pipe_file(f"{self._root}/{path}", data)
            if self.read(path) != data:
                raise OSError("the storage returns other bytes than those that were written")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of each object below a folder, by its path in the folder."""
        with self._problems(f"listed: {folder}"):
            found = self._system.find(f"{self._root}/{folder}", detail=True)
            return {path.partition(f"/{folder}/")[2]: entry["size"] for path, entry in found.items()}

    def _folders(self, folder: str = "") -> list[str]:
        with self._problems("listed"):
            try:
                found = self._system.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def _remove(self, path: str) -> None:
        with self._problems(f"changed: {path}"), suppress(FileNotFoundError):
            self._system.rm(f"{self._root}/{path}", recursive=True)

    def claim(self, token: str) -> None:
        """Register the run that writes from now on. This is also the test whether the storage can be used."""
        self.write(OWNER, json.dumps({"owner": token}).encode())
        self.check_owner(token)

    def check_owner(self, token: str) -> None:
        """Raise ``CheckpointError`` if another run, or a restart of this one, has begun to write here since."""
        if parse_object(self.read(OWNER) or b"").get("owner") != token:
            fix = "Give each run a URL of its own. The run that was started last goes on writing here."
            refuse("FSDP-E420", self.url, "is the storage of another run, which has been started later.", fix)

    def marker(self, name: str) -> dict[str, Any]:
        """Return the marker of a checkpoint: ``files``, ``created`` and ``run``; empty if it is not complete."""
        found = parse_object(self.read(f"{name}/{MARKER}") or b"")  # in a plain folder, it may be half of an object
        return found if isinstance(found.get("files"), str) else {}

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Return name -> marker of each complete checkpoint, in the order in which they were saved."""
        found = {name: self.marker(name) for name in self._folders()}
        complete = [(name, marker) for name, marker in found.items() if marker]
        return dict(sorted(complete, key=lambda each: (str(each[1].get("created")), len(each[0]), each[0])))

    def commit(self, name: str, marker: dict[str, Any]) -> None:
        """Make the uploaded files a checkpoint, in place of an earlier one of the name."""
        data = json.dumps(marker).encode()
        if uploading.is_path(self.url):  # an object is replaced at once, a file is not
            write_atomically(Path(self._root, name, MARKER), data)
        else:
            self.write(f"{name}/{MARKER}", data)

    def remove(self, name: str) -> None:
        """Remove a checkpoint, the marker first."""
        self._remove(f"{name}/{MARKER}")
        self._remove(name)

    def remove_uncommitted(self) -> None:
        """Remove the files of interrupted saves, of replaced checkpoints, and the records of committed ones."""
        for name in self._folders():
            files = self.marker(name).get("files")
            for folder in filter(_FILES.fullmatch, self._folders(name)):  # others are the user's
                self._remove(f"{name}/{folder}/{PARTS}" if folder == files else f"{name}/{folder}")

    def upload(self, folder: Path, files: Iterable[str], into: str, is_abandoned: Callable[[], bool]) -> None:
        """Upload files of a folder in a child process, in their order, and wait for it."""
        names = list(files)
        limit = time.monotonic() + _START_TIME + sum((folder / name).stat().st_size for name in names) / _MIN_RATE
        task = {"url": f"{self.url}/{into}", "folder": str(folder), "files": names}
        command = [sys.executable, "-m", uploading.__name__]
        with (
            self._problems(f"written: {into}"),
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, text=True, env=without_launcher()) as child,
        ):
            assert child.stdin is not None
            child.stdin.write(f"{json.dumps(task)}\n")
            child.stdin.flush()  # it stays open: the child ends with this process
            while child.poll() is None:
                if is_abandoned() or time.monotonic() > limit:
                    child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.1)
            if child.returncode:
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                raise OSError(lines[-1] if lines else f"the upload was ended by signal {-child.returncode}")

    def open(self, path: str) -> BinaryIO:
        """Open an object for reading in any order."""
        kept = {"block_size": _BLOCK, "cache_type": "blockcache", "cache_options": {"maxblocks": 2}}
        opened: BinaryIO = self._system.open(f"{self._root}/{path}", "rb", **kept)
        return opened

    def fetch(self, name: str, into: Path) -> Path:
        """Return a folder ``into/NAME`` that stands for a checkpoint, with its small files.

        Raises:
            CheckpointError: it does not exist, or is incomplete.
        """
        marker = self.marker(name)
        if not marker:
            fix = "Give the URL of a complete checkpoint; hf-fsdp inspect lists those of a run."
            refuse("FSDP-E450", f"{self.url}/{name}", "is not a complete checkpoint.", fix)
        stored, folder = f"{name}/{marker['files']}", into / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file_names.MANIFEST_NAME).write_bytes(self.read(f"{stored}/{file_names.MANIFEST_NAME}") or b"")
        manifest = read_manifest(folder)
        assert manifest is not None
        sizes = self.sizes(stored)
        for record in manifest.files:
            if sizes.get(record.path) != record.size:
                message = f"{record.path} has {sizes.get(record.path)} bytes; {record.size} were saved."
                refuse("FSDP-E470", f"{self.url}/{name}", message, "Use an earlier checkpoint.")
        remote = {record.path for record in manifest.files if _is_read_by_ranges(record)}
        for record in manifest.files:
            path = folder / record.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if record.path in remote:
                with path.open("wb") as file:
                    file.truncate(record.size)
            else:
                path.write_bytes(self.read(f"{stored}/{record.path}") or b"")
        stored_folders().openers[folder] = lambda path: self.open(f"{stored}/{path}") if path in remote else None
        return folder


def _is_read_by_ranges(record: FileRecord) -> bool:
    """Return whether a file is read from the storage: files with shards, and the random states of other ranks."""
    own = (file_names.trainer_rng_file(launched_rank()), file_names.accelerate_rng_file(launched_rank()))
    is_random_state = record.path.startswith((file_names.TRAINER_RNG, file_names.ACCELERATE_RNG))
    is_others = is_random_state and record.path not in (*own, file_names.trainer_rng_file(None))
    return is_others or record.size > _SMALL or any(each.name for each in record.ranges)


class _Fetched:
    """The folders of this process that stand for checkpoints in a storage. They are removed at its end.

    Attributes:
        urls: folder -> URL of its checkpoint.
    """

    def __init__(self) -> None:
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}
        self.urls: dict[Path, str] = {}

    def get(self, run: str, names: Iterable[str] = ()) -> Path:
        """Return a folder with what stands for some checkpoints of a run; without names, for all of them."""
        storage = Storage(run)
        wanted = {name: storage.marker(name) for name in names} or storage.checkpoints()
        key = json.dumps([run, wanted])
        if key not in self._folders:
            with ExitStack() as stack:
                folder = tempfile.TemporaryDirectory(prefix="hf-fsdp-")
                stack.callback(folder.cleanup)
                fetched = {storage.fetch(name, Path(folder.name).resolve()): f"{run}/{name}" for name in wanted}
                stack.pop_all()  # it is kept
            self.urls |= fetched
            self._folders[key] = folder
        return Path(self._folders[key].name).resolve()

    def close(self) -> None:
        for folder in self._folders.values():
            folder.cleanup()


_fetched = process.owns(_Fetched)


def fetched(url: str) -> Path:
    """Return the folder of this process that stands for a checkpoint with this URL. Not collective.

    Raises:
        CheckpointError: the checkpoint does not exist, is incomplete, or cannot be read.
    """
    run, _, name = url.rstrip("/").rpartition("/")
    return _fetched().get(run, [name]) / name


def url_of(path: str) -> str | None:
    """Return the URL of a checkpoint: ``path`` itself, or what a folder of this process stands for."""
    return path if is_url(path) else _fetched().urls.get(Path(path))


def folder_of(text: str) -> Path:
    """Return the folder of a path, or one that stands for the checkpoint or the run with a URL."""
    if not is_url(text):
        return Path(text)
    run, _, name = text.rstrip("/").rpartition("/")
    return fetched(text) if Storage(run).marker(name) else _fetched().get(text.rstrip("/"))


def is_url(text: str) -> bool:
    """Return whether a text is a URL, or the path of a checkpoint or a run in a storage that is a plain folder."""
    path = Path(text)
    return "://" in text or (path / MARKER).is_file() or (path / OWNER).is_file()
