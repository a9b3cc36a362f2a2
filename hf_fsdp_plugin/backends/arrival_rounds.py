"""The rounds in which all ranks arrive at the same collective call, through the store of the process group.

A round of the protocol has a number, which is kept in the store. It ends once: the last rank to arrive ends it as
complete, the first rank whose limit is over ends it as failed, and so does a rank that arrives with another call than
the first one, or that waits for a rank whose script has ended, after a short time in which more ranks may arrive. A
rank that arrives at a failed round joins the next one, so a call can be repeated after a failure. Each rank sends a
constant number of messages per call; only the rank that ends a round sends one per rank.

::

    round               number of the current round
    <n>/first           the call of the first rank that arrived
    <n>/rank<r>         the call of rank r
    <n>/count/<call>    number of ranks that have made this call
    <n>/ended           1 if a rank has ended the round; the first increment decides
    <n>/result          JSON: the rank that has ended the round, its call, the missing ranks and their other calls
    left                set if a rank has ended its script
    left/rank<r>        set if rank r has
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from hf_fsdp_plugin.torch_private.functions import default_store

_SETTLE: Final = 3.0
"""Seconds that a rank waits for further ranks if it has made another call than the first rank that arrived."""
LEFT: Final = "left"
"""Key that a rank adds to the store at the end of its script, and its "call" in a round. It makes no call any more."""
_LONGEST_PAUSE: Final = 0.25
"""Seconds between two questions to the store. The pauses grow with the time waited."""
_PAUSE_PER_RANK: Final = 1e-3 / 16
"""Seconds of the first pause for each rank, and at least a millisecond: one process answers all ranks."""


def arrival_store() -> dist.Store:
    """Return the part of the process group's store in which the rounds are."""
    return dist.PrefixStore("hf_fsdp_arrivals", default_store())


def place_store(store: dist.Store | None = None) -> dist.Store:
    """Return the part of the store in which ranks that do not move write where they are: JSON with ``place``.

    Args:
        store: a clone of the store of the process group, which is the default.
    """
    return dist.PrefixStore("hf_fsdp_places", default_store() if store is None else store)


def place_key(rank: int) -> str:
    return f"rank{rank}"


class Round:
    """One rank's part in the rounds of a store.

    Args:
        store: a store that all ranks share.
        rank, world_size: of this process; by default of the default process group.
        given_up: see :func:`wait_for_all_ranks`.
    """

    def __init__(
        self,
        store: dist.Store,
        call: str,
        rank: int | None = None,
        world_size: int | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._call, self._given_up = store, call, given_up
        self._rank = dist.get_rank() if rank is None else rank
        self._world_size = dist.get_world_size() if world_size is None else world_size

    def join(self, limit: float) -> list[tuple[int, str]]:
        """Arrive, and wait for at most ``limit`` seconds.

        Returns:
            The ranks that did not arrive, each with the call that it made instead; empty if all arrived.
        """
        while True:
            number = self._store.add("round", 0)
            if self._ended(number):
                continue  # the rank that ended it is about to start the next round
            self._store.set(f"{number}/rank{self._rank}", self._call)
            try:
                if self._store.compare_set(f"{number}/first", "", self._call).decode() != self._call:
                    limit = min(limit, _SETTLE)
                if self._store.add(f"{number}/count/{self._call}", 1) == self._world_size:
                    self._end(number, complete=True)
                elif not self._wait(number, limit):
                    self._end(number, complete=False)
            except BaseException:  # for example KeyboardInterrupt: this rank must not be counted twice if it retries
                self._end(number, complete=False)
                raise
            result = self._result(number)
            missing = [(rank, call) for rank, call in result["missing"]]
            mine = dict(missing).get(self._rank)
            if mine is None:
                return missing
            if mine == self._call:  # this rank arrived in time, but made another call
                return [(result["rank"], result["call"])]
            # The round failed while this rank was arriving.

    def _ended(self, number: int) -> bool:
        return bool(self._store.check([f"{number}/result"]))

    def _wait(self, number: int, limit: float) -> bool:
        """Return whether the round ended within ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while (remaining := deadline - time.monotonic()) > 0:
            if remaining > _SETTLE and (self._given_up() or self._store.check([LEFT])):
                deadline = time.monotonic() + min(remaining, _SETTLE)
            if self._ended(number):
                return True
            # Not store.wait: it prints a warning when its time is over, and handles no signals.
            waited = limit - remaining
            first = max(0.001, self._world_size * _PAUSE_PER_RANK)
            time.sleep(min(max(first, waited / 20), _LONGEST_PAUSE, remaining))
        return self._ended(number)

    def _end(self, number: int, *, complete: bool) -> None:
        """End the round, unless another rank ends it."""
        if self._store.add(f"{number}/ended", 1) != 1:
            return
        missing = [] if complete else self._missing(number)
        self._store.add("round", 1)
        result = {"rank": self._rank, "call": self._call, "missing": missing}
        self._store.set(f"{number}/result", json.dumps(result))
        if complete:
            self._delete(number - 1)  # every rank is in this round, so none reads the previous one

    def _missing(self, number: int) -> list[tuple[int, str]]:
        calls = []
        for rank in range(self._world_size):
            key = f"{number}/rank{rank}"
            if self._store.check([key]):
                calls.append(self._store.get(key).decode())
            else:
                calls.append(LEFT if self._store.check([f"{LEFT}/rank{rank}"]) else "")
        return [(rank, call) for rank, call in enumerate(calls) if call != self._call]

    def _delete(self, number: int) -> None:
        keys = [f"{number}/rank{rank}" for rank in range(self._world_size)]
        for key in (*keys, f"{number}/first", f"{number}/count/{self._call}", f"{number}/ended", f"{number}/result"):
            if number >= 0:
                self._store.delete_key(key)

    def _result(self, number: int) -> dict[str, Any]:
        self._store.wait([f"{number}/result"], timedelta(seconds=60))
        result: dict[str, Any] = json.loads(self._store.get(f"{number}/result"))
        return result
