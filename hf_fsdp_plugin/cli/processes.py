"""What the system knows of processes: whether they are stopped, and the processor time that they have used. Linux."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_SESSION, _TIMES = 3, slice(11, 15)
"""Positions in ``/proc/PID/stat`` after the name: the session; user and system time, of the process and of children."""


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    fields = _stat(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] in ("T", "t")


class Use(NamedTuple):
    """What the processes of a session have used.

    Attributes:
        seconds: processor time, in seconds.
        runs: whether one of them is running, or would be if there was a free processor.
    """

    seconds: float = 0.0
    runs: bool = False


def processor_use(sessions: Collection[int]) -> dict[int, Use]:
    """Return what the processes of each session have used. Reads one file per process of the machine."""
    used = dict.fromkeys(sessions, Use())
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(folder)
        if fields and (session := int(fields[_SESSION])) in used:
            seconds, runs = used[session]
            used[session] = Use(seconds + sum(map(int, fields[_TIMES])) / ticks, runs or fields[0] == "R")
    return used


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
