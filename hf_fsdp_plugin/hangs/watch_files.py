"""The files of a rank, and its process: what the other ranks of its machine and its launcher know of it. Linux."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.hangs.python_stacks import request_stack, stack_file

_MIN_FREE: Final = 64 << 20
"""Free bytes of the memory for temporary files from which on it is used: a rank needs less than 200 KiB."""


class _File:
    """A file of one rank, with its suffix, or one that all ranks of a machine have in common, with its name."""

    def __init__(self, name: str) -> None:
        self.name, self.is_common = name, not name.startswith(".")

    def __get__(self, files: RankFiles, owner: type) -> Path:
        return files.stem.with_name(self.name) if self.is_common else files.stem.with_suffix(self.name)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        stem: their path without the suffix.
        failure: JSON: how the script failed, written before the rank exits (see ``hangs.process_end``).
        notice: a text that the launcher prints.
        ended: exists if the script has ended without an error.
        process: JSON: the rank's process, its start and its machine (see :func:`register_rank`).
        stacks: stacks of the rank's threads (see ``hangs.python_stacks``).
        saving: exists while a checkpoint is written in the background.
        calls: the rank's collectives, optimizer steps and forwards (see ``hangs.calls``).
        hang: JSON: the hang that ends the ranks of this machine (:class:`FoundHang`). One for all of them.
        standstill: exists if no rank of this machine has begun a collective for a long time. One for all of them.
        restarts: JSON: the failed attempts of the run (``runs.attempts``). The launcher writes it for all ranks.
    """

    stem: Path
    failure = _File(".json")
    notice = _File(".notice")
    ended = _File(".ended")
    process = _File(".pid")
    stacks = _File(".stacks")
    saving = _File(".saving")
    calls = _File(".calls")
    hang = _File("hang.json")
    standstill = _File("standstill")
    restarts = _File("restarts.json")


def remove_files(stem: Path, *, of_all: bool = False) -> None:
    """Remove the files of one rank, or those that all ranks of its machine have in common."""
    for name, file in vars(RankFiles).items():
        if type(file) is _File and file.is_common == of_all:
            getattr(RankFiles(stem), name).unlink(missing_ok=True)


def scratch_folder() -> Path:
    """Return the folder of temporary files: in memory, unless the user has set ``TMPDIR`` or there is no space.

    A thread that changes a mapped page of a disk may wait until the page is written, as while a checkpoint is.
    """
    memory = Path("/dev/shm")
    in_memory = "TMPDIR" not in os.environ and memory.is_mount() and shutil.disk_usage(memory).free > _MIN_FREE
    return memory if in_memory else Path(tempfile.gettempdir())


def write_if_possible(path: Path, text: str) -> None:
    """Write a file that is never seen incomplete. Does nothing if that is not possible, such as on a full disk."""
    partial = path.with_name(f"{path.name}.part")
    with contextlib.suppress(OSError):
        partial.write_text(text)
        os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Return the content of a file; ``None`` if there is no such file, or something else in it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundHang:
    """A hang that ends the ranks of this machine, in ``RankFiles.hang``.

    Attributes:
        text: the whole output.
        message: the message of the hang in one line.
        same_as: identifies the hang in another attempt.
        elsewhere: whether a rank of another machine has found it.
    """

    text: str
    message: str
    same_as: str
    elsewhere: bool = False

    def of_machine(self, machine: str) -> FoundHang:
        """Return the hang for the ranks of other machines."""
        message = f"{machine}: {self.message}"
        text = f"hf-fsdp: the ranks of this machine were stopped because another failed: {message}"
        return replace(self, text=text, message=message, elsewhere=True)

    @classmethod
    def read(cls, path: Path) -> FoundHang | None:
        """Return the hang that a file describes; ``None`` if there is no such file."""
        content = read_json(path)
        return cls(**content) if content is not None else None

    def claim(self, path: Path) -> bool:
        """Write the file. Returns ``False`` if another rank has written it before."""
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # such as a full disk: the other ranks of the machine end later
            part.write_text(json.dumps(asdict(self)))
            try:
                os.link(part, path)
            except FileExistsError:
                return False
            finally:
                part.unlink()
        return True


_PARENT, _SESSION, _MINOR_FAULTS, _MAJOR_FAULTS, _START = 1, 3, 7, 9, 19
_OWN_TIMES, _TIMES_OF_CHILDREN = slice(11, 13), slice(13, 15)
"""Positions in ``/proc/PID/stat`` after the name: user and system time of the process, and of its ended children."""


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    return _stat(pid)[0] in ("T", "t")


def start_of(pid: int) -> int:
    """Return when a process has started, in clock ticks of the machine; 0 if it has exited.

    Together with the pid it identifies a process: the system uses the numbers of processes again.
    """
    return int(_stat(pid)[_START])


class ProcessorUse(NamedTuple):
    """Processor time and page faults of a rank and of the processes that it has started.

    Attributes:
        seconds: processor time, in seconds.
        seconds_of_children: the part of ``seconds`` of all processes but the first, which is the rank itself.
        faults: page faults. A process that only waits for a device, in a loop, has none.
        in_file_system: whether one of them is in an uninterruptible wait (state D), as for a file system.
    """

    seconds: float = 0.0
    seconds_of_children: float = 0.0
    faults: int = 0
    in_file_system: bool = False


def processor_use(ranks: Collection[int]) -> dict[int, ProcessorUse]:
    """Return the use of each rank with its descendants and its session. Reads one file per process of the machine."""
    used = dict.fromkeys(ranks, ProcessorUse())
    ticks = os.sysconf("SC_CLK_TCK")
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    read = {pid: fields for pid in pids if (fields := _stat(pid)) is not _GONE}
    for pid, fields in read.items():
        rank = _rank_of(pid, read, used)
        if rank:
            before = used[rank]
            own, of_children = (sum(map(int, fields[part])) / ticks for part in (_OWN_TIMES, _TIMES_OF_CHILDREN))
            used[rank] = ProcessorUse(
                before.seconds + own + of_children,
                before.seconds_of_children + of_children + (0.0 if pid == rank else own),
                before.faults + int(fields[_MINOR_FAULTS]) + int(fields[_MAJOR_FAULTS]),
                before.in_file_system or fields[0] == "D",
            )
    return used


def _rank_of(pid: int, read: Mapping[int, Sequence[str]], ranks: Collection[int]) -> int:
    """Return the rank that has started a process, or whose session it is in; 0 without one."""
    while pid in read and pid not in ranks:
        if (session := int(read[pid][_SESSION])) in ranks:
            return session
        pid = int(read[pid][_PARENT])
    return pid if pid in ranks else 0


_GONE: Final = ["X", *["0"] * _START]


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name; those of a dead process if it has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _GONE


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of this machine; also the calling one.

    Attributes:
        start: when its process has started (see :func:`start_of`).
    """

    rank: int
    files: RankFiles
    pid: int
    start: int

    def is_gone(self) -> bool:
        """Return whether the process of the rank has exited. A process for which nobody waits has too."""
        fields = _stat(self.pid)
        return int(fields[_START]) != self.start or fields[0] in ("Z", "X")

    def request_stacks(self) -> None:
        """Make the rank record its stack."""
        if self.pid == os.getpid():
            stack_file().record()
        elif not self.is_gone():
            request_stack(self.files.stacks, self.pid)

    def send(self, number: int) -> None:
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def register_rank(rank: int, files: RankFiles) -> None:
    """Write the file with which the other ranks of the machine find this process."""
    own = {"rank": rank, "pid": os.getpid(), "start": start_of(os.getpid()), "host": socket.gethostname()}
    write_if_possible(files.process, json.dumps(own))


def find_peers(folder: Path) -> list[Peer]:
    """Return the ranks of this machine that have registered, by rank. The folder can be one that machines share."""
    found = []
    for path in folder.glob("rank_*.pid"):
        content = read_json(path)
        if content is not None and content["host"] == socket.gethostname():
            found.append(Peer(content["rank"], RankFiles(path.with_suffix("")), content["pid"], content["start"]))
    return sorted(found, key=lambda peer: peer.rank)
