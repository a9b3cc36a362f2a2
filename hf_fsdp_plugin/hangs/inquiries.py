"""How the launcher of one machine asks the others what their ranks do, over the store of the rendezvous.

Each question has a number. Each machine writes one answer per question, and only the asking machine reads them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

from hf_fsdp_plugin.hangs.calls import RankCalls, from_json
from hf_fsdp_plugin.launcher.launcher_store import POLL_SECONDS, LauncherStore, StoreLost

ASKED: Final = "hang/asked"
"""Key of the number of questions."""
_MAX_ANSWER: Final = 64 << 20
"""Maximum number of bytes of the records of a machine."""
_LIMIT: Final = 10.0
"""Seconds that a machine has to answer, in which it reads its ranks' stacks."""


class Inquiries:
    """The questions of a single machine: there is nobody to ask."""

    def is_asked(self) -> bool:
        """Return whether another machine waits for the answer of this one."""
        return False

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        """Answer with the ranks of this machine."""

    def ask(self, ranks: Sequence[RankCalls]) -> tuple[list[RankCalls], list[int]] | None:
        """Return the ranks of the other machines, and the machines that did not answer.

        Returns ``None`` if a machine announces a failure meanwhile: it reports the cause, and does not answer any more.

        Args:
            ranks: the ranks of this machine, in case another one asks at the same time.
        """
        return [], []


class StoreInquiries(Inquiries):
    """The questions of several machines that share a store.

    Args:
        num_asked: returns how many questions there were, without waiting for the store.
    """

    def __init__(self, store: LauncherStore, num_machines: int, num_asked: Callable[[], int]) -> None:
        self._store, self._num_machines, self._num_asked = store, num_machines, num_asked
        self._last = 0

    def is_asked(self) -> bool:
        return self._num_asked() > self._last

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        with contextlib.suppress(StoreLost):  # the machine that asks reports this one as silent
            self._store.ask(lambda: self._answer(ranks))

    def ask(self, ranks: Sequence[RankCalls]) -> tuple[list[RankCalls], list[int]] | None:
        found: list[RankCalls] = []
        silent = [machine for machine in range(self._num_machines) if machine != self._store.machine]
        with contextlib.suppress(StoreLost):
            if not self._store.ask(lambda: self._collect(ranks, found, silent), 2 * _LIMIT):
                return None
        return list(found), list(silent)

    def _answer(self, ranks: Sequence[RankCalls]) -> None:
        newest = self._store.count(self._store.key(ASKED))
        if newest > self._last:
            text = _pack(ranks)
            for number in range(self._last + 1, newest + 1):
                self._store.set(self._store.own(f"hang/{number}"), text)
                self._store.count(self._num_answers(number), 1)
            self._last = newest

    def _num_answers(self, number: int) -> str:
        """Return the key of the number of machines that have answered a question, including the one that asks.

        A machine that waits asks for this number only: after a hang of a job, all machines ask at the same time.
        """
        return self._store.key(f"hang/{number}/answers")

    def _collect(self, ranks: Sequence[RankCalls], found: list[RankCalls], silent: list[int]) -> bool:
        """Move the machines that answer from ``silent`` to ``found``. Returns whether no failure was announced."""
        store = self._store
        number = store.count(store.key(ASKED), 1)
        deadline, num_read = time.monotonic() + _LIMIT, 0
        while silent and time.monotonic() < deadline:
            if store.has_failure():
                return False
            self._answer(ranks)  # to other machines that ask at the same time
            num_answers = store.count(self._num_answers(number))
            for machine in list(silent) if num_answers > num_read else ():
                key = store.key(f"hang/{number}/{machine}")
                if store.has(key):
                    with contextlib.suppress(ValueError):
                        found += _unpack(store.get(key))
                        silent.remove(machine)
            num_read = num_answers
            time.sleep(POLL_SECONDS)
        return True


def _pack(ranks: Sequence[RankCalls]) -> str:
    return base64.b64encode(zlib.compress(json.dumps([rank.to_json() for rank in ranks]).encode())).decode()


def _unpack(text: str) -> list[RankCalls]:
    """Return the records of a machine. Raises ``ValueError`` for any text that :func:`_pack` does not return."""
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(base64.b64decode(text), _MAX_ANSWER)
        if not inflated.eof:
            raise ValueError(f"an answer with more than {_MAX_ANSWER:,} bytes, or a part of one")
        return [from_json(content) for content in json.loads(data)]
    except (zlib.error, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
