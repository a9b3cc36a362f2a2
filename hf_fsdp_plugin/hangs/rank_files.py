"""The files of a rank, and its process: what the other ranks of its machine and its launcher know of it. Linux."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from hf_fsdp_plugin.hangs.rank_stacks import request_stack, stack_file

HANG: Final = 75
"""Exit code of a run that was ended because of a hang. EX_TEMPFAIL of sysexits.h: try again."""
FILES_VARIABLE = "HF_FSDP_RANK_FILES"
"""Environment variable with the path of a rank's files, without their suffix; set by ``hf-fsdp launch``."""
LAUNCHER_VARIABLE = "HF_FSDP_LAUNCHER_PID"
"""Environment variable with the process of ``hf-fsdp launch``, which prints what its ranks report."""
RUN_ID_VARIABLE = "HF_FSDP_RUN_ID"
"""Environment variable with the id of the run, the same on all machines; set by ``hf-fsdp launch`` or a user."""
LOG_VARIABLE = "HF_FSDP_LOG_DIR"
"""Environment variable with the folder of ``--log_dir``."""


class _RankFile:
    """A file of one rank."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def __get__(self, files: RankFiles, owner: type) -> Path:
        return files.stem.with_suffix(self.suffix)


class _MachineFile(_RankFile):
    """A file that all ranks of a machine have in common."""

    def __get__(self, files: RankFiles, owner: type) -> Path:
        return files.stem.with_name(self.suffix)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        stem: their path without the suffix.
    """

    stem: Path
    failure = _RankFile(".json")
    """JSON: how the script failed, written before the rank exits (see ``hangs.rank_exit``)."""
    notice = _RankFile(".notice")
    """A text that the launcher prints."""
    ended = _RankFile(".ended")
    """Exists if the script has ended without an error."""
    process = _RankFile(".pid")
    """JSON: the rank's process, its start and its machine (see :func:`register_rank`)."""
    hang = _MachineFile("hang.json")
    """JSON: the hang that ends the ranks of this machine (``hangs.hang_report.FoundHang``). One for all of them."""
    cause = _MachineFile("cause")
    """Exists if a rank that SIGTERM has ended has printed the reason. One for all ranks of this machine."""
    stacks = _RankFile(".stacks")
    """Stacks of the rank's threads (see ``hangs.rank_stacks``)."""
    restarts = _MachineFile("restarts.json")
    """JSON: the failed attempts of the run (``runs.restart_policy``). The launcher writes it for all its ranks."""
    saving = _RankFile(".saving")
    """Exists while a checkpoint is written in the background."""
    calls = _RankFile(".calls")
    """The rank's collectives, optimizer steps and forwards (see ``hangs.call_record``)."""


def remove_files(stem: Path) -> None:
    """Remove the files of one rank."""
    for file in vars(RankFiles).values():
        if type(file) is _RankFile:
            stem.with_suffix(file.suffix).unlink(missing_ok=True)


def private_folder(folder: Path) -> None:
    """Make a folder below another one that both belong to this user only.

    Raises:
        OSError: it cannot be made, or another user has made it, or a link.
    """
    for each in (*reversed(folder.parents[:2]), folder):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is not a folder of this user only", str(each))


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is never seen incomplete. Does nothing if that is not possible, such as on a full disk."""
    partial = path.with_name(f"{path.name}.part")
    with contextlib.suppress(OSError):
        partial.write_text(text)
        os.replace(partial, path)


_PARENT, _SESSION, _MINOR_FAULTS, _MAJOR_FAULTS, _START = 1, 3, 7, 9, 19
_OWN_TIMES, _TIMES_OF_CHILDREN = slice(11, 13), slice(13, 15)
"""Positions in ``/proc/PID/stat`` after the name: user and system time of the process, and of its ended children."""


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    return _stat(pid)[0] in ("T", "t")


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has exited."""
    return int(_stat(pid)[_PARENT])


def start_of(pid: int) -> int:
    """Return when a process has started, in clock ticks of the machine; 0 if it has exited.

    Together with the pid it identifies a process: the system uses the numbers of processes again.
    """
    return int(_stat(pid)[_START])


def is_gone(pid: int, start: int) -> bool:
    """Return whether a process that has started at ``start`` has exited. A process for which nobody waits has too."""
    fields = _stat(pid)
    return int(fields[_START]) != start or fields[0] in ("Z", "X")


def environment_of(pid: int) -> frozenset[str]:
    """Return the variables of a process as it was started, each as ``NAME=VALUE``; empty if they are not readable."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return frozenset()
    return frozenset(text.decode(errors="replace").split("\0"))


class ProcessorUse(NamedTuple):
    """Processor time and page faults of a rank and of the processes that it has started.

    Attributes:
        seconds: processor time, in seconds.
        runs: whether one of them is running, or would be if there was a free processor.
        seconds_of_children: the part of ``seconds`` of all processes but the first, which is the rank itself.
        faults: page faults. A process that only waits for a device, in a loop, has none.
        in_file_system: whether one of them is in an uninterruptible wait (state D), as for a file system.
    """

    seconds: float = 0.0
    runs: bool = False
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
            before, is_rank = used[rank], pid == rank
            own, of_children = (sum(map(int, fields[part])) / ticks for part in (_OWN_TIMES, _TIMES_OF_CHILDREN))
            used[rank] = ProcessorUse(
                before.seconds + own + of_children,
                before.runs or fields[0] == "R",
                before.seconds_of_children + of_children + (0.0 if is_rank else own),
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
        """Return whether the process of the rank has exited."""
        return is_gone(self.pid, self.start)

    def request_stacks(self) -> None:
        """Make the rank record its stack."""
        if self.pid == os.getpid():
            stack_file.record()
        elif not self.is_gone():
            request_stack(self.files.stacks, self.pid)

    def send(self, number: int) -> None:
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def register_rank(rank: int, files: RankFiles) -> None:
    """Write the file with which the other ranks of the machine find this process."""
    own = {"rank": rank, "pid": os.getpid(), "start": start_of(os.getpid()), "host": socket.gethostname()}
    write_atomically(files.process, json.dumps(own))


def find_peers(folder: Path) -> list[Peer]:
    """Return the ranks of this machine that have registered, by rank. The folder can be one that machines share."""
    found = []
    for path in folder.glob("rank_*.pid"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            if content["host"] == socket.gethostname():
                found.append(Peer(content["rank"], RankFiles(path.with_suffix("")), content["pid"], content["start"]))
    return sorted(found, key=lambda peer: peer.rank)
