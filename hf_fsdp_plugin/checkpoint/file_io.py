"""Files of checkpoints: writes that bypass the page cache, syncs and JSON. Does not import torch.

A write through the page cache uses three to eight times as much CPU time as a direct write of the same bytes, and
evicts other data from the cache.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, BinaryIO, Self

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.state import process

PAGE = 4096
"""Alignment in bytes of direct writes, in the file and in memory."""
DIRECT = getattr(os, "O_DIRECT", 0)
UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""Error numbers that file systems without direct I/O return."""
_NO_FOLDER_SYNC = (*UNSUPPORTED, errno.EACCES, errno.EBADF, errno.EISDIR, errno.ENOSYS)
MAX_SPAN = 16 << 20
"""Maximum number of bytes in one read of elements that are not contiguous in the file."""
MAX_OPEN = 64
"""Maximum number of files that a reader keeps open. A checkpoint has more files than a process may open."""
_MAX_METADATA = 2 << 30
"""Maximum size in bytes of a file that is read as a whole. ``.metadata`` of DCP has some 150 bytes for each chunk."""


def round_up(size: int) -> int:
    """Return the size of the whole pages that hold ``size`` bytes."""
    return -(-size // PAGE) * PAGE


def sync(path: Path) -> None:
    """Sync a file's bytes, or a folder's entries: syncing a file does not make its name durable.

    Some file systems (CIFS, FUSE) do not sync folders. They make names durable by themselves.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


class StoredFolders:
    """Folders of this process that stand for a checkpoint in a storage (``checkpoint.storage``).

    Attributes:
        openers: folder -> function that opens a file by its path in the folder; ``None`` if the file is in the folder.
    """

    def __init__(self) -> None:
        self.openers: dict[Path, Callable[[str], BinaryIO | None]] = {}
        self.lock = threading.Lock()  # of the position in a file of a storage


stored_folders = process.owns(StoredFolders)
"""Return the folders of this process."""


def open_for_reading(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, or the file in a storage for which it stands.

    Never waits for the writer of a pipe.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a device or a socket.
    """
    for folder, opener in stored_folders().openers.items():
        if path.is_relative_to(folder) and (stored := opener(path.relative_to(folder).as_posix())) is not None:
            return stored
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering)


def read_into(file: BinaryIO, offset: int, out: memoryview) -> int:
    """Read bytes of an open file, from an offset on, and return their number. Threads may share the file."""
    try:
        return os.preadv(file.fileno(), [out], offset)
    except UnsupportedOperation:
        with stored_folders().lock:
            file.seek(offset)
            data = file.read(len(out))
    out[: len(data)] = data
    return len(data)


def read_range(path: Path, start: int, num_bytes: int) -> bytes:
    """Return bytes of a regular file; fewer if it ends earlier. Raises the errors of :func:`open_for_reading`."""
    with open_for_reading(path) as file:
        file.seek(start)
        return file.read(num_bytes)


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file with metadata. Raises the errors of :func:`open_for_reading`.

    Raises:
        CheckpointError: the file is larger than any file with metadata, or than the free memory.
    """
    with open_for_reading(path) as file:
        size = path.stat().st_size
        with suppress(MemoryError):
            if size <= _MAX_METADATA:
                return file.read()
    message = f"has {size:,} bytes, too many to read it into memory"
    refuse("FSDP-E412", path, f"{message}; files with metadata have at most {_MAX_METADATA:,}.")


def write_atomically(path: Path, *parts: bytes | str, preserve: bool = False) -> None:
    """Write bytes and texts to ``path`` atomically: to a temporary file, which is synced and renamed.

    Args:
        preserve: keep the permissions of the file that is replaced. If ``path`` is a link, the file to which it points
            is replaced.

    Raises:
        OSError: the file cannot be written. A present file is unchanged, and nothing is left behind.
    """
    path = Path(os.path.realpath(path)) if preserve else path
    temporary = path.with_name(f"{path.name}.part")
    try:
        with temporary.open("wb") as file:
            if preserve and path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class OutputFile:
    """A file that is open for writing, in a ``with`` block. Whole pages bypass the page cache if that is supported.

    Errors of the operating system in the block contain the file name.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._direct: int | None = None  # a descriptor for writes that bypass the page cache
        with suppress(OSError):
            self._direct = os.open(path, os.O_WRONLY | DIRECT) if DIRECT else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        os.close(self._descriptor)
        self._use_page_cache()
        if isinstance(error, OSError) and error.filename is None:  # calls that take a descriptor do not add it
            error.filename = str(self._path)

    def _use_page_cache(self) -> None:
        """Use the page cache from now on, because the file system does not support direct writes."""
        if self._direct is not None:
            os.close(self._direct)
        self._direct = None

    def resize(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def write(self, view: memoryview, offset: int) -> None:
        """Write ``view`` at byte ``offset``. Whole pages are written directly; their memory must be page-aligned."""
        while view:
            direct = self._direct if offset % PAGE == 0 and len(view) % PAGE == 0 else None
            try:
                count = os.pwrite(self._descriptor if direct is None else direct, view, offset)
            except OSError as error:
                if direct is None or error.errno not in UNSUPPORTED:
                    raise
                self._use_page_cache()
                continue
            view, offset = view[count:], offset + count


class InputFiles:
    """The files below ``root``. A file is opened on its first read, and at most 64 files stay open.

    They are closed at the end of a ``with`` block, and opened again by later reads.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _close_all(self._open)

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``offset`` on. Raises ``CheckpointError`` if the file ends earlier."""
        opened, position = self.opened(file), offset
        while out:
            count = read_into(opened, position, out)
            if count == 0:
                message = f"ends at byte {position:,}; {position + len(out):,} bytes were expected."
                refuse("FSDP-E453", self._root / file, message)
            out, position = out[count:], position + count

    def opened(self, file: str) -> BinaryIO:
        """Return a file without a buffer. It may be closed when other files are opened: at most 64 stay open."""
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) == MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[file] = open_for_reading(self._root / file, buffering=0)
        return self._open[file]


def _close_all(files: dict[str, BinaryIO]) -> None:
    for file in files.values():
        file.close()
    files.clear()


@contextmanager
def without_collection() -> Iterator[None]:
    """Run a block, or a decorated function, that makes many objects, without the search for cycles among them.

    The search takes more than half of the time of such a block. It is a setting of the process, so keep blocks short.
    """
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects_garbage:
            gc.enable()


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that is only described; empty if it cannot be read or is no object."""
    with suppress(OSError):
        return parse_object(read_file(path))
    return {}


def parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; empty for anything else, such as half of an object."""
    with suppress(ValueError, RecursionError):
        tree = json.loads(data)
        return tree if isinstance(tree, dict) else {}
    return {}
