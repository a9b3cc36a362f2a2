"""How the machines of a job ask each other what their ranks do, over a connection of their own to the job's store.

One rank of each machine watches it, and asks or answers for it. It reads one counter per second; everything else is
sent only if ranks have waited for long. After a hang, the ranks of all machines wait: one machine asks, and the others
answer and wait for what it announces.

::

    machine/<r>     name of the machine of rank r
    asked           number of questions and announcements: the counter that is read each second
    <q>/<r>         the answer to question q of the machine whose lowest rank is r: the records of its ranks
    <q>/answers     number of these answers
    announced       JSON: the hang that ends the ranks of all machines
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

import torch.distributed as dist

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.calls import RankCalls, rank_from_json
from hf_fsdp_plugin.hangs.watch_files import FoundHang
from hf_fsdp_plugin.rank_variables import RUN_ID_VARIABLE
from hf_fsdp_plugin.torch_private.functions import default_store

THREAD: Final = "hf_fsdp_store"
"""Name of the threads that are in a request to the store."""
_UNKNOWN_MACHINE: Final = "another machine"

_T = TypeVar("_T")


class JobStore:
    """A connection to the store of the job whose requests never wait without end: each has a thread and a limit.

    Args:
        connect: returns the connection.
        waiting: called several times per second during a request.
    """

    def __init__(self, connect: Callable[[], Any], waiting: Callable[[], None] = lambda: None) -> None:
        self._connect, self._waiting = connect, waiting
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def ask(self, request: Callable[[Any], _T], seconds: float = time_limits.REQUEST) -> _T | None:
        """Return the result of requests to the store; ``None`` if the store is gone, or does not answer in time."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return None  # the request before has not ended: the host of the store is stopped, or the network down
        results: list[_T] = []

        def call() -> None:
            with contextlib.suppress(Exception):  # the process that hosts the store can fail in many ways
                if self._store is None:
                    self._store = self._connect()
                results.append(request(self._store))

        self._thread = threading.Thread(target=call, name=THREAD, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not self._is_closed:
            self._thread.join(time_limits.POLL)
            self._waiting()
        return results[0] if results else None

    def close(self) -> None:
        """Allow no more requests, and end the one that another thread waits for."""
        self._is_closed = True

    def join(self, seconds: float) -> bool:
        """Return whether no request is left after at most ``seconds``."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()


class HangQueries:
    """The questions of a machine to the others.

    Args:
        store: shared by all machines. It is not used if this machine has all ranks, which has nobody to ask.
        ranks: the ranks of this machine.
        world_size: number of ranks of all machines.

    Attributes:
        announced: the hang that another machine has announced; ``None`` without one.
    """

    def __init__(self, store: JobStore | None = None, *, ranks: Sequence[int] = (), world_size: int = 0) -> None:
        self._store = store if len(ranks) < world_size else None
        self._ranks, self._world_size = tuple(ranks), world_size
        host, machine = socket.gethostname(), os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
        self._name = f"machine {machine} ({host})" if machine else f"machine {host}"
        self.announced: FoundHang | None = None
        self._is_named = False
        self._asked = self._answered = 0
        self._next_look = self._asks_from = 0.0

    def is_asked(self) -> bool:
        """Return whether another machine waits for the answer of this one."""
        now = time.monotonic()
        if self._store is not None and now >= self._next_look:
            self._next_look = now + time_limits.LOOK
            self._store.ask(self._look)
        return self._asked > self._answered and self.announced is None

    def _look(self, store: Any) -> None:
        if not self._is_named:
            self._is_named = True
            for rank in self._ranks:
                store.set(f"machine/{rank}", self._name)
        if (asked := store.add("asked", 0)) != self._asked:
            self._asked = asked
            self._has_announcement(store)

    def _has_announcement(self, store: Any) -> bool:
        if self.announced is None and store.check(["announced"]):
            self.announced = FoundHang(**json.loads(store.get("announced")))
        return self.announced is not None

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        """Answer with the ranks of this machine."""
        if self._store is not None:
            # If the store is lost, the machine that asks reports this one as unreachable.
            self._store.ask(lambda store: self._answer(store, ranks))

    def _answer(self, store: Any, ranks: Sequence[RankCalls], own_question: int = 0) -> bool:
        """Answer the questions of other machines. Returns whether there were any."""
        newest = store.add("asked", 0)
        questions = [number for number in range(self._answered + 1, newest + 1) if number != own_question]
        for question in questions:
            own = [rank.to_json() for rank in ranks if rank.rank in self._ranks]
            store.set(f"{question}/{min(self._ranks)}", zlib.compress(json.dumps(own).encode()))
            store.add(f"{question}/answers", 1)
        self._answered = self._asked = newest
        if questions:
            self._asks_from = time.monotonic() + time_limits.ANSWER
        return bool(questions)

    def ask(self, ranks: Sequence[RankCalls], seconds: float = time_limits.ANSWER) -> list[RankCalls] | None:
        """Return the ranks of the other machines; those of machines that did not answer are unreachable.

        Returns ``None`` if another machine asks or has just asked, which announces what it finds, or if one has
        announced a hang: it does not answer any more.

        Args:
            ranks: the ranks of this machine, in case another one asks at the same time.
            seconds: time to answer.
        """
        if self._store is None:
            return []
        if time.monotonic() < self._asks_from:
            return None
        deadline = time.monotonic() + seconds
        others = {
            rank: RankCalls(rank=rank, state="unreachable", detail=_UNKNOWN_MACHINE)
            for rank in range(self._world_size)
            if rank not in self._ranks
        }

        def request(store: Any) -> bool:
            self._look(store)
            is_asked = self._answer(store, ranks)  # then another machine announces what it finds
            return not is_asked and self._collect(store, ranks, others, deadline)

        return None if self._store.ask(request, 2 * seconds) is False else list(others.values())

    def _collect(self, store: Any, ranks: Sequence[RankCalls], others: dict[int, RankCalls], deadline: float) -> bool:
        """Replace the ranks of the machines that answer in ``others``, and name the machines that do not.

        Returns whether no hang was announced.

        Args:
            ranks: the answer to machines that ask at the same time.
        """
        question, missing, num_answers = store.add("asked", 1), set(others), 0
        while missing and time.monotonic() < deadline:
            if self._has_announcement(store):
                return False
            self._answer(store, ranks, question)
            # A machine that waits asks for this number only: after a hang of a job, all machines ask at the same time.
            before, num_answers = num_answers, store.add(f"{question}/answers", 0)
            for rank in sorted(missing) if num_answers > before else ():
                if rank in missing and store.check([f"{question}/{rank}"]):
                    answer = json.loads(zlib.decompress(store.get(f"{question}/{rank}")))
                    others |= {each["rank"]: rank_from_json(each) for each in answer}
                    missing -= {each["rank"] for each in answer}
            time.sleep(time_limits.POLL)
        for rank in missing:
            if store.check([f"machine/{rank}"]):
                others[rank] = replace(others[rank], detail=store.get(f"machine/{rank}").decode())
        return True

    def announce(self, hang: FoundHang, machine: str) -> FoundHang:
        """Announce a hang of ``machine``, which ends the ranks of all machines. Returns the first announced hang."""
        text = json.dumps(asdict(hang.of_machine(machine)))

        def request(store: Any) -> None:
            if store.compare_set("announced", "", text).decode() != text:
                self._has_announcement(store)
            store.add("asked", 1)

        if self._store is not None:
            self._store.ask(request)  # if the store is lost, the other machines find the hang themselves
        return self.announced or hang


def watch_store() -> dist.Store:
    """Return a connection of its own to the store of the default process group."""
    return dist.PrefixStore(f"hf_fsdp_watch/{os.environ.get(RUN_ID_VARIABLE, '')}", default_store().clone())
