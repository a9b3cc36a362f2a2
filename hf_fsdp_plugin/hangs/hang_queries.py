"""How the machines of a job ask each other what their ranks do, over a connection of their own to the job's store.

One rank of each machine watches it, and asks or answers for it. It reads one counter per second; everything else is
sent only if ranks have waited for long. After a hang, the ranks of all machines wait: one machine asks, and the others
answer and wait for what it announces. After a failure, the first few that have lost a connection ask. So the number of
messages grows with the number of machines, and not with its square.

::

    machine/<r>     JSON: name and ranks of the machine whose lowest rank is r
    news            increased with each question and announcement: the counter that is read each second
    asked           number of questions
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
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from hf_fsdp_plugin.hangs.call_record import read_counts, record
from hf_fsdp_plugin.hangs.calls import RankCalls, rank_from_json
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.rank_stacks import current_stack, find_place
from hf_fsdp_plugin.text import printable

THREAD: Final = "hf_fsdp_store"
"""Name of the threads that are in a request to the store."""
_MAX_ANSWER: Final = 64 << 20
"""Maximum number of bytes of the records of a machine."""
ANSWER_SECONDS: Final = 10.0
"""Seconds that a machine has to answer, in which it reads its ranks' stacks."""
_REQUEST_SECONDS: Final = 10.0
"""Seconds that a request to the store may take."""
_MOST_FAILED: Final = 8
"""Number of machines that ask after a failure, in a minute."""
_LOOK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.1
_UNKNOWN_MACHINE: Final = "another machine"
_MAX_NAMED: Final = 64
"""Maximum number of silent ranks whose machine is looked up."""

_T = TypeVar("_T")


class StoreLost(Exception):
    """The store is gone, or does not answer."""


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

    def ask(self, request: Callable[[Any], _T], seconds: float = _REQUEST_SECONDS) -> _T:
        """Return the result of requests to the store. Raises ``StoreLost`` if they fail, or take too long."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            raise StoreLost  # the request before has not ended: the host of the store is stopped, or the network down
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
            self._thread.join(_POLL_SECONDS)
            self._waiting()
        if not results:
            raise StoreLost
        return results[0]

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
        store: shared by all machines; ``None`` for a single machine, which has nobody to ask.
        name: name of this machine, for messages.
        ranks: the ranks of this machine.

    Attributes:
        announced: the hang that another machine has announced; empty without one.
    """

    def __init__(
        self, store: JobStore | None = None, *, name: str = "", ranks: Sequence[int] = (), world_size: int = 0
    ) -> None:
        self._store, self._name, self._ranks, self._world_size = store, name, tuple(ranks), world_size
        self.announced: Mapping[str, str] = {}
        self._is_registered = False
        self._news = self._asked = self._answered = 0
        self._next_look = self._asks_from = 0.0

    def is_asked(self) -> bool:
        """Return whether another machine waits for the answer of this one."""
        now = time.monotonic()
        if self._store is not None and now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            with contextlib.suppress(StoreLost):
                self._store.ask(self._read_news)
        return self._asked > self._answered

    def _read_news(self, store: Any) -> None:
        if not self._is_registered:
            store.set(f"machine/{min(self._ranks)}", json.dumps({"name": self._name, "ranks": self._ranks}))
            self._is_registered = True
        if (news := store.add("news", 0)) != self._news:
            self._asked = store.add("asked", 0)
            self._has_announcement(store)
            self._news = news

    def _has_announcement(self, store: Any) -> bool:
        if not self.announced and store.check(["announced"]):
            self.announced = _escaped(_mapping(store.get("announced")))
        return bool(self.announced)

    def answer(self, ranks: Sequence[RankCalls]) -> None:
        """Answer with the ranks of this machine."""
        if self._store is not None:
            with contextlib.suppress(StoreLost):  # the machine that asks reports this one as unreachable
                self._store.ask(lambda store: self._answer(store, ranks))

    def _answer(self, store: Any, ranks: Sequence[RankCalls], own_question: int = 0) -> bool:
        """Answer the questions of other machines. Returns whether there were any."""
        newest = store.add("asked", 0)
        questions = [number for number in range(self._answered + 1, newest + 1) if number != own_question]
        for question in questions:
            own = [rank for rank in ranks if rank.rank in self._ranks]
            store.set(f"{question}/{store.add(f'{question}/answers', 1)}", _pack(own))
        self._answered = self._asked = newest
        if questions:
            self._asks_from = time.monotonic() + ANSWER_SECONDS
        return bool(questions)

    def ask(
        self,
        ranks: Sequence[RankCalls],
        seconds: float = ANSWER_SECONDS,
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
        others = dict.fromkeys(sorted(set(range(self._world_size)) - set(self._ranks)), _UNKNOWN_MACHINE)
        found: dict[int, RankCalls] = {}
        with contextlib.suppress(StoreLost):
            own = ranks if answers else None
            has_asked = self._store.ask(
                lambda store: (
                    self._may_ask(store, ranks, after_failure) and self._collect(store, own, others, found, deadline)
                ),
                2 * seconds,
            )
            if not has_asked:
                return None
        known = dict(found)  # the request may go on
        return [known.get(rank) or RankCalls(rank=rank, state="unreachable", detail=others[rank]) for rank in others]

    def _may_ask(self, store: Any, ranks: Sequence[RankCalls], after_failure: bool) -> bool:
        self._read_news(store)
        if after_failure:
            return bool(store.add(f"failed/{time.time() // 60:.0f}", 1) <= _MOST_FAILED)
        return not self._answer(store, ranks)  # otherwise another machine asks already

    def _collect(
        self,
        store: Any,
        ranks: Sequence[RankCalls] | None,
        others: dict[int, str],
        found: dict[int, RankCalls],
        deadline: float,
    ) -> bool:
        """Add the ranks of the machines that answer to ``found``, and the names of the machines that do not to others.

        Returns whether no hang was announced.

        Args:
            ranks: the answer to machines that ask at the same time; ``None`` if another thread answers.
        """
        question = store.add("asked", 1)
        store.add("news", 1)
        unread: list[int] = []
        num_answers = 0
        while len(found) < len(others) and time.monotonic() < deadline:
            if self._has_announcement(store):
                return False
            if ranks is not None:
                self._answer(store, ranks, question)
            # A machine that waits asks for this number only: after a hang of a job, all machines ask at the same time.
            before, num_answers = num_answers, store.add(f"{question}/answers", 0)
            unread = [
                number
                for number in (*unread, *range(before + 1, num_answers + 1))
                if not self._read_answer(store, f"{question}/{number}", others, found)
            ]
            time.sleep(_POLL_SECONDS)
        for rank in [rank for rank in others if rank not in found][:_MAX_NAMED]:
            if others[rank] == _UNKNOWN_MACHINE and store.check([f"machine/{rank}"]):
                name, of_machine = _machine(store.get(f"machine/{rank}"))
                others.update((each, name) for each in of_machine if each in others)
        return True

    def _read_answer(self, store: Any, key: str, others: Mapping[int, str], found: dict[int, RankCalls]) -> bool:
        """Add the ranks of an answer. Returns ``False`` if it is not complete yet."""
        if not store.check([key]):
            return False
        with contextlib.suppress(ValueError):
            found.update((each.rank, each) for each in _unpack(store.get(key).decode()) if each.rank in others)
        return True

    def announce(self, hang: Mapping[str, str]) -> bool:
        """Announce a hang, which ends the ranks of all machines. Returns whether no other machine was first."""
        if self._store is None:
            return True
        text = json.dumps(hang)
        try:
            return self._store.ask(lambda store: self._announce(store, text))
        except StoreLost:  # the other machines find the hang themselves
            return True

    def _announce(self, store: Any, text: str) -> bool:
        is_first = bool(store.compare_set("announced", "", text).decode() == text)
        store.add("news", 1)
        return is_first or not self._has_announcement(store)


def _machine(data: bytes) -> tuple[str, list[int]]:
    """Return name and ranks of another machine; of none, if the text is invalid."""
    content = _mapping(data)
    ranks = content.get("ranks")
    numbers = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    return printable(str(content.get("name", ""))), numbers


def _mapping(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(content := json.loads(data[:_MAX_ANSWER]), dict):
            return content
    return {}


def _pack(ranks: Sequence[RankCalls]) -> str:
    return base64.b64encode(zlib.compress(json.dumps([rank.to_json() for rank in ranks]).encode())).decode()


def _unpack(text: str) -> list[RankCalls]:
    """Return the records of a machine. Raises ``ValueError`` for any text that :func:`_pack` does not return."""
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(base64.b64decode(text), _MAX_ANSWER)
        if not inflated.eof:
            raise ValueError(f"an answer with more than {_MAX_ANSWER:,} bytes, or a part of one")
        return [rank_from_json(content) for content in _escaped(json.loads(data))]
    except (zlib.error, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _escaped(content: Any) -> Any:
    """Return JSON of another machine with texts that can be printed."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [_escaped(each) for each in content]
    return {key: _escaped(value) for key, value in content.items()} if isinstance(content, dict) else content


class PlaceInStore:
    """Writes where this rank is to the store of the job, while it does not move: other ranks may wait for it in a call.

    Args:
        limit: seconds without a change after which the place is written.
    """

    def __init__(self, store: JobStore, rank: int, files: RankFiles, limit: float) -> None:
        self._store, self._rank, self._files, self._limit = store, rank, files, limit
        self._position: tuple[Any, ...] = ()
        self._since = self._next_poll = 0.0
        self._is_written = False

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + min(1.0, self._limit / 4)
        stack, position = current_stack(record.main)
        if position != self._position:
            self._position, self._since = position, now
            if self._is_written:
                self._is_written = False
                self._send(None)
        elif not self._is_written and now - self._since >= self._limit:
            self._is_written = True
            self._send(str(find_place(stack, read_counts(self._files.steps)) or ""))

    def _send(self, place: str | None) -> None:
        from hf_fsdp_plugin.backends.ranks.collective_entry import place_key, place_store

        key = place_key(self._rank)

        def request(store: Any) -> None:
            places = place_store(store)
            if place is None:
                places.delete_key(key)
            else:
                places.set(key, json.dumps({"place": place}))

        with contextlib.suppress(StoreLost):
            self._store.ask(request)
