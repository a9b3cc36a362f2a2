"""The pulse of a launcher among several machines: it shows that it lives, and notices machines that are gone.

Every launcher increases a counter in the store each second. The launcher of machine 0 watches all counters, the others
watch that of machine 0, so the number of messages grows with the number of machines only. The store is asked in a
thread: if the network is down, a request waits for minutes, and the launcher has to stop its ranks before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from hf_fsdp_plugin.launcher.launcher_store import LauncherStore, beat_key
from hf_fsdp_plugin.launcher.store_threads import PREFIX

LIMIT_VARIABLE = "HF_FSDP_MACHINE_TIMEOUT"
"""Environment variable with the seconds after which a silent machine counts as lost."""
DEFAULT_LIMIT = 15.0
"""As in torchrun's c10d rendezvous: three missed signs of life, one every five seconds."""
_BEAT_SECONDS = 1.0


def silence_limit() -> float:
    """Return the limit in seconds. Raises ``ValueError`` if the environment variable is not a positive number."""
    limit = float(os.environ.get(LIMIT_VARIABLE, "").strip() or DEFAULT_LIMIT)
    if not limit > 0:
        raise ValueError
    return limit


class Pulse:
    """Beats until it is closed. All attributes can be read without waiting.

    Attributes:
        announced: the failure of a rank that a machine has announced; empty without one.
        broken: whether the store is gone.
    """

    def __init__(self, store: LauncherStore, watched: Sequence[int]) -> None:
        self._store = store
        self._limit = silence_limit()
        now = time.monotonic()
        self._answered = now
        self._beats: dict[int, bytes] = {}
        self._seen = dict.fromkeys(watched, now)
        self._left: set[int] = set()
        self._closed = threading.Event()
        self.announced = ""
        self.broken = False
        self._thread = threading.Thread(target=self._run, name=f"{PREFIX}pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating. Does not wait for a request that the network delays."""
        self._closed.set()
        self._thread.join(_BEAT_SECONDS)

    def is_alone(self) -> bool:
        """Return whether the store is gone or has been silent for too long."""
        return self.broken or time.monotonic() - self._answered > self._limit

    def silent(self) -> list[int]:
        """Return the watched machines that have been silent for too long and have not left."""
        deadline = self._answered - self._limit
        return [machine for machine, seen in self._seen.items() if machine not in self._left and seen < deadline]

    def has_left(self, machine: int) -> bool:
        return machine in self._left

    def _run(self) -> None:
        number = 0
        try:
            while not self._closed.wait(_BEAT_SECONDS if number else 0):
                number += 1
                self._store.set(beat_key(self._store.machine), f"{os.getpid()} {number}")
                self._look()
                self._answered = time.monotonic()
        except Exception:  # the process that hosts the store can fail in many ways
            self.broken = True

    def _look(self) -> None:
        failed = self._store.key("failed")
        if not self.announced and self._store.has(failed):
            self.announced = self._store.get(failed)
        machines = [machine for machine in self._seen if machine not in self._left]
        keys = [beat_key(machine) for machine in machines]
        if not keys or not self._store.has(*keys):  # at the beginning
            return
        now = time.monotonic()
        for machine, beat in zip(machines, self._store.store.multi_get(keys), strict=True):
            if self._beats.get(machine) != beat:
                self._beats[machine], self._seen[machine] = beat, now
            elif now - self._seen[machine] > 2 * _BEAT_SECONDS and self._store.has_left(machine):
                self._left.add(machine)
