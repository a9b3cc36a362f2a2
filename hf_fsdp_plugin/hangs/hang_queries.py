"""How the machines of a job ask each other what their ranks do, over a connection of their own to the job's store.

One rank of each machine watches it, and asks or answers for it. It reads one counter per second; everything else is
sent only if ranks have waited for long. After a hang, the ranks of all machines wait: one machine asks, and the others
answer and wait for what it announces. After a failure, the first few that have lost a connection ask. So the number of
messages grows with the number of machines, and not with its square.

::

    machine/<r>     name of the machine of rank r
    asked           number of questions and announcements: the counter that is read each second
    failed/<m>      number of machines that have wanted to ask after a failure in minute m, because torch may keep the
                    store when it starts the ranks again
    <q>/answers     number of machines that answer question q
    <q>/<n>         the n-th answer: the records of the ranks of a machine
    announced       JSON: the hang that ends the ranks of all machines
"""

from __future__ import annotations

import base64
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
from hf_fsdp_plugin.backends.ranks import agreement
from hf_fsdp_plugin.hangs.calls import RankCalls, rank_from_json, record
from hf_fsdp_plugin.hangs.python_stacks import current_stack, find_place
from hf_fsdp_plugin.hangs.watch_files import FoundHang
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.rank_variables import RUN_ID_VARIABLE
from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.torch_private.functions import default_store

THREAD: Final = "hf_fsdp_store"
"""Name of the threads that are in a request to the store."""
_MAX_ANSWER: Final = 64 << 20
"""Maximum number of bytes of the records of a machine."""
_MOST_FAILED: Final = 8
"""Number of machines that ask after a failure, in a minute."""
_UNKNOWN_MACHINE: Final = "another machine"
_MAX_NAME: Final = 200
_MAX_NAMED: Final = 64
"""Maximum number of silent ranks whose machine is looked up."""

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
        name: name of this machine in messages. By default its number, if the launcher has set it, and its host.

    Attributes:
        announced: the hang that another machine has announced; ``None`` without one.
    """

    def __init__(
        self, store: JobStore | None = None, *, ranks: Sequence[int] = (), world_size: int = 0, name: str = ""
    ) -> None:
        self._store = store if len(ranks) < world_size else None
        self._ranks, self._world_size = tuple(ranks), world_size
        host, machine = socket.gethostname(), os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID")
        self._name = name or (f"machine {machine} ({host})" if machine else f"machine {host}")
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
            self.announced = FoundHang.from_json(_read_json(store.get("announced")))
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
            text = base64.b64encode(zlib.compress(json.dumps(own).encode())).decode()
            store.set(f"{question}/{store.add(f'{question}/answers', 1)}", text)
        self._answered = self._asked = newest
        if questions:
            self._asks_from = time.monotonic() + time_limits.ANSWER
        return bool(questions)

    def ask(
        self,
        ranks: Sequence[RankCalls],
        seconds: float = time_limits.ANSWER,
        *,
        after_failure: bool = False,
        answers: bool = True,
    ) -> list[RankCalls] | None:
        """Return the ranks of the other machines; those of machines that did not answer are unreachable.

        Returns ``None`` if another machine asks or has just asked, which announces what it finds, or if one has
        announced a hang: it does not answer any more.

        Args:
            ranks: the ranks of this machine, in case another one asks at the same time.
            seconds: time to answer.
            after_failure: whether this process has failed. Then no other machine announces what it finds.
            answers: whether this thread answers machines that ask at the same time; otherwise another thread does.
        """
        if self._store is None:
            return []
        if time.monotonic() < self._asks_from and not after_failure:
            return None
        deadline = time.monotonic() + seconds
        others = {
            rank: RankCalls(rank=rank, state="unreachable", detail=_UNKNOWN_MACHINE)
            for rank in range(self._world_size)
            if rank not in self._ranks
        }

        def request(store: Any) -> bool:
            self._look(store)
            if after_failure:
                may_ask = store.add(f"failed/{time.time() // 60:.0f}", 1) <= _MOST_FAILED
            else:
                may_ask = not self._answer(store, ranks)  # otherwise another machine asks already
            return may_ask and self._collect(store, ranks if answers else None, others, deadline)

        return None if self._store.ask(request, 2 * seconds) is False else list(others.values())

    def _collect(
        self, store: Any, ranks: Sequence[RankCalls] | None, others: dict[int, RankCalls], deadline: float
    ) -> bool:
        """Replace the ranks of the machines that answer in ``others``, and name the machines that do not.

        Returns whether no hang was announced.

        Args:
            ranks: the answer to machines that ask at the same time; ``None`` if another thread answers.
        """
        question = store.add("asked", 1)
        missing, unread, num_answers = set(others), list[int](), 0
        while missing and time.monotonic() < deadline:
            if self._has_announcement(store):
                return False
            if ranks is not None:
                self._answer(store, ranks, question)
            # A machine that waits asks for this number only: after a hang of a job, all machines ask at the same time.
            before, num_answers = num_answers, store.add(f"{question}/answers", 0)
            unread += range(before + 1, num_answers + 1)
            for number in [each for each in unread if store.check([f"{question}/{each}"])]:
                unread.remove(number)
                found = {each.rank: each for each in _unpack(store.get(f"{question}/{number}")) if each.rank in others}
                others.update(found)
                missing -= found.keys()
            time.sleep(time_limits.POLL)
        for rank in sorted(missing)[:_MAX_NAMED]:
            if store.check([f"machine/{rank}"]):
                name = store.get(f"machine/{rank}").decode(errors="replace")
                others[rank] = replace(others[rank], detail=printable(name[:_MAX_NAME]))
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


def _unpack(data: bytes) -> list[RankCalls]:
    """Return the records of a machine; none for an answer that a machine does not give."""
    inflated = zlib.decompressobj()
    with contextlib.suppress(zlib.error, ValueError, TypeError, KeyError, AttributeError):
        content = inflated.decompress(base64.b64decode(data), _MAX_ANSWER)
        if inflated.eof:  # otherwise it is longer, or a part of one
            return [rank_from_json(each) for each in _read_json(content)]
    return []


def _read_json(data: bytes) -> Any:
    """Return JSON of another machine with texts that can be printed; ``None`` if it is invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return _escaped(json.loads(data[:_MAX_ANSWER]))
    return None


def _escaped(content: Any) -> Any:
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [_escaped(each) for each in content]
    return {key: _escaped(value) for key, value in content.items()} if isinstance(content, dict) else content


class PlaceInStore:
    """Writes where this rank is to the store of the job, while it does not move: other ranks may wait for it in a call.

    The place is written after half of the time for which the other ranks wait.
    """

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store, self._key = store, agreement.place_key(rank)
        self._limit = agreement.DEFAULT_LIMIT / 2
        with contextlib.suppress(SpecError):  # the first call that needs the limit raises this error
            self._limit = agreement.arrival_limit() / 2
        self._position: tuple[Any, ...] = ()
        self._since = 0.0
        self._is_written = False

    def poll(self) -> None:
        now = time.monotonic()
        stack, position = current_stack(record().main)
        if position != self._position:
            self._position, self._since = position, now
            if self._is_written:
                self._send(None)
        elif not self._is_written and now - self._since >= self._limit:
            self._send(find_place(stack, record().counts)[1])

    def _send(self, place: str | None) -> None:
        self._is_written = place is not None

        def request(store: Any) -> None:
            places = agreement.place_store(store.underlying_store)
            if place is None:
                places.delete_key(self._key)
            else:
                places.set(self._key, json.dumps({"place": place}))

        self._store.ask(request)
