"""Weights that one process of a machine computes, and that the other processes map instead of computing them too.

The first process that asks for a key computes the weights (:class:`Publication`). The others wait for it and map the
result (:class:`Received`). No process waits for a process that has not begun: a call on one rank alone returns as it
would without this module, and a waiting process continues when the publisher fails, ends or withdraws. Nothing is left
on a disk: the rendezvous is an abstract Unix socket (``man 7 unix``), and the weights are in a sealed memory file
(``man 2 memfd_create``), which has no size limit of ``/dev/shm``. Every process maps it privately (copy-on-write), so a
change in place stays in the process that makes it. The name of the memory file is a hash of the key, by which ranks
recognize equal weights (:mod:`hf_fsdp_plugin.backends.file_weights`).

Weights that are views of a mapped file in the publisher are not copied: the others map the same file.

Linux only. Elsewhere :meth:`WeightExchange.join` returns ``None``, and every process computes its weights itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_fsdp_plugin.backends.memory_maps import SHARED_NAME, MemoryMaps

_ALIGNMENT = 64
_SIZES = struct.Struct("<QQ")
"""Message of the publisher: bytes of the weights, and of the table that follows them in the memory file."""
_CREDENTIALS = struct.Struct("3i")
_WAIT_SECONDS = 1800.0
"""Longest time that a process waits for a publisher that is still computing, as long as torch's collectives do."""
_ATTEMPTS = 50
_IN_MEMORY_FILE = -1


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
    """Weights that this process computes for the others. Call :meth:`publish` or :meth:`close`."""

    def __init__(self, listener: socket.socket, num_others: int, name: str) -> None:
        self._listener = listener
        self._name = name
        self._num_others = num_others
        self._thread: threading.Thread | None = None
        self.is_open = True

    def publish(self, tensors: Mapping[str, torch.Tensor], files: Sequence[str], facts: Any) -> bool:
        """Copy the weights to shared memory, replace them by views of it, and give it to the other processes.

        Args:
            tensors: name -> tensor. The data of each tensor is replaced by its view, which frees its private memory.
            files: real paths of files whose mapped views are not copied.
            facts: JSON value that the others receive too.

        Returns:
            Whether the weights were published. If not, the others compute them. The values of the tensors are the same
            in both cases.
        """
        try:
            table, size = _plan(tensors, files)
            file = _memory_file(self._name, table, size, facts, tensors)
        except (OSError, RuntimeError, TypeError):  # no memory, or a dtype that has no bytes
            self.close()
            return False
        except BaseException:
            self.close()
            raise
        sizes = _SIZES.pack(size, os.fstat(file).st_size - size)
        self._thread = threading.Thread(target=self._serve, args=(file, sizes), name="hf_fsdp_weights", daemon=True)
        self._thread.start()
        return True

    def _serve(self, file: int, sizes: bytes) -> None:
        """Send the memory file to every process that connects, until all other processes of the machine have it."""
        served: set[int] = set()
        try:
            while len(served) < self._num_others:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    pid, user = _peer(connection)
                    if user == os.geteuid():
                        socket.send_fds(connection, [sizes], [file])
                        served |= {pid} - {os.getpid()}
        except OSError:
            pass  # closed
        finally:
            self.is_open = False
            self._listener.close()
            os.close(file)

    def close(self) -> None:
        """Stop publishing. Processes that are waiting continue without the weights."""
        self.is_open = False
        # Closing a listening socket would not wake the thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._listener.close()


class Received:
    """Weights that another process of this machine has computed."""

    def __init__(self, file: int, size: int, table_size: int) -> None:
        try:
            text = os.pread(file, table_size, size)
            content = json.loads(text)
            self.facts: Any = content["facts"]
            self._table: dict[str, list[Any]] = content["tensors"]
            self._memory = _map(file, size)
        finally:
            os.close(file)

    def tensors(self, files: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return name -> tensor: private views of the shared memory, or of ``files``, the publisher's list.

        Raises:
            OSError: a file cannot be mapped.
        """
        sources: dict[int, Any] = {_IN_MEMORY_FILE: self._memory}
        found = {}
        for name, (source, offset, shape, dtype) in self._table.items():
            if source not in sources:
                with open(files[source], "rb") as file:
                    sources[source] = _map(file.fileno(), os.fstat(file.fileno()).st_size)
            found[name] = _view(sources[source], offset, shape, getattr(torch, dtype))
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
            message, files, _, _ = socket.recv_fds(connection, _SIZES.size, 1)
        except ConnectionError:
            return None  # it is not listening yet, or it has withdrawn
    if len(message) < _SIZES.size or not files:
        return None
    return Received(files[0], *_SIZES.unpack(message))


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _plan(tensors: Mapping[str, torch.Tensor], files: Sequence[str]) -> tuple[dict[str, list[Any]], int]:
    """Return name -> (index of the file, offset in bytes, shape, dtype), and the bytes of the memory file."""
    maps = MemoryMaps.read()
    indices = {path: index for index, path in enumerate(files)}
    table: dict[str, list[Any]] = {}
    offsets: dict[int, int] = {}
    size = 0
    for name, tensor in tensors.items():
        region = maps.find(tensor)
        if region is not None and region.path in indices and tensor.is_contiguous():
            source, offset = indices[region.path], tensor.data_ptr() - region.start + region.offset
        else:
            source, offset = _IN_MEMORY_FILE, offsets.setdefault(id(tensor), size)
            if offset == size:
                size += -(-max(tensor.numel() * tensor.element_size(), 1) // _ALIGNMENT) * _ALIGNMENT
        table[name] = [source, offset, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    return table, size


def _memory_file(
    name: str, table: Mapping[str, list[Any]], size: int, facts: Any, tensors: Mapping[str, torch.Tensor]
) -> int:
    """Return a sealed memory file with the weights and the table. Replaces the weights one by one."""
    text = json.dumps({"facts": facts, "tensors": table}).encode()
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size + len(text))
        _write(file, memoryview(text), size)
        memory = _map(file, size)
        for tensor, (source, offset, shape, dtype) in table.items():
            if source == _IN_MEMORY_FILE:
                _write(file, _bytes_of(tensors[tensor]), offset)
                tensors[tensor].data = _view(memory, offset, shape, getattr(torch, dtype))
        _seal(file)
    except BaseException:
        os.close(file)
        raise
    _return_freed_memory()
    return file


def _return_freed_memory() -> None:
    """Return the memory of the replaced tensors to the system: glibc keeps freed blocks of up to 32 MB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _seal(file: int) -> None:
    """Make the memory file immutable, so that no process can change the weights of another one."""
    import fcntl

    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _write(file: int, content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(file, content[: 1 << 30], offset)
        content, offset = content[written:], offset + written


def _map(file: int, size: int) -> mmap.mmap | None:
    """Map a file privately. The mapping is released with the last tensor that is a view of it."""
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY) if size else None


def _view(memory: mmap.mmap | None, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    if memory is None or not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)
