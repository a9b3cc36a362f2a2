"""Finds and ends what the ranks of a run leave behind: processes that a script has started and not waited for.

Each rank has the name of its run in its environment. Children inherit it, also those that begin a session of their own
or whose parent has exited, so the environment in ``/proc`` identifies every process of a run. Linux only; elsewhere the
launcher ends the process groups of the ranks.

This file also runs as a program, the guard: it waits until the launcher exits, and if the launcher was killed, it kills
the processes of the run. The guard imports only the standard library, so that it is small and starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "HF_FSDP_RUN"
_PATIENCE_SECONDS = 5.0
"""Seconds that a process has to exit after its rank, and again after SIGTERM."""
_GUARD_SECONDS = 10.0
"""Seconds for which the guard looks for processes to kill."""
_POLL_SECONDS = 0.05
_DONE = b"done"


@dataclass(frozen=True, slots=True)
class OrphanProcess:
    """A process that still runs although its rank has exited.

    Attributes:
        rank: the rank that started it.
        command: its command line.
    """

    pid: int
    rank: str
    command: str


def attempt_name() -> str:
    """Return a name for the processes of one attempt, unique on this machine."""
    return f"{os.getpid()}-{time.time_ns()}"


def processes_of(run: str) -> list[OrphanProcess]:
    """Return the running processes whose environment names this run. Zombies are not included."""
    wanted = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            if wanted in environ:
                rank = next((line[5:] for line in environ if line.startswith(b"RANK=")), b"?")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").strip()
                found.append(OrphanProcess(int(folder.name), rank.decode(), command.decode(errors="replace")))
        except OSError:  # it has exited, or it belongs to another user
            continue
    return found


def end_processes(run: str, *, on_term: Callable[[list[OrphanProcess]], None] | None = None) -> None:
    """End the processes of a run whose ranks have exited.

    Args:
        on_term: with it, the processes get time to exit; it is called with those that need SIGTERM. Without it, they
            are killed at once.
    """
    if on_term is not None:
        left = _wait(run)
        if not left:
            return
        on_term(left)
        _send(left, signal.SIGTERM)
        _wait(run)
    _wait(run, signal.SIGKILL)


def _wait(run: str, number: int | None = None, seconds: float = _PATIENCE_SECONDS) -> list[OrphanProcess]:
    """Return the processes that have not exited in time.

    Args:
        number: signal that is sent to them until then.
    """
    deadline = time.monotonic() + seconds
    while (left := processes_of(run)) and time.monotonic() < deadline:
        if number is not None:
            _send(left, number)
        time.sleep(_POLL_SECONDS)
    return left


def _send(processes: list[OrphanProcess], number: int) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except OSError:  # it has exited
            continue


class Guard:
    """The process that ends a run whose launcher was killed. It exits with the launcher."""

    def __init__(self, run: str, scratch: Path) -> None:
        """``scratch`` is the launcher's temporary folder, which the guard removes if the launcher cannot."""
        command = [sys.executable, "-I", "-S", __file__, run, str(scratch)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """Dismiss the guard: no process of the run is left."""
        try:
            self._process.communicate(_DONE)
        except OSError:  # something has killed the guard
            self._process.wait()


def guard_run(run: str, scratch: str) -> None:
    """Wait for the launcher to exit. If it was killed, kill the processes of its run. The program of the guard."""
    if sys.stdin.buffer.read() == _DONE:
        return
    _wait(run, signal.SIGKILL, _GUARD_SECONDS)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    guard_run(*sys.argv[1:])
