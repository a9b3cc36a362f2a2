"""The processes of ranks: what the system knows of them, and how the ranks of one machine find each other. Linux."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hf_fsdp_plugin.hangs.rank_files import RankFiles, write_atomically
from hf_fsdp_plugin.hangs.rank_stacks import request_stack, stack_file

_PARENT, _SESSION, _MINOR_FAULTS, _MAJOR_FAULTS, _START = 1, 3, 7, 9, 19
_OWN_TIMES, _TIMES_OF_CHILDREN = slice(11, 13), slice(13, 15)
"""Positions in ``/proc/PID/stat`` after the name. Times are user and system time; those of children that have ended."""


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    fields = _stat(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] in ("T", "t")


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has exited."""
    fields = _stat(Path(f"/proc/{pid}"))
    return int(fields[_PARENT]) if fields else 0


def start_of(pid: int) -> int:
    """Return when a process has started, in clock ticks of the machine; 0 if it has exited.

    Together with the pid it identifies a process: the system uses the numbers of processes again.
    """
    fields = _stat(Path(f"/proc/{pid}"))
    return int(fields[_START]) if fields else 0


def is_gone(pid: int, start: int) -> bool:
    """Return whether a process that has started at ``start`` has exited. A process for which nobody waits has too."""
    fields = _stat(Path(f"/proc/{pid}"))
    return not fields or int(fields[_START]) != start or fields[0] in ("Z", "X")


def environment_of(pid: int) -> frozenset[str]:
    """Return the variables of a process as it was started, each as ``NAME=VALUE``; empty if they are not readable."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return frozenset()
    return frozenset(text.decode(errors="replace").split("\0"))


class ProcessorUse(NamedTuple):
    """What a rank and the processes that it has started have used.

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
    """Return what each rank, its descendants and its session have used. Reads one file per process of the machine."""
    used = dict.fromkeys(ranks, ProcessorUse())
    ticks = os.sysconf("SC_CLK_TCK")
    read = {int(folder.name): fields for folder in Path("/proc").glob("[0-9]*") if (fields := _stat(folder))}
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


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of this machine; also the calling one.

    Attributes:
        start: when its process has started (see ``processes.start_of``).
    """

    rank: int
    files: RankFiles
    pid: int
    start: int

    def is_gone(self) -> bool:
        """Return whether its process has exited."""
        return is_gone(self.pid, self.start)

    def request_stacks(self) -> None:
        """Make it record its stack."""
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
