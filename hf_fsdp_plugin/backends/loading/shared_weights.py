"""Weights that one process of a machine computes, and that the other processes map instead of computing them too.

The first process that asks for a key computes the weights (:class:`Publication`). The others wait for it and map the
result (:class:`Received`). No process waits for a process that has not begun: a call on one rank alone returns as it
would without this module, and a waiting process continues when the publisher fails, ends or withdraws. Nothing is left
on a disk: the rendezvous is an abstract Unix socket (``man 7 unix``), and the weights are in a sealed memory file.
Every process maps it privately (copy-on-write), so a change in place stays in the process that makes it. The name of
the memory file is a hash of the key, by which ranks recognize equal weights
(:func:`hf_fsdp_plugin.backends.loading.equal_weights.find_mapped_parameters`).

The publisher moves each tensor to the memory file as soon as it is computed (:meth:`Publication.move`), so that its
private memory does not grow with the model.

Weights that are views of a mapped file in the publisher are not copied: the others map the same file.

Linux only. Elsewhere :meth:`WeightExchange.join` returns ``None``, and every process computes its weights itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from io import BufferedIOBase
from typing import Any

import torch

from hf_fsdp_plugin.backends.loading.equal_weights import SHARED_NAME, MemoryMaps
from hf_fsdp_plugin.text import format_dtype

_CREDENTIALS = struct.Struct("3i")
_WAIT_SECONDS = 1800.0
"""Longest time that a process waits for a publisher that is still computing, as long as torch's collectives do."""
_ATTEMPTS = 50
_IN_MEMORY_FILE = -1
_CHUNK = 64 << 20
"""Bytes that are mapped at once, unless a tensor is larger: Linux limits the number of mappings to 65,530."""
_TRIM = 32 << 20
"""Bytes after which the memory of moved tensors is returned to the system: glibc keeps freed blocks of up to 32 MB, and
those before glibc 2.39 are too short for the next aligned block of the same size."""


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def map_privately(file: BufferedIOBase) -> mmap.mmap | None:
    """Map a file privately. The mapping is released with the last tensor that is a view of it."""
    size = os.fstat(file.fileno()).st_size
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None


def view_of(memory: mmap.mmap | None, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor at a byte offset of a mapping."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if memory is None or not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)


class WeightExchange:
    """The publications of this process. ``close`` ends them; processes that ask later compute their weights."""

    def __init__(self) -> None:
        self._open: list[Publication] = []

    def join(self, key: str) -> Publication | Received | None:
        """Return a publication that the caller has to fill, or the weights of another process with the same key.

        Args:
            key: everything that the weights depend on.

        Returns:
            ``None`` if this machine cannot share memory, or has a single rank.
        """
        num_others = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        if num_others < 1 or not hasattr(os, "memfd_create"):
            return None
        name = f"{SHARED_NAME}_{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        address = _address(key)
        for _ in range(_ATTEMPTS):
            try:
                listener = _listen(address)
                if listener is not None:
                    publication = Publication(listener, num_others, name)
                    self._open = [*(other for other in self._open if other.is_open), publication]
                    return publication
                received = _receive(address)
            except OSError:
                return None
            if received is not None:
                return received
            time.sleep(0.02)
        return None

    def close(self) -> None:
        """Withdraw every publication. Weights that are mapped stay valid."""
        for publication in self._open:
            publication.close()
        self._open.clear()


exchange = WeightExchange()
"""The weights that this process shares with the other ranks of its machine."""


class Publication:
    """Weights that this process computes for the others, in a ``with`` block. Call :meth:`publish` or :meth:`close`.

    An exception in the block closes the publication.

    They are moved one by one to a memory file (``man 2 memfd_create``), which has no size limit as ``/dev/shm`` has.

    Raises:
        OSError: the system has no memory files, or no memory.
    """

    def __init__(self, listener: socket.socket, num_others: int, name: str) -> None:
        self._listener = listener
        self._num_others = num_others
        self._file = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")
        self._end = self._num_untrimmed = self._chunk_offset = 0
        self._chunk: mmap.mmap | None = None
        self._offsets: dict[int, int] = {}  # address of the view of each moved tensor -> its offset in bytes
        self._thread: threading.Thread | None = None
        self._maps: MemoryMaps | None = None
        self._can_move = True
        self.is_open = True

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a copy of the tensor in the memory that :meth:`publish` shares.

        Returns the tensor itself if it is a view of a file, is not an ordinary CPU tensor, or if there is no memory.
        Call it after the files have been mapped.
        """
        if not self._can_move or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
            return tensor
        if self._maps is None:
            self._maps = MemoryMaps.read(())
        region = self._maps.find(tensor)
        if region is not None and region.is_file:
            return tensor
        try:
            return self._write(tensor)[1]
        except (OSError, RuntimeError, TypeError):
            self._can_move = False
            return tensor

    def _write(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Copy a CPU tensor to the file. Returns the offset of the copy in bytes, and a view of it.

        Raises:
            OSError: there is no memory.
            RuntimeError, TypeError: the dtype has no bytes.
        """
        content: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        if self._chunk is None or self._end + len(content) > self._chunk_offset + len(self._chunk):
            unit = mmap.ALLOCATIONGRANULARITY
            self._end = self._chunk_offset = -(-self._end // unit) * unit
            length = max(_CHUNK, -(-len(content) // unit) * unit)
            os.ftruncate(self._file.fileno(), self._chunk_offset + length)
            self._chunk = mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_COPY, offset=self._chunk_offset)
        offset = self._end
        self._file.seek(offset)
        self._file.write(memoryview(content))
        self._file.flush()
        # No page has two tensors: this process would not see what is written to a page that it has a changed copy of.
        self._end += -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_untrimmed += len(content)
        if self._num_untrimmed > _TRIM:
            return_freed_memory()
            self._num_untrimmed = 0
        view = view_of(self._chunk, offset - self._chunk_offset, tensor.shape, tensor.dtype)
        self._offsets[view.data_ptr()] = offset
        return offset, view

    def publish(self, tensors: Mapping[str, torch.Tensor], files: Sequence[str], facts: Any) -> bool:
        """Copy the weights to shared memory, replace them by views of it, and give it to the other processes.

        Args:
            tensors: name -> tensor. The data of each tensor is replaced by its view, which frees its private memory,
                unless it was moved before.
            files: real paths of files whose mapped views are not copied.
            facts: JSON value that the others receive too.

        Returns:
            Whether the weights were published. If not, the others compute them. The values of the tensors are the same
            in both cases.
        """
        try:
            text = json.dumps({"facts": facts, "tensors": self._table(tensors, files)}).encode()
            self._seal()
        except (OSError, RuntimeError, TypeError):  # no memory, or a dtype that has no bytes
            self.close()
            return False
        self._thread = threading.Thread(target=self._serve, args=(text,), name="hf_fsdp_weights", daemon=True)
        self._thread.start()
        return True

    def _table(self, tensors: Mapping[str, torch.Tensor], files: Sequence[str]) -> dict[str, list[Any]]:
        """Return name -> (index of the file, offset in bytes, shape, dtype). Moves tensors out of private memory."""
        maps = MemoryMaps.read(tensors.values())
        indices = {path: index for index, path in enumerate(files)}
        table: dict[str, list[Any]] = {}
        offsets: dict[int, int] = {}
        for name, tensor in tensors.items():
            region, source = maps.find(tensor), _IN_MEMORY_FILE
            is_view = region is not None and region.is_unchanged_file and tensor.is_contiguous()
            is_moved = region is not None and region.is_shared_memory and tensor.data_ptr() in self._offsets
            if region is not None and is_view and region.path in indices:
                source, offset = indices[region.path], tensor.data_ptr() - region.start + region.offset
            elif id(tensor) in offsets:
                offset = offsets[id(tensor)]
            elif is_view and is_moved:
                offset = self._offsets[tensor.data_ptr()]
            else:
                offset, tensor.data = self._write(tensor)
            offsets[id(tensor)] = offset
            table[name] = [source, offset, list(tensor.shape), format_dtype(tensor.dtype)]
        return table

    def _seal(self) -> None:
        """Make the file immutable, so that no process can change the weights of another one."""
        import fcntl

        os.ftruncate(self._file.fileno(), self._end)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        return_freed_memory()

    def _serve(self, text: bytes) -> None:
        """Send the memory file to every process that connects, until all other processes of the machine have it."""
        served: set[int] = set()
        try:
            while len(served) < self._num_others:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    pid, user = _peer(connection)
                    if user == os.geteuid():
                        socket.send_fds(connection, [b"."], [self._file.fileno()])
                        connection.sendall(text)
                        served |= {pid} - {os.getpid()}
        except OSError:
            pass  # the publication was closed
        finally:
            self._close_files()

    def close(self) -> None:
        """Stop publishing. Processes that are waiting continue without the weights; mapped tensors stay valid."""
        # Closing a listening socket would not wake the thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._close_files()

    def _close_files(self) -> None:
        self.is_open = False
        self._listener.close()
        with contextlib.suppress(OSError):  # buffered bytes that could not be written
            self._file.close()


class Received:
    """Weights that another process of this machine has computed."""

    def __init__(self, file: BufferedIOBase, content: Any) -> None:
        self.facts: Any = content["facts"]
        self._table: dict[str, list[Any]] = content["tensors"]
        self._memory = map_privately(file)

    def tensors(self, files: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return name -> tensor. A change in place is not seen by other processes.

        Args:
            files: the list of files that the publisher has passed. They are mapped.

        Raises:
            OSError: a file cannot be mapped.
        """
        sources: dict[int, Any] = {_IN_MEMORY_FILE: self._memory}
        found = {}
        for name, (source, offset, shape, dtype) in self._table.items():
            if source not in sources:
                with open(files[source], "rb") as file:
                    sources[source] = map_privately(file)
            found[name] = view_of(sources[source], offset, shape, getattr(torch, dtype))
        return found


def _address(key: str) -> str:
    """Return the name of the socket. Ranks of other jobs and of other users have other names."""
    job = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")]
    digest = hashlib.sha256(json.dumps([os.geteuid(), *job, key]).encode()).hexdigest()
    return f"\0{SHARED_NAME}/{digest}"


def _listen(address: str) -> socket.socket | None:
    """Return a listening socket; ``None`` if another one has the address. Raises ``OSError``."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _receive(address: str) -> Received | None:
    """Wait for the weights of the process that has the address. ``None`` if it ends without publishing.

    Raises:
        OSError: the process takes too long, or belongs to another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WAIT_SECONDS)
        try:
            connection.connect(address)
            if _peer(connection)[1] != os.geteuid():
                raise PermissionError(f"{address!r} belongs to another user")
            _, files, _, _ = socket.recv_fds(connection, 1, 1)
            if files:
                with open(files[0], "rb") as file, connection.makefile("rb") as stream:
                    return Received(file, json.load(stream))
        except (ConnectionError, json.JSONDecodeError):
            pass  # it is not listening yet, has withdrawn, or has ended
    return None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user
