"""Compares the state of the process before and after a test: variables, handlers, threads, processes, groups, files."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_WATCHED_FOLDERS = (ROOT, ROOT / "configs", ROOT / "docs", ROOT / "hf_fsdp_plugin", ROOT / "scripts", ROOT / "tests")
_CACHES = frozenset({"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "outputs"})
# Set by the libraries at their first import or by pytest for every test.
_LIBRARY_VARIABLES = ("PYTEST_", "TORCH", "TRITON_", "KMP_", "KINETO_", "CUDA_MODULE_LOADING", "TF_")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LIBRARY_THREADS = ("tqdm", "pytest_timeout", "pin_memory", "fsspecIO", "asyncio_")
_GRACE_SECONDS = 5.0
_CLOCK_TICK_NS = 50_000_000
"""More than the resolution of the times of files."""
_listed: dict[str, tuple[int, tuple[str, ...]]] = {}
"""Folder -> the time of its last change, and the paths in it."""
_last_files: tuple[tuple[tuple[str, ...], ...], frozenset[str]] | None = None
"""The paths in all watched folders, and their union."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of this process that a test must not change."""

    environ: dict[str, str]
    handlers: dict[signal.Signals, Any]
    threads: frozenset[str]
    children: frozenset[int]
    process_group: bool
    files: frozenset[str]

    @classmethod
    def read(cls) -> ProcessState:
        distributed = sys.modules.get("torch.distributed")
        return cls(
            environ={name: value for name, value in os.environ.items() if not name.startswith(_LIBRARY_VARIABLES)},
            handlers={number: signal.getsignal(number) for number in _SIGNALS},
            threads=frozenset(_threads()),
            children=frozenset(_children()),
            process_group=distributed is not None and distributed.is_initialized(),
            files=_files(),
        )

    def restore(self) -> None:
        """Undo changes of the environment and of the handlers of signals, so that one leak fails one test."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for name in os.environ.keys() - self.environ.keys():
            if not name.startswith(_LIBRARY_VARIABLES):
                del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def leaks_since(before: ProcessState, *, files: bool = True) -> list[str]:
    """:func:`differences` between now and ``before``. Threads and child processes get time to end.

    Args:
        files: whether new files count as leaks.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        after = ProcessState.read()
        leaks = differences(before, after if files else replace(after, files=before.files))
        if time.monotonic() > deadline or not any(line.startswith(("thread", "child process")) for line in leaks):
            return leaks
        time.sleep(0.05)


def differences(before: ProcessState, after: ProcessState) -> list[str]:
    """Return one line for each difference, which is a leak."""
    changed = sorted(
        name
        for name in before.environ.keys() | after.environ.keys()
        if before.environ.get(name) != after.environ.get(name)
    )
    lines = [f"environment variable {name}={after.environ.get(name)!r}" for name in changed]
    lines += [
        f"handler of {number.name}: {handler}"
        for number, handler in after.handlers.items()
        if before.handlers.get(number) is not handler
    ]
    lines += [f"thread {name}" for name in sorted(after.threads - before.threads)]
    lines += [f"child process {pid}: {_command(pid)}" for pid in sorted(after.children - before.children)]
    lines += [f"file {path}" for path in sorted(after.files - before.files)]
    if after.process_group and not before.process_group:
        lines.append("an initialized process group")
    return lines


def open_files_below(folder: Path) -> list[str]:
    """Return one line for each file below `folder` that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # closed since it was listed
            continue
        if path.startswith(f"{folder}/"):
            found.append(f"open file {path}")
    return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.name.startswith(_LIBRARY_THREADS):
            yield f"{thread.name} ({thread.ident})"


def _children() -> Iterator[int]:
    """Yield the direct children. Yields none on systems without ``/proc``."""
    tasks = "/proc/self/task"
    for thread in os.listdir(tasks) if os.path.isdir(tasks) else ():
        try:
            with open(f"{tasks}/{thread}/children") as listing:
                pids = [int(word) for word in listing.read().split()]
        except OSError:  # the thread has ended
            continue
        yield from (pid for pid in pids if "resource_tracker" not in _command(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"


def _files() -> frozenset[str]:
    global _last_files
    listed = tuple(map(_entries, (*map(str, _WATCHED_FOLDERS), tempfile.gettempdir())))
    if _last_files is None or _last_files[0] != listed:
        _last_files = listed, frozenset().union(*listed)
    return _last_files[1]


def _entries(folder: str) -> tuple[str, ...]:
    """Return the paths in a folder, which is listed again only if it has changed: this runs twice for each test."""
    changed = os.stat(folder).st_mtime_ns
    known = _listed.get(folder)
    if known is not None and known[0] == changed:
        return known[1]
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith("torchinductor_")]
    found = tuple(entry.path for entry in entries if entry.name not in _CACHES)
    if time.time_ns() - changed > _CLOCK_TICK_NS:  # otherwise a later change may have the same time
        _listed[folder] = changed, found
    return found
