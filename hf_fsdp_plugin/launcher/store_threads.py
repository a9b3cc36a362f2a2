"""Threads that ask the store of several machines, and the end of a process beside them. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

PREFIX: Final = "hf_fsdp_store_"
"""Begin of the names of the launcher's threads that ask the store."""
_TORCH_PREFIX: Final = "RendezvousKeepAliveTimer"
"""The same for the thread of torch's c10d rendezvous, which torch does not stop."""


def exit_beside_store_threads(code: int) -> None:
    """Exit at once if threads may be in a request to a store, which the network can delay for minutes.

    Such a thread cannot be stopped. While the interpreter ends, Python ends a thread that returns from C++ code, and
    pybind11 then ends the process with ``terminate called without an active exception`` and exit code 134.
    """
    if any(thread.name.startswith((PREFIX, _TORCH_PREFIX)) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
