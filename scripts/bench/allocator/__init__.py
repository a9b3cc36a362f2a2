"""What torch's CPU allocator holds, counted exactly, on all threads.

torch's profiler loses frees on the threads of gloo, and the resident set contains libraries and free lists. Here a
small library in C takes the place of the two functions that allocate and free every storage on the CPU. It must be
preloaded:

    restart_with_counter()                  # first in main(): compiles the library and restarts the program with it
    counter = AllocatorCounter()
    counter.reset_peak()
    step()
    print(counter.peak)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("counter.c")
_FOLDER = "HF_FSDP_ALLOCATOR_FOLDER"
"""Environment variable with the folder of the preloaded library."""


class NoCounter(Exception):
    """The allocator's memory cannot be counted on this machine."""


def build(folder: Path) -> Path:
    """Compile the library into ``folder`` and return its path.

    Raises:
        NoCounter: the system is not Linux, or has no C compiler, or the compiler fails.
    """
    if not sys.platform.startswith("linux"):
        raise NoCounter(f"The allocator's memory can be counted on Linux only, not on {sys.platform}.")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NoCounter("No C compiler was found (cc, gcc or clang). Install one to measure the allocator's memory.")
    library = folder / "liballocatorcounter.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCounter(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return library


def preloaded(library: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process in which the library is preloaded."""
    others = environ.get("LD_PRELOAD", "")
    return {**environ, "LD_PRELOAD": f"{library}:{others}".rstrip(":"), _FOLDER: str(library.parent)}


def restart_with_counter() -> None:
    """Restart this program with the library preloaded, unless it is. Call it before torch is imported."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        library = build(Path(tempfile.mkdtemp(prefix="allocator_")))
        os.execve(sys.executable, sys.orig_argv, preloaded(library))
    if folder.startswith(tempfile.gettempdir()):
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


class AllocatorCounter:
    """The counters of this process, in bytes.

    Raises:
        NoCounter: the library is not preloaded.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "hf_fsdp_allocator_peak"):
            raise NoCounter("The library is not preloaded. Call restart_with_counter() before torch is imported.")
        for name in ("current", "peak", "blocks", "num_events"):
            getattr(library, f"hf_fsdp_allocator_{name}").restype = ctypes.c_int64
        library.hf_fsdp_allocator_record.restype = ctypes.POINTER(ctypes.c_int64)
        library.hf_fsdp_allocator_record.argtypes = [ctypes.c_int64]
        self._library = library

    @property
    def current(self) -> int:
        return int(self._library.hf_fsdp_allocator_current())

    @property
    def peak(self) -> int:
        """The largest value of ``current`` since the last :meth:`reset_peak`."""
        return int(self._library.hf_fsdp_allocator_peak())

    @property
    def blocks(self) -> int:
        """Number of blocks that are allocated now."""
        return int(self._library.hf_fsdp_allocator_blocks())

    def reset_peak(self) -> None:
        self._library.hf_fsdp_allocator_reset_peak()

    def record(self, capacity: int = 1 << 20) -> None:
        """Start to record allocations and frees, up to ``capacity`` of them. 0 ends recording."""
        self._recorded = self._library.hf_fsdp_allocator_record(capacity)
        self._capacity = capacity

    def events(self) -> list[tuple[int, int]]:
        """Return what was recorded, as (address, bytes); the bytes are negative if a block was freed.

        Raises:
            NoCounter: there were more events than could be recorded.
        """
        count = int(self._library.hf_fsdp_allocator_num_events())
        if count > self._capacity:
            raise NoCounter(f"{count} allocations and frees were made; {self._capacity} could be recorded.")
        values = self._recorded[: 2 * count]
        return list(zip(values[::2], values[1::2], strict=True))
