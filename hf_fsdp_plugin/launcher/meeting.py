"""How the launchers of several machines meet, before the first attempt of a run and before each restart.

The launchers find each other with torchrun's own rendezvous (``static`` or ``c10d``) and share its store. In it,
machine 0 waits for all machines, compares their worlds, and writes what they need to start their ranks. The ranks of
the first attempt use the same store. Each later attempt has a store of its own on a free port of machine 0: nothing
that an earlier attempt has left, in the store or on the network, can join it.

The launcher of a lost machine that is started again learns from the store that the ranks of the others run, and makes
them stop. If machine 0 is lost, so is the store: the others connect until it is there again. All know the failed
attempts of the run, and machine 0 takes those of the machine that knows most.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Final

from hf_fsdp_plugin.launcher.launcher_store import POLL_SECONDS, LauncherStore, beat_key, torch_log_level
from hf_fsdp_plugin.launcher.rendezvous import RendezvousError, endpoint
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restart_rule import Decision, lost_machine, made_from
from hf_fsdp_plugin.runs.restarts import Restarts
from hf_fsdp_plugin.spec.model import LaunchSection
from hf_fsdp_plugin.text import format_names, plural

_RUN_ID: Final = "hf_fsdp"
_NUMBER: Final = "number"
"""Key of the number of the present meeting."""
MEET_SECONDS: Final = 600.0
"""Seconds that machines wait for each other. Same as torchrun's rendezvous."""
_BEATS_SECONDS: Final = 2.5
"""Seconds in which a launcher that lives shows it."""
_LEAVE_SECONDS: Final = 5.0
"""Seconds that machine 0 keeps the store open for the others to read why they do not start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """What a machine brings to a meeting.

    Attributes:
        launcher: identifies the launcher.
        restarts: what it knows of the failed attempts, as JSON.
    """

    ranks: int
    device: str
    max_restarts: int
    launcher: str
    restarts: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """The result of a meeting: the store of the launchers, the address of the ranks' store, and the failed attempts."""

    store: LauncherStore
    address: str
    port: int
    restarts: Restarts


class Meeting:
    """Meets the other machines, as often as the run is started.

    Attributes:
        seconds: limit of a meeting.
    """

    def __init__(self, launch: LaunchSection, world: World, rdzv_conf: str) -> None:
        self._launch, self._world = launch, world
        self._conf: dict[str, Any] = dict(pair.split("=", 1) for pair in rdzv_conf.split(",") if "=" in pair)
        self.seconds = float(self._conf.get("timeout", self._conf.get("join_timeout", MEET_SECONDS)))
        self._handler: Any = None  # kept because under c10d it hosts the store
        self._rank_store: Any = None
        self._launcher = f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"
        self._known = 0

    def meet(self, restarts: Restarts, before: LauncherStore | None, *, lost: bool = False) -> Met:
        """Wait for all machines. Call it in a thread: it does not handle signals.

        Args:
            before: the store of the attempt before; ``None`` before the first attempt.
            lost: whether that store is lost.
        """
        deadline = time.monotonic() + self.seconds
        is_static = self._launch.rdzv_backend == "static"
        if lost and is_static:
            self._handler = None
        # c10d's next round is another part of the store, and a new store has no meeting yet.
        self._known = before.number + 1 if before is not None and is_static and not lost else 0
        info = self._next_rendezvous(deadline, again=before is not None)
        store = LauncherStore(info.store, info.rank, self._known)
        bootstrap = info.bootstrap_store_info
        if store.machine == 0:
            store.set(_NUMBER, str(store.number))
        else:
            restarts = self._find_number(store, restarts, deadline)
        joined = Joined(
            ranks=self._world.num_local,
            device=self._world.device,
            max_restarts=restarts.max_restarts,
            launcher=self._launcher,
            restarts=restarts.to_json(),
        )
        store.set(store.own("joined"), json.dumps(asdict(joined)))
        if store.machine == 0:
            self._open(store, bootstrap.master_addr, deadline)
        go = json.loads(store.wait_for(store.key("go"), deadline + _LEAVE_SECONDS))
        if go["problem"] is not None:
            store.leave()
            raise RendezvousError([Problem(**go["problem"])])
        if json.loads(store.get(store.own("joined")))["launcher"] != self._launcher:
            raise RendezvousError([_already_here(store.machine)])
        address, port = go["address"] or bootstrap.master_addr, go["port"] or bootstrap.master_port
        return Met(store=store, address=address, port=port, restarts=Restarts.from_json(go["restarts"]))

    def close(self) -> None:
        """End torchrun's rendezvous."""
        if self._handler is not None:
            self._handler.shutdown()

    def _next_rendezvous(self, deadline: float, *, again: bool) -> Any:
        while True:
            try:
                if self._handler is None:
                    self._handler = self._new_handler()
                with _without_shared_store() if again else nullcontext():
                    return self._handler.next_rendezvous()
            except Exception:
                self._handler = None
                if not again or time.monotonic() > deadline:
                    raise
                time.sleep(1.0)  # the machine that hosts the store is not there yet

    def _new_handler(self) -> Any:
        with torch_log_level():
            import torch.distributed.elastic.rendezvous.registry as registry
            from torch.distributed.elastic.rendezvous import RendezvousParameters
            from torch.distributed.launcher.api import LaunchConfig  # noqa: F401  (registers the handlers)

        launch, conf = self._launch, dict(self._conf)
        if launch.rdzv_backend == "static":
            conf["rank"] = launch.machine_rank
        parameters = RendezvousParameters(
            backend=launch.rdzv_backend,
            endpoint=endpoint(launch),
            run_id=_RUN_ID,
            min_nodes=self._world.num_machines,
            max_nodes=self._world.num_machines,
            local_addr=launch.main_process_ip if self._is_local else None,
            **conf,
        )
        return registry.get_rendezvous_handler(parameters)

    @property
    def _is_local(self) -> bool:
        return self._launch.main_process_ip in ("127.0.0.1", "localhost", "::1")

    def _open(self, store: LauncherStore, address: str, deadline: float) -> None:
        """Wait for the other machines, and write what all of them need to start their ranks. On machine 0."""
        machines = range(self._world.num_machines)
        keys = [store.key(f"joined/{machine}") for machine in machines]
        while not store.has(*keys) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        here = [machine for machine, key in zip(machines, keys, strict=True) if store.has(key)]
        joined = [Joined(**json.loads(store.get(keys[machine]))) for machine in here]
        problem = differing_worlds(joined)
        if len(here) < len(machines):
            problem = self._not_back([machine for machine in machines if machine not in here])
        restarts = max((Restarts.from_json(each.restarts) for each in joined), key=lambda each: each.count)
        port = 0
        if restarts.count and problem is None:
            import torch.distributed as dist

            address = address if self._launch.rdzv_backend == "static" or self._is_local else socket.getfqdn()
            self._rank_store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            port = self._rank_store.port
        go = {
            "problem": made_from(problem),
            "address": address if port else "",
            "port": port,
            "restarts": restarts.to_json(),
        }
        store.set(store.key("go"), json.dumps(go))
        until = time.monotonic() + _LEAVE_SECONDS * (problem is not None)
        while time.monotonic() < until and not store.has_left(*here[1:]):
            time.sleep(POLL_SECONDS)

    def _not_back(self, missing: Sequence[int]) -> Problem:
        which = f"machine{'s' * (len(missing) > 1)} {format_names([str(machine) for machine in missing], 8)}"
        message = f"{which} did not join the others in {self.seconds:g} s."
        fix = "Start the launcher on every machine. --rdzv_conf timeout=SECONDS changes the limit."
        return Problem(code="FSDP-E717", message=message, fix=fix)

    def _find_number(self, store: LauncherStore, restarts: Restarts, deadline: float) -> Restarts:
        """Find the meeting to join, on machines other than 0. If ranks run without this machine, stop them first."""
        while True:
            store.number = int(store.wait_for(_NUMBER, deadline))
            if store.number >= self._known:
                if not store.has(store.key("go")):
                    return restarts
                decision = self._report_loss(store, restarts, deadline)
                restarts, self._known = decision.restarts, store.number + 1
            if time.monotonic() > deadline:
                raise RendezvousError([self._not_back([0])])
            time.sleep(POLL_SECONDS)

    def _report_loss(self, store: LauncherStore, restarts: Restarts, deadline: float) -> Decision:
        """Report that the earlier launcher of this machine is gone, and wait for the decision about a restart."""
        key = beat_key(store.machine)
        first = store.get(key) if store.has(key) else ""
        time.sleep(_BEATS_SECONDS)
        if not restarts.max_restarts or (store.has(key) and store.get(key) != first):
            raise RendezvousError([_already_here(store.machine)])
        store.put_verdict(lost_machine(store.machine))
        store.announce("its launcher was started again")
        decision = store.read_decision(deadline)
        if decision.problem is not None:
            store.leave()
            raise RendezvousError([decision.problem])
        return decision


@contextmanager
def _without_shared_store() -> Iterator[None]:
    """Make torch's c10d rendezvous announce the address of rank 0 in each round.

    Otherwise it does so in the first round of a launcher only, and a launcher that joins later waits for it in vain.
    The ranks of a later attempt do not use the store behind this address.
    """
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _already_here(machine: int) -> Problem:
    message = f"machine {machine} has already joined this run, and the run has not lost it or has no --max_restarts."
    fix = "Give each machine its own --machine_rank. After a failure, start all machines again."
    return Problem(code="FSDP-E719", message=message, fix=fix)


def differing_worlds(joined: Sequence[Joined]) -> Problem | None:
    """Return a problem unless all machines start the same number of ranks on the same device type."""
    first = joined[0]
    for machine, other in enumerate(joined):
        if (other.ranks, other.device) != (first.ranks, first.device):
            message = (
                f"machine {machine} starts {plural(other.ranks, 'rank')} on {other.device}, but machine 0 starts "
                f"{plural(first.ranks, 'rank')} on {first.device}."
            )
        elif other.max_restarts != first.max_restarts:
            message = f"machine {machine} has --max_restarts {other.max_restarts}, but machine 0 {first.max_restarts}."
        else:
            continue
        return Problem(code="FSDP-E708", message=message, fix="Give every machine the same config and flags.")
    return None
