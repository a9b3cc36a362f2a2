"""What the launchers of several machines tell each other through the store of their rendezvous.

Before they start a run, they compare what each is about to run. During an attempt, the machine that sees a failure
first announces it, and all stop their ranks. Then it writes the failed attempt as it knows it, and all use this one: so
every launcher knows the same failed attempts and makes the same decision (``runs.restart_policy``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Final, Literal

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt
from hf_fsdp_plugin.text import plural, printable

_FIX: Final = "Give every machine the same command, config and package. Give each run a port of its own."
_MAX_DIFFERENCES: Final = 4
_MAX_FACT: Final = 200


def compare_facts(mine: Mapping[str, str], other: Any) -> Problem | None:
    """Return a problem unless this machine is about to run what another one runs.

    Args:
        mine: the facts of this machine that must be equal on all machines of a run.
        other: the facts of the other machine.
    """
    other = other if isinstance(other, dict) else {}
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


AnnouncedKind = Literal["failed", "hung", "lost", "joins"]
_MAX_TEXT: Final = 1000
"""Characters of a text of another machine that are printed."""
_STORE_LOST: Final = "the launcher that hosts the rendezvous is gone"


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait for at most ``seconds``. Returns the last result of ``is_done``."""
    deadline = time.monotonic() + seconds
    while not (done := is_done()) and time.monotonic() < deadline:
        time.sleep(time_limits.POLL)
    return done


@dataclass(frozen=True, slots=True)
class Announced:
    """Why a machine has ended the attempt of all.

    Attributes:
        kind: ``failed`` if one of its ranks has failed, ``hung`` if they have ended because of a hang, ``joins`` if a
            machine wants to join, ``lost`` if the store is lost: then this machine knows nothing of the others.
    """

    machine: int
    text: str
    kind: AnnouncedKind = "failed"

    def __str__(self) -> str:
        return f"machine {self.machine}: {self.text}" if self.kind in ("failed", "hung") else self.text


class OtherMachines:
    """The other machines, as the launcher of one sees them during one attempt.

    Args:
        store: the store of this attempt, shared by all its machines; ``None`` for a single machine.
        machine, num_machines: number of this machine, and of all.
    """

    def __init__(self, store: Any = None, machine: int = 0, num_machines: int = 1) -> None:
        self._store, self.machine, self.num_machines = store, machine, num_machines
        self._announced: Announced | None = None
        self._is_cut = False
        self._next_look = 0.0

    @property
    def _is_alone(self) -> bool:
        return self.num_machines == 1 or self._is_cut

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Send requests to the store. After one that fails, the rest of the block is skipped, and nobody is asked."""
        try:
            yield
        except RuntimeError:  # torch raises it if the connection is closed or the store does not answer
            self._is_cut = True
            self._announced = self._announced or Announced(self.machine, _STORE_LOST, "lost")

    def failure(self) -> Announced | None:
        """Return why a machine has ended the attempt; ``None`` if none has. Asks once per second."""
        now = time.monotonic()
        if self._announced is None and now >= self._next_look and not self._is_alone:
            self._next_look = now + time_limits.LOOK
            with self._asking():
                if self._store.check(["failed"]):
                    self._announced = self._read_announced()
        return self._announced

    def announce(self, text: str, kind: AnnouncedKind = "failed") -> Announced:
        """End the attempt on all machines. Returns what was announced first."""
        if self._announced is None:
            found = mine = Announced(self.machine, text[:_MAX_TEXT], kind)
            if not self._is_alone:
                with self._asking():
                    self._store.compare_set("failed", "", json.dumps(astuple(mine)))
                    found = self._read_announced()
            self._announced = self._announced or found  # the store may have been lost meanwhile
        return self._announced

    def _read_announced(self) -> Announced:
        try:
            machine, text, kind = json.loads(self._store.get("failed"))
            return Announced(int(machine), printable(str(text)[:_MAX_TEXT]), kind)
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
            keys = {each: f"places/{each}" for each in range(self.num_machines) if each != self.machine}
            wait_until(lambda: bool(self._store.check(list(keys.values()))), time_limits.PLACES)
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
        if first is not None and not self._is_alone:
            with self._asking():
                if self.is_first:
                    self._store.set("attempt", json.dumps(asdict(attempt)))
                    return attempt
                if wait_until(lambda: bool(self._store.check(["attempt"])), time_limits.VERDICT):
                    return FailedAttempt(**json.loads(self._store.get("attempt")))
                return replace(attempt, failure=f"machine {first.machine} was lost", machine=first.machine, same_as="")
        return replace(attempt, final=f"{_STORE_LOST}.") if self._is_cut else attempt

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
