"""What the system knows of processes: whether they are stopped, and the processor time that they have used. Linux."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

_SESSION, _TIMES = 3, slice(11, 15)
"""Positions in ``/proc/PID/stat`` after the name: the session; user and system time, of the process and of children."""


def is_halted(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    fields = _stat(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] in ("T", "t")


def cpu_seconds(sessions: Collection[int]) -> dict[int, float]:
    """Return the processor time that all processes of each session have used. Reads one file per process."""
    used = dict.fromkeys(sessions, 0.0)
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(folder)
        if fields and (session := int(fields[_SESSION])) in used:
            used[session] += sum(map(int, fields[_TIMES])) / ticks
    return used


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
