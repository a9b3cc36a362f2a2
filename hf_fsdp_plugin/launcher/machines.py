"""The launchers of several machines: they stop all ranks if one fails or a machine is lost, and start them again.

Machine 0 collects what the others know of a failed attempt, decides for all, and writes the decision to the store. So
the number of messages grows with the number of machines only. A machine is lost if its launcher is gone or silent (see
``pulse``). If machine 0 is lost, each of the others decides for itself, by the same rule.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

from hf_fsdp_plugin.hangs.places import RanksAt
from hf_fsdp_plugin.launcher.launcher_store import POLL_SECONDS, LauncherStore, StoreLost, in_thread
from hf_fsdp_plugin.launcher.meeting import Meeting
from hf_fsdp_plugin.launcher.pulse import Pulse, silence_limit
from hf_fsdp_plugin.launcher.rendezvous import Peers, Rendezvous, RendezvousError, endpoint
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restart_rule import Decision, Verdict, decide, lost_machine
from hf_fsdp_plugin.runs.restarts import Restarts
from hf_fsdp_plugin.spec.model import LaunchSection
from hf_fsdp_plugin.text import printable

_VERDICT_SECONDS = 120.0
"""Seconds that machine 0 waits until the others have stopped their ranks. Background saves get 25 s for it."""
_PLACES_SECONDS = 10.0
"""Seconds that the launcher of the first failure waits until the others have stopped their ranks."""
_MAX_SHARED = 8
"""Number of places that a launcher shares."""
_EXIT_BARRIER_SECONDS = 300.0
"""Seconds that a launcher keeps the store open for machines whose ranks exit later. Same as torchrun's exit barrier."""


def meet_machines(
    launch: LaunchSection, world: World, *, rdzv_conf: str = "", restarts: Restarts | None = None
) -> Rendezvous:
    """Wait for the other machines in torchrun's rendezvous. Signals interrupt the wait.

    Raises:
        RendezvousError: not all machines arrived before the timeout, or they start different numbers of ranks.
    """
    return _meet(Meeting(launch, world, rdzv_conf), launch, world, restarts or Restarts(), None)


def _meet(
    meeting: Meeting,
    launch: LaunchSection,
    world: World,
    restarts: Restarts,
    before: LauncherStore | None,
    *,
    lost: bool = False,
) -> Rendezvous:
    try:
        met = in_thread(lambda: meeting.meet(restarts, before, lost=lost))
    except RendezvousError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        message = f"the {world.num_machines} machines did not meet at {endpoint(launch)}: {lines[0]}"
        fix = (
            "Check that machine 0 is started, that its address and port are reachable from here, and that no two "
            "machines have the same --machine_rank."
        )
        code = "FSDP-E707" if before is None else "FSDP-E717"
        raise RendezvousError([Problem(code=code, message=message, fix=fix)]) from error
    return Rendezvous(
        address=met.address,
        port=met.port,
        machine=met.store.machine,
        first_rank=met.store.machine * world.num_local,
        hosted=True,
        restarts=met.restarts,
        peers=Machines(meeting, launch, world, met.store),
    )


class Machines(Peers):
    """The launchers of all machines during one attempt, as one of them sees them."""

    def __init__(self, meeting: Meeting, launch: LaunchSection, world: World, store: LauncherStore) -> None:
        self._meeting, self._launch, self._world, self._store = meeting, launch, world, store
        watched = range(1, world.num_machines) if store.machine == 0 else [0]
        self._pulse = Pulse(store, watched)
        self._first_to_fail = ""
        self._lost = False

    def failure(self) -> str | None:
        pulse = self._pulse
        if pulse.announced:
            own = pulse.announced.startswith(f"machine {self._store.machine}:")
            return None if own else printable(pulse.announced)
        if pulse.broken:
            return "the launcher that hosts the rendezvous has exited"
        if pulse.is_alone():
            return f"the launcher that hosts the rendezvous has not answered for {silence_limit():g} s"
        if silent := pulse.silent():
            return f"machine {silent[0]} has not answered for {silence_limit():g} s"
        return None

    def announce(self, text: str) -> None:
        # If the host of the store has exited, the other machines detect this in failure().
        with contextlib.suppress(StoreLost):
            self._first_to_fail = self._store.ask(lambda: self._store.announce(text)).partition(":")[0]

    def share_places(self, places: Sequence[RanksAt]) -> tuple[list[RanksAt], list[str]]:
        # One machine reads what the others write, so the number of messages grows with the number of machines only.
        store = self._store
        try:
            if self._first_to_fail != f"machine {store.machine}":
                content = json.dumps([(each.ranks, each.state, each.place) for each in places[:_MAX_SHARED]])
                store.ask(lambda: store.set(store.own("places"), content))
                return [], [f"{self._first_to_fail} failed first: see the output of its launcher"]
            return store.ask(self._collect_places, 2 * _PLACES_SECONDS)
        except StoreLost:
            return [], ["the ranks of other machines are not included: see the output of their launchers"]

    def _collect_places(self) -> tuple[list[RanksAt], list[str]]:
        store = self._store
        found: list[RanksAt] = []
        silent: list[str] = []
        ended: list[str] = []
        deadline = time.monotonic() + _PLACES_SECONDS
        for machine in self._others():
            key = store.key(f"places/{machine}")
            while not (left := store.has_left(machine)) and time.monotonic() < deadline:
                if store.has(key):
                    break
                time.sleep(POLL_SECONDS)
            if store.has(key):  # written before "left"
                found += [RanksAt(tuple(ranks), state, place) for ranks, state, place in json.loads(store.get(key))]
            else:
                (ended if left else silent).append(str(machine))
        notes = [f"the ranks of machines {', '.join(ended)} had ended"] if ended else []
        if silent:
            notes.append(f"the ranks of machines {', '.join(silent)} are not included: see their launchers' output")
        return found, notes

    def _others(self) -> list[int]:
        return [machine for machine in range(self._world.num_machines) if machine != self._store.machine]

    def decide(self, verdict: Verdict, restarts: Restarts) -> Decision:
        store = self._store
        deadline = time.monotonic() + _VERDICT_SECONDS
        try:
            if store.machine == 0:
                return store.ask(lambda: self._decide_for_all(verdict, restarts, deadline), 2 * _VERDICT_SECONDS)
            store.ask(lambda: store.put_verdict(verdict))
            while not store.ask(store.has_decision):
                if self._pulse.is_alone() or self._pulse.silent() or time.monotonic() > deadline + _VERDICT_SECONDS:
                    raise StoreLost
                if self._pulse.has_left(0):
                    return decide([Verdict(attempt=verdict.attempt, final="machine 0 has ended.")], restarts)
                time.sleep(POLL_SECONDS)
            return store.ask(lambda: store.read_decision(deadline))
        except StoreLost:
            self._lost = True
            return decide([verdict, lost_machine(0)], restarts)

    def _decide_for_all(self, mine: Verdict, restarts: Restarts, deadline: float) -> Decision:
        """Collect the verdicts of all machines, on machine 0, and write the decision."""
        store, verdicts = self._store, [mine]
        for machine in self._others():
            while (found := store.verdict_of(machine)) is None and not store.has_left(machine):
                if machine in self._pulse.silent() or time.monotonic() > deadline:
                    found = lost_machine(machine)
                    break
                time.sleep(POLL_SECONDS)
            ended = Verdict(attempt=mine.attempt, final=f"machine {machine} has ended.", order=mine.order)
            verdicts.append(found or ended)
        decision = decide(verdicts, restarts)
        store.put_decision(decision)
        return decision

    def meet_again(self, launch: LaunchSection, restarts: Restarts) -> Rendezvous:
        self.close()
        return _meet(self._meeting, launch, self._world, restarts, self._store, lost=self._lost)

    def leave(self) -> None:
        store, pulse = self._store, self._pulse
        # Machine 0 hosts the store; under c10d another machine may host a second store. A host must exit last.
        waits = store.machine == 0 or self._launch.rdzv_backend != "static"
        with contextlib.suppress(StoreLost):
            store.ask(store.leave)
            deadline = time.monotonic() + _EXIT_BARRIER_SECONDS * waits
            while time.monotonic() < deadline and not pulse.is_alone():
                silent = pulse.silent()
                awaited = [machine for machine in self._others() if machine not in silent]
                if not awaited or store.ask(lambda awaited=awaited: store.has_left(*awaited)):  # type: ignore[misc]
                    break
                time.sleep(POLL_SECONDS)
            store.ask(self._meeting.close)
        self.close()

    def close(self) -> None:
        """End the thread that shows the others that this launcher lives."""
        self._pulse.close()
