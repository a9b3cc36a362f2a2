"""The messages that the launchers of several machines exchange through the store of their rendezvous.

Before they start a run, they compare what each is about to run. During an attempt, the machine that sees a failure
first announces it, and all stop their ranks. Then it writes the failed attempt as it knows it, and all use this one: so
every launcher knows the same failed attempts and makes the same decision (``runs.restart_policy``). Each launcher
writes a heartbeat once per second; machine 0 watches the others, and these watch machine 0. The number of messages
grows with the number of machines only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.rank_variables import silence_limit
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, lost_machine
from hf_fsdp_plugin.text import plural, printable

_FIX: Final = "Give every machine the same command, config and package. Give each run a port of its own."
_MAX_DIFFERENCES: Final = 4
_MAX_FACT: Final = 200


def compare_facts(mine: Mapping[str, str], text: bytes) -> Problem | None:
    """Return a problem unless this machine is about to run what another one runs.

    Args:
        mine: the facts of this machine that must be equal on all machines of a run.
        text: the facts of the other machine, as JSON.
    """
    try:
        other = dict(json.loads(text))
    except (ValueError, TypeError):
        other = {}
    found = [
        f"{name} is {here[:_MAX_FACT]} here, and {printable(str(other[name])[:_MAX_FACT])} on another machine"
        for name, here in mine.items()
        if other.get(name, here) != here
    ]
    if not other.keys() & mine.keys():
        found = ["another machine has another version of this package"]
    if not found:
        return None
    more = f", and {plural(len(found) - _MAX_DIFFERENCES, 'more difference')}" * (len(found) > _MAX_DIFFERENCES)
    message = f"the machines are about to run different things: {'; '.join(found[:_MAX_DIFFERENCES])}{more}."
    return Problem(code="FSDP-E708", message=message, fix=_FIX)


_POLL_SECONDS: Final = 0.1
AnnouncedKind = Literal["failed", "hung", "lost", "joins"]
_BEAT_SECONDS: Final = 1.0
_VERDICT_SECONDS: Final = 60.0
"""Seconds that a machine waits for the failed attempt of the machine that announced it, whose saves get 25 s."""
_PLACES_SECONDS: Final = 10.0
"""Seconds that the machine of the first failure waits until the others have stopped their ranks."""
_MAX_TEXT: Final = 1000
"""Characters of a text of another machine that are printed."""


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait for at most ``seconds``. Returns the last result of ``is_done``."""
    deadline = time.monotonic() + seconds
    while not (done := is_done()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return done


@dataclass(frozen=True, slots=True)
class Announced:
    """Why a machine has ended the attempt of all.

    Attributes:
        kind: ``failed`` if one of its ranks has failed, ``hung`` if they have ended because of a hang, ``lost`` if
            another machine is lost, ``joins`` if one wants to join.
        lost: the machine that is lost.
    """

    machine: int
    text: str
    kind: AnnouncedKind = "failed"
    lost: int = -1

    def __str__(self) -> str:
        return f"machine {self.machine}: {self.text}" if self.kind in ("failed", "hung") else self.text


class OtherMachines:
    """The other machines, as the launcher of one sees them during one attempt.

    Attributes:
        is_cut: whether the store is gone or out of reach, as after the loss of the machine that hosts it.

    Args:
        store: the store of this attempt, shared by all its machines; ``None`` for a single machine.
        machine, num_machines: number of this machine, and of all.
    """

    def __init__(self, store: Any = None, machine: int = 0, num_machines: int = 1) -> None:
        self._store, self.machine, self.num_machines = store, machine, num_machines
        self._announced: Announced | None = None
        self.is_cut = False
        self._limit = silence_limit()
        now = time.monotonic()
        self._next_beat = now
        watched = [0] if machine else range(1, num_machines)
        self._seen = dict.fromkeys(watched, (-1, now))

    @property
    def _is_alone(self) -> bool:
        return self.num_machines == 1 or self.is_cut

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Send requests to the store. After one that fails, the rest of the block is skipped, and nobody is asked."""
        try:
            yield
        except RuntimeError:  # torch raises it if the connection is closed or the store does not answer
            self.is_cut = True
            if self._announced is None:
                self._announced = Announced(self.machine, "the launcher that hosts the rendezvous is gone", "lost", 0)

    def failure(self) -> Announced | None:
        """Return the failure that a machine has announced, or a machine that is lost. Asks once per second."""
        now = time.monotonic()
        if self._announced is None and now >= self._next_beat and not self._is_alone:
            self._next_beat = now + _BEAT_SECONDS
            with self._asking():
                self._store.add(f"beat/{self.machine}", 1)
                if self._store.check(["failed"]):
                    self._announced = self._read_announced()
                else:
                    self._check_others(now)
        return self._announced

    def _check_others(self, now: float) -> None:
        """Announce a machine that does not answer any more."""
        for other, (count, seen) in self._seen.items():
            if (beat := self._store.add(f"beat/{other}", 0)) != count:
                self._seen[other] = (beat, now)
            elif now - seen > self._limit and not self.num_ended():
                self.announce(f"machine {other} has not answered for {self._limit:g} s", "lost", lost=other)
                return

    def announce(self, text: str, kind: AnnouncedKind = "failed", *, lost: int = -1) -> Announced:
        """End the attempt on all machines. Returns what was announced first."""
        if self._announced is None:
            found = mine = Announced(self.machine, text[:_MAX_TEXT], kind, lost)
            if not self._is_alone:
                with self._asking():
                    self._store.compare_set("failed", "", json.dumps(astuple(mine)))
                    found = self._read_announced()
            self._announced = self._announced or found  # the store may have been lost meanwhile
        return self._announced

    def _read_announced(self) -> Announced:
        try:
            machine, text, kind, lost = json.loads(self._store.get("failed"))
            return Announced(int(machine), printable(str(text)[:_MAX_TEXT]), kind, int(lost))
        except (ValueError, TypeError):  # not written by a launcher
            return Announced(-1, "another program has written to the store of the run")

    @property
    def is_first(self) -> bool:
        """Whether this machine has announced the failure."""
        return self._announced is not None and self._announced.machine == self.machine

    def share_places(self, places: Sequence[RankCalls]) -> tuple[list[RankCalls], list[str]]:
        """Share where the ranks of this machine were when the run failed.

        Returns:
            On the machine that has announced its failure first: where the ranks of the other machines were. On the
            others: nothing. And notes on the machines that are not included.
        """
        first = self._announced
        if self._is_alone or first is None:
            return [], []
        with self._asking():
            if not self.is_first:
                own = [(each.rank, each.place, each.state) for each in places]
                self._store.set(f"places/{self.machine}", json.dumps(own))
                return [], [f"machine {first.machine} failed first: see the output of its launcher"]
            others = {*range(self.num_machines)} - {self.machine, first.lost}
            keys = {each: f"places/{each}" for each in sorted(others)}
            wait_until(lambda: bool(self._store.check(list(keys.values()))), _PLACES_SECONDS)
            arrived = [each for each, key in keys.items() if self._store.check([key])]
            rows = [row for each in arrived for row in json.loads(self._store.get(keys[each]))]
            found = [RankCalls(rank=rank, place=printable(place), state=state) for rank, place, state in rows]
            missing = ", ".join(str(each) for each in keys if each not in arrived)
            note = f"the ranks of machines {missing} are not included: see their launchers' output"
            return found, [note] if missing else []
        return [], ["the ranks of other machines are not included: see the output of their launchers"]

    def agree(self, attempt: FailedAttempt) -> FailedAttempt:
        """Return the failed attempt as the machine that announced the failure knows it. ``attempt``: as known here."""
        first = self._announced
        if first is not None and first.lost >= 0:
            attempt = lost_machine(first.lost, attempt)
        if first is None or self._is_alone:
            return attempt
        with self._asking():
            if self.is_first:
                self._store.set("attempt", json.dumps(asdict(attempt)))
                return attempt
            if wait_until(lambda: bool(self._store.check(["attempt"])), _VERDICT_SECONDS):
                return FailedAttempt(**json.loads(self._store.get("attempt")))
            return lost_machine(first.machine, attempt)
        return lost_machine(0, attempt)

    def num_ended(self, more: int = 0) -> int:
        """Return on how many machines the ranks have ended without a failure, after ``more`` were added."""
        if not self._is_alone:
            with self._asking():
                return int(self._store.add("ended", more))
        return 0

    def end(self, seconds: float) -> None:
        """Tell the others that the ranks of this machine have ended without a failure, and wait for theirs.

        Waits for at most ``seconds``, until the ranks of all machines have ended, or those of one have failed.
        """
        self.num_ended(1)
        if not self._is_alone:
            wait_until(lambda: self.failure() is not None or self.num_ended() == self.num_machines, seconds)
