"""Compares environment variables, threads, child processes, process groups and files before and after a test."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WATCHED_FOLDERS = (ROOT, ROOT / "configs", ROOT / "docs", ROOT / "hf_fsdp_plugin", ROOT / "scripts", ROOT / "tests")
_CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "outputs"})
# Set by the libraries at their first import or by pytest for every test.
_LIBRARY_VARIABLES = ("PYTEST_", "TORCH", "TRITON_", "KMP_", "KINETO_", "CUDA_MODULE_LOADING", "TF_")
_LIBRARY_THREADS = ("tqdm", "pytest_timeout", "pin_memory")
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of this process that a test must not change."""

    environ: dict[str, str]
    threads: frozenset[str]
    children: frozenset[int]
    process_group: bool
    files: frozenset[Path]

    @classmethod
    def read(cls) -> ProcessState:
        distributed = sys.modules.get("torch.distributed")
        return cls(
            environ={name: value for name, value in os.environ.items() if not name.startswith(_LIBRARY_VARIABLES)},
            threads=frozenset(_threads()),
            children=frozenset(_children()),
            process_group=distributed is not None and distributed.is_initialized(),
            files=frozenset(_files()),
        )

    def restore_environment(self) -> None:
        """Undo changes of the environment, so that one leak fails one test."""
        for name in os.environ.keys() - self.environ.keys():
            if not name.startswith(_LIBRARY_VARIABLES):
                del os.environ[name]
        os.environ.update(self.environ)


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
    lines += [f"thread {name}" for name in sorted(after.threads - before.threads)]
    lines += [f"child process {pid}: {_command(pid)}" for pid in sorted(after.children - before.children)]
    lines += [f"file {path}" for path in sorted(after.files - before.files)]
    if after.process_group and not before.process_group:
        lines.append("an initialized process group")
    return lines


def open_files_below(folder: Path) -> list[str]:
    """Return one line for each file below `folder` that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        try:
            path = os.readlink(descriptor)
        except OSError:  # closed since it was listed
            continue
        if Path(path).is_relative_to(folder):
            found.append(f"open file {path}")
    return found


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.name.startswith(_LIBRARY_THREADS):
            yield f"{thread.name} ({thread.ident})"


def _children() -> Iterator[int]:
    """Yield the direct children. Yields none on systems without ``/proc``."""
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(word) for word in listing.read_text().split()]
        except OSError:  # the thread has ended
            continue
        yield from (pid for pid in pids if "resource_tracker" not in _command(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"


def _files() -> Iterator[Path]:
    for folder in _WATCHED_FOLDERS:
        yield from (Path(entry.path) for entry in os.scandir(folder) if entry.name not in _CACHES)
    temporary = os.scandir(tempfile.gettempdir())
    yield from (Path(entry.path) for entry in temporary if not entry.name.startswith("torchinductor_"))
