"""How the launcher of one machine asks the others what their ranks do, over the store of the rendezvous.

Each question has a number. Each machine writes one answer per question, and only the asking machine reads them.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

from hf_fsdp_plugin.observe.hang.calls import RankCalls, from_json

_PAUSE: Final = 0.5
_LIMIT: Final = 10.0
"""Seconds that a machine has to answer, in which it reads its ranks' stacks."""


class Inquiries:
    """The questions of a single machine: there is nobody to ask."""

    def is_asked(self) -> bool:
        """Return whether another machine waits for the answer of this one."""
        return False

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        """Answer with the ranks of this machine."""

    def ask(self, ranks: Sequence[RankCalls]) -> tuple[list[RankCalls], list[int]]:
        """Return the ranks of the other machines, and the machines that did not answer.

        Args:
            ranks: the ranks of this machine, in case another one asks at the same time.
        """
        return [], []


class StoreInquiries(Inquiries):
    """The questions of several machines that share a store."""

    def __init__(self, store: Any, machine: int, num_machines: int) -> None:
        self._store, self._machine, self._num_machines = store, machine, num_machines
        self._last = 0
        self._next_check = 0.0

    def is_asked(self) -> bool:
        if time.monotonic() < self._next_check:
            return False
        self._next_check = time.monotonic() + _PAUSE
        try:
            return int(self._store.add("hang/asked", 0)) > self._last
        except Exception:  # see StorePeers.failure
            return False

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        try:
            newest = int(self._store.add("hang/asked", 0))
            text = _pack(ranks)
            for number in range(self._last + 1, newest + 1):
                self._store.set(f"hang/{number}/{self._machine}", text)
            self._last = newest
        except Exception:  # the machine that asks reports this one as silent
            return

    def ask(self, ranks: Sequence[RankCalls]) -> tuple[list[RankCalls], list[int]]:
        silent = [machine for machine in range(self._num_machines) if machine != self._machine]
        found: list[RankCalls] = []
        try:
            number = int(self._store.add("hang/asked", 1))
            deadline = time.monotonic() + _LIMIT
            while silent and time.monotonic() < deadline:
                self.answer(ranks)
                for machine in list(silent):
                    if self._store.check([f"hang/{number}/{machine}"]):
                        found += _unpack(self._store.get(f"hang/{number}/{machine}"))
                        silent.remove(machine)
                time.sleep(0.1)
        except Exception:  # the launcher that hosts the store has exited
            return found, silent
        return found, silent


def _pack(ranks: Sequence[RankCalls]) -> str:
    return base64.b64encode(zlib.compress(json.dumps([rank.to_json() for rank in ranks]).encode())).decode()


def _unpack(text: bytes) -> list[RankCalls]:
    return [from_json(content) for content in json.loads(zlib.decompress(base64.b64decode(text)))]
