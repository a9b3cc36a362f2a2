"""How the launchers of a run meet before each attempt: torch's rendezvous, and what they exchange when they have met.

One machine uses torch's static rendezvous on a free port. Several use the backend of ``--rdzv_backend``: ``static``,
where ``--machine_rank`` numbers the machines, or ``c10d``, where machines may leave and join. When all have met, they
compare what each is about to run, and take the failed attempts of the machine that knows most. The launcher of machine
0 opens a store for the ranks of each attempt: torch's own is the same for all attempts, and contains the addresses of
killed ranks (pytorch#167288).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.launcher.other_machines import OtherMachines, compare_facts, wait_until
from hf_fsdp_plugin.launcher.world import World, rendezvous_address
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.restart_policy import Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection
from hf_fsdp_plugin.text import plural, printable

_NAME: Final = "hf_fsdp"
"""Name of the rendezvous, the same for all runs: two runs on one port have to meet to be refused."""
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while only, because the ranks inherit the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# C++ stacks of a closed store are hidden. Torch reads the variable when it is imported. Python still raises the errors.
with _variable("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")):
    from torch.distributed import PrefixStore, Store, TCPStore
    from torch.distributed.elastic import rendezvous as elastic
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing import SignalException as SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError as RendezvousError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.utils.distributed import get_free_port


class Rendezvous:
    """The rendezvous of one machine. Each attempt has a store of its own, which torch opens in the launcher.

    Attributes:
        restarts: the failed attempts of the run, from the machine that knows most.
        machines: the other machines during the present attempt.
        address: where the ranks of the present attempt meet; empty before the machines have met.

    Args:
        port: the requested port of the first attempt; 0 for any.
    """

    def __init__(self, restarts: Restarts, port: int = 0) -> None:
        self.restarts = restarts
        self.machines = OtherMachines()
        self.address = ""
        self._port = port

    def open(self) -> tuple[elastic.RendezvousHandler, Problem | None]:
        """Return torch's handler for the next attempt, and a warning if the requested port is in use.

        Raises:
            SpecError: machine 0 cannot be reached.
        """
        port, self._port = self._port, 0
        handler, problem = _static(f"127.0.0.1:{port or get_free_port()}"), None
        try:
            handler.next_rendezvous()  # torch calls this function again, which keeps the store
        except RuntimeError:
            message = f"port {port} is in use on this machine. A free port is used instead."
            problem = Problem(code="FSDP-W711", setting="launch.main_process_port", message=message)
            handler = _static(f"127.0.0.1:{get_free_port()}")
        return handler, problem

    def meet(self, group: WorkerGroup) -> dict[str, str]:
        """Exchange what the machines know, when they have met. Returns the variables of the ranks for their store.

        Raises:
            SpecError: the machines are about to run different things.
        """
        self.address = f"{group.master_addr}:{group.master_port}"
        self.machines = OtherMachines()
        return {}

    def is_waiting(self) -> bool:
        """Return whether a machine wants to join the run. Asks once per second."""
        return False

    def shutdown(self) -> None:
        """Leave the run, after its last attempt."""

    def not_met(self, error: Exception | None) -> SpecError:
        """Return the error of a rendezvous that has failed; ``None``: the run has ended without this machine."""
        return _error("FSDP-E707", f"the ranks cannot meet: {_reason(error)}.", "Pass a free --main_process_port.")


class MachinesRendezvous(Rendezvous):
    """The rendezvous of several machines.

    Args:
        facts: what all machines must have in common (see ``other_machines.compare_facts``).
        conf: options as in torchrun's ``--rdzv_conf``.
        min_machines: smallest number of machines with which the run may start or go on.
    """

    def __init__(
        self,
        launch: LaunchSection,
        world: World,
        facts: Mapping[str, str],
        restarts: Restarts,
        *,
        conf: str = "",
        min_machines: int = 0,
    ) -> None:
        super().__init__(restarts)
        self._launch, self._num_machines, self._facts = launch, world.num_machines, facts
        self._min_machines = min_machines or world.num_machines
        self._conf: dict[str, Any] = dict(pair.split("=", 1) for pair in conf.split(",") if "=" in pair)
        self._is_static = launch.rdzv_backend == "static"
        self._handler: elastic.RendezvousHandler | None = None
        self._store: Store | None = None
        self._rank_store: Store | None = None
        self._next_look = 0.0

    def open(self) -> tuple[elastic.RendezvousHandler, Problem | None]:
        if self._handler is None:
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise torch opens a store that is not used
            try:
                self._handler = self._create()
            except (RendezvousError, RuntimeError, OSError, ValueError) as error:
                raise self.not_met(error) from error
        return self._handler, None

    def _create(self) -> elastic.RendezvousHandler:
        launch, address = self._launch, rendezvous_address(self._launch)
        seconds = str(round(float(self._conf.get("timeout", time_limits.MEET))))
        if self._is_static:
            return _static(address, launch.machine_rank, self._num_machines, timeout=seconds)
        # The store is asked for as long, because machine 0 may not be started yet.
        options = {"join_timeout": seconds, "read_timeout": seconds, **self._conf}
        local = launch.main_process_ip if launch.main_process_ip in _LOCAL else None
        parameters = elastic.RendezvousParameters(
            "c10d", address, _NAME, self._min_machines, self._num_machines, local_addr=local, **options
        )
        return get_rendezvous_handler(parameters)

    def meet(self, group: WorkerGroup) -> dict[str, str]:
        number, size, store = group.group_rank, group.group_world_size, group.store
        assert number is not None and size is not None and store is not None and group.master_addr is not None
        # The store of c10d is another one after each meeting.
        attempt = PrefixStore(f"attempt/{self.restarts.count if self._is_static else ''}", store)
        if attempt.add(f"number/{number}", 1) > 1:
            message = f"machine {number} has already joined this run."
            fix = "Give each machine its own --machine_rank. After a failure, start all machines again."
            raise _error("FSDP-E719", message, fix)
        attempt.set(f"joined/{number}", json.dumps({"facts": self._facts, "restarts": asdict(self.restarts)}))
        joined = [json.loads(attempt.get(f"joined/{each}")) for each in range(size)]
        for other in joined:
            if problem := compare_facts(self._facts, other.get("facts")):
                raise SpecError([problem])
        known = max((other["restarts"] for other in joined), key=lambda tree: len(tree["failures"]))
        self.restarts = Restarts.from_json(known)
        if number == 0:
            self._rank_store = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
            attempt.set("port", str(self._rank_store.port))
        port = attempt.get("port").decode()
        self.address = f"{group.master_addr}:{port}"
        self._store, self.machines = attempt, OtherMachines(attempt, number, size)
        return {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": str(True)}

    def is_waiting(self) -> bool:
        now = time.monotonic()
        if self._is_static or self.machines.num_machines == self._num_machines or now < self._next_look:
            return False
        self._next_look = now + 1.0
        with contextlib.suppress(RuntimeError, RendezvousError):  # the store is lost, as the others find out
            return self._handler is not None and self._handler.num_nodes_waiting() > 0
        return False

    def shutdown(self) -> None:
        store, number, size = self._store, self.machines.machine, self.machines.num_machines
        with contextlib.suppress(RuntimeError):  # the machine with the store has ended
            if store is not None and store.add("left", 1) < size and (number == 0 or not self._is_static):
                wait_until(lambda: store.add("left", 0) >= size, time_limits.LEAVE)
        with contextlib.suppress(RuntimeError, RendezvousError):
            if self._handler is not None:
                self._handler.shutdown()

    def not_met(self, error: Exception | None) -> SpecError:
        at, reason = rendezvous_address(self._launch), _reason(error)
        if self._store is not None:
            fix = (
                "Start the launcher on every machine. --rdzv_conf timeout=SECONDS changes the limit. With the static "
                "rendezvous, or if machine 0 was lost, start the whole run again: it resumes with the same --run_id."
            )
            return _error("FSDP-E717", f"the machines did not meet again at {at}: {reason}.", fix)
        fix = (
            "Check that machine 0 is started, that its address and port are reachable from here, that the port is free "
            "on machine 0, and that no two machines have the same --machine_rank."
        )
        return _error("FSDP-E707", f"the {plural(self._num_machines, 'machine')} did not meet at {at}: {reason}.", fix)


def _static(address: str, rank: int = 0, num_machines: int = 1, **options: str) -> elastic.RendezvousHandler:
    parameters = elastic.RendezvousParameters(
        "static", address, _NAME, num_machines, num_machines, rank=rank, **options
    )
    return get_rendezvous_handler(parameters)


def _reason(error: Exception | None) -> str:
    """Return in one line why the machines have not met."""
    if error is None or isinstance(error, elastic.RendezvousClosedError):
        return "the run has ended on the other machines"
    if isinstance(error, elastic.RendezvousTimeoutError):
        return "not all of them came in time"
    cause = error.__cause__ or error  # of a lost connection, which has no reason of its own
    lines = (line.strip() for line in str(cause).splitlines())
    return printable(next(filter(None, lines), type(cause).__name__)[:300]).rstrip(".")


def _error(code: str, message: str, fix: str) -> SpecError:
    return SpecError([Problem(code=code, message=message, fix=fix)])
