"""How the launchers of a run meet before each attempt: torch's rendezvous, and what this launcher adds to it.

One machine needs no network: its ranks meet on the loopback interface. Several machines meet by torch's c10d
rendezvous. Added to it are numbers of the machines that ``--machine_rank`` decides, the comparison of what each
machine is about to run, and a store for the ranks of each attempt that the launcher hosts: a rank that is stopped or
killed does not take it away, and nothing of the attempt before is in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

import psutil

from hf_fsdp_plugin.launcher.other_machines import OtherMachines, compare_facts, wait_until
from hf_fsdp_plugin.launcher.world import World, rendezvous_address
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import silence_limit
from hf_fsdp_plugin.runs.restart_policy import Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection
from hf_fsdp_plugin.text import plural, printable

_T = TypeVar("_T")
MEET_SECONDS: Final = 600.0
"""Seconds that machines wait for each other. Same as torchrun's rendezvous."""
_LAST_CALL_SECONDS: Final = 10
"""Seconds that a run with fewer machines than the maximum waits for more of them."""
_LEAVE_SECONDS: Final = 5.0
"""Seconds that the machine with the store keeps it for the others, which may still read it."""
_BEATS_SECONDS: Final = 2.5
"""Seconds in which a running launcher writes at least one heartbeat."""
_NAME: Final = "hf_fsdp"
"""Name of the rendezvous, the same for all runs: two runs on one port have to meet to be refused."""


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
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore
    from torch.distributed.elastic import rendezvous as elastic
    from torch.distributed.elastic.multiprocessing import SignalException as SignalException
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous


class Rendezvous(StaticTCPRendezvous):
    """The rendezvous of one machine. Each attempt has a store of its own on the loopback interface.

    Attributes:
        restarts: the failed attempts of the run, from the machine that knows most.
        machines: the other machines during the present attempt.
        address: where the ranks of the present attempt meet.
    """

    def __init__(self, restarts: Restarts, port: int = 0) -> None:
        super().__init__("127.0.0.1", port, rank=0, world_size=1, run_id=restarts.run_id, timeout=round(MEET_SECONDS))
        self.restarts = restarts
        self.machines = OtherMachines()
        self.address = ""
        self._rank_store: Store | None = None
        self._listening: socket.socket | None = None

    def reserve(self) -> Problem | None:
        """Listen on the requested port. Returns a warning if it is in use: then another port is used."""
        try:
            self._listening = _listen(self.master_port)
        except OSError:
            message = f"port {self.master_port} is in use on this machine. A free port is used instead."
            return Problem(code="FSDP-W711", setting="launch.main_process_port", message=message)
        return None

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        listening = self._listening or _listen(0)
        self._listening = None
        host, port = listening.getsockname()
        # The store keeps the socket until the next attempt has one.
        self._rank_store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.address = f"{host}:{port}"
        self.machines = OtherMachines()
        return elastic.RendezvousInfo(HashStore(), 0, 1, elastic.RendezvousStoreInfo(host, port))

    def is_waiting(self) -> bool:
        """Return whether a machine wants to join the run. Asks once per second."""
        return False

    def get_run_id(self) -> str:
        return self.restarts.run_id


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=socket.SOMAXCONN)


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
        self._launch, self._world, self._facts = launch, world, facts
        self._min_machines = min_machines or world.num_machines
        self._conf: dict[str, Any] = dict(pair.split("=", 1) for pair in conf.split(",") if "=" in pair)
        self._seconds = float(self._conf.pop("timeout", self._conf.get("join_timeout", MEET_SECONDS)))
        self._is_numbered = launch.rdzv_backend == "static"
        self._is_host = self._is_numbered and launch.machine_rank == 0
        self._is_local = launch.main_process_ip in ("127.0.0.1", "localhost", "::1")
        self._store: Any = None
        self._handler: Any = None
        self._num_met = 0
        self._next_look = 0.0
        self._has_left = threading.Event()
        self._beats: threading.Thread | None = None

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Wait for the other machines.

        Raises:
            SpecError: they did not come in time, or run something else.
        """
        again = bool(self._num_met)
        try:
            if self._handler is None or self.machines.is_cut:  # machine 0 may come back
                self._connect()
            # The store of the ranks is hosted below, one for each attempt.
            with _variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
                info = self._handler.next_rendezvous()
            return self._meet(info)
        except (elastic.RendezvousError, RuntimeError, OSError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            if isinstance(error, elastic.RendezvousTimeoutError):
                reason = "not all of them came in time"
            elif isinstance(error, elastic.RendezvousClosedError):
                with contextlib.suppress(RuntimeError):
                    refused = self._store.check(["refused"]) and compare_facts(self._facts, self._store.get("refused"))
                    if refused:
                        raise SpecError([refused]) from None
                reason = "the run has ended on the other machines"
            raise self._not_met(printable(reason[:300]), again) from error

    def _connect(self) -> None:
        """Open the store of the launchers, on machine 0, or connect to it, and compare what the machines run."""
        _check_address(self._launch, is_host=self._is_host, seconds=self._seconds)
        limit = max(3, round(silence_limit()))
        options = {
            "join_timeout": str(round(self._seconds)),
            "last_call_timeout": str(_LAST_CALL_SECONDS),
            "keep_alive_interval": str(max(1, limit // 3)),
            "read_timeout": str(limit),
            **({"is_host": str(self._is_host)} if self._is_numbered else {}),
            **self._conf,
        }
        local = self._launch.main_process_ip if self._is_local else None
        address, num_machines = rendezvous_address(self._launch), self._world.num_machines
        parameters = elastic.RendezvousParameters(
            "c10d", address, _NAME, self._min_machines, num_machines, local_addr=local, **options
        )
        seconds = 0.0 if self._is_host else self._seconds  # machine 0 may not be started yet
        backend, store = _retry(lambda: create_backend(parameters), elastic.RendezvousError, seconds)
        _limit_silence(address, limit)
        self._store = PrefixStore(_NAME, store)
        handler = create_handler(store, backend, parameters)
        mine = json.dumps(self._facts)
        if problem := compare_facts(self._facts, self._store.compare_set("facts", "", mine)):
            if not self._store.check(["met"]):  # only machines that still wait are refused too, not a running run
                self._store.set("refused", mine)
                handler.set_closed()
            raise SpecError([problem])
        self._claim()
        self._handler = handler

    def _claim(self) -> None:
        """Claim the number of this machine, and write heartbeats from now on.

        Another launcher with this number must have exited.
        """
        if not self._is_numbered:
            return
        number, store = self._launch.machine_rank, self._store
        if (beats := store.add(f"alive/{number}", 1)) > 1:
            time.sleep(_BEATS_SECONDS)
            if store.add(f"alive/{number}", 0) != beats:
                message = f"machine {number} has already joined this run, and the run has not lost it."
                fix = "Give each machine its own --machine_rank. After a failure, start all machines again."
                raise _error("FSDP-E719", message, fix)

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the store is lost
                while not self._has_left.wait(1.0):
                    store.add(f"alive/{number}", 1)

        self._beats = threading.Thread(target=beat, name="hf_fsdp_alive", daemon=True)
        self._beats.start()

    def _meet(self, info: elastic.RendezvousInfo) -> elastic.RendezvousInfo:
        """Exchange what each machine knows, number them, and open the store of the ranks."""
        meeting, node, size = info.store, info.rank, info.world_size
        mine = {"rank": self._launch.machine_rank if self._is_numbered else node, "restarts": asdict(self.restarts)}
        meeting.set(f"joined/{node}", json.dumps(mine))
        if node == 0:
            _open(meeting, size)
        go = json.loads(meeting.get(f"go/{node}"))
        self._store.set("met", "")
        number, self.restarts = go["number"], Restarts.from_json(go["restarts"])
        attempt = PrefixStore(go["token"], meeting)
        if number == 0:
            local = self._launch.main_process_ip if self._is_local or self._is_host else socket.getfqdn()
            self._rank_store = TCPStore(local, 0, is_master=True, wait_for_workers=False)
            attempt.set("address", json.dumps([local, self._rank_store.port]))
        host, port = json.loads(attempt.get("address"))
        self.address = f"{host}:{port}"
        self.machines = OtherMachines(attempt, number, size)
        self._num_met = size
        return elastic.RendezvousInfo(attempt, number, size, elastic.RendezvousStoreInfo(host, port))

    def is_waiting(self) -> bool:
        now = time.monotonic()
        if self._num_met == self._world.num_machines or now < self._next_look:
            return False
        self._next_look = now + 1.0
        with contextlib.suppress(RuntimeError, elastic.RendezvousError):  # the store is lost, as the others find out
            return bool(self._handler.num_nodes_waiting())
        return False

    def shutdown(self) -> bool:
        self._has_left.set()
        if self._beats is not None:
            self._beats.join()
        if self._handler is None:
            return True
        with contextlib.suppress(RuntimeError, elastic.RendezvousError):  # the machine with the store has ended
            self._store.add("left", 1)
        # Ends torch's thread of heartbeats in any case: the interpreter must not end while it is in a request.
        with contextlib.suppress(RuntimeError, elastic.RendezvousError):
            self._handler.shutdown()
            if self._is_host or not self._is_numbered:  # this machine may host the store
                wait_until(lambda: self._store.add("left", 0) >= self._num_met, _LEAVE_SECONDS)
        return True

    def _not_met(self, reason: str, again: bool) -> SpecError:
        at = rendezvous_address(self._launch)
        if again:
            fix = (
                "Start the launcher on every machine. --rdzv_conf timeout=SECONDS changes the limit. If machine 0 was "
                "lost, start the whole run again: it resumes from its newest checkpoint with the same --run_id."
            )
            return _error("FSDP-E717", f"the machines did not meet again at {at}: {reason}.", fix)
        fix = (
            "Check that machine 0 is started, that its address and port are reachable from here, and that no two "
            "machines have the same --machine_rank."
        )
        machines = plural(self._world.num_machines, "machine")
        return _error("FSDP-E707", f"the {machines} did not meet at {at}: {reason}.", fix)


def _open(meeting: Store, size: int) -> None:
    """Give each machine its number, and the failed attempts of the machine that knows most. Run by one machine."""
    joined = [json.loads(text) for text in meeting.multi_get([f"joined/{node}" for node in range(size)])]
    restarts = max((each["restarts"] for each in joined), key=lambda tree: len(tree["failures"]))
    go = {"restarts": restarts, "token": secrets.token_hex(16)}
    numbers = {rank: number for number, rank in enumerate(sorted(each["rank"] for each in joined))}
    for node, each in enumerate(joined):
        meeting.set(f"go/{node}", json.dumps(go | {"number": numbers[each["rank"]]}))


def _limit_silence(address: str, seconds: float) -> None:
    """Let requests to the store at an address fail if that machine is out of reach for ``seconds``. Linux only.

    torch waits for an answer without a limit, and the kernel sends a request again for 15 minutes, ever more rarely.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    port = int(address.rpartition(":")[2])
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as own:
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


def _retry(request: Callable[[], _T], errors: type[Exception], seconds: float) -> _T:
    """Return the result of a request, which is repeated once per second for ``seconds`` while it raises an error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return request()
        except errors:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)


def _check_address(launch: LaunchSection, *, is_host: bool, seconds: float) -> None:
    """Check the name of machine 0 and, on it, that the port is free.

    Args:
        seconds: how long to wait for the name in a pod of Kubernetes, which has no name before it runs.
    """
    host, port = rendezvous_address(launch).rsplit(":", 1)
    seconds = seconds if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
    try:
        found = _retry(lambda: socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM), OSError, seconds)
    except OSError as error:
        message = f"the address of machine 0, {printable(host)}, is unknown here: {error.strerror or error}."
        raise _error("FSDP-E707", message, "Pass the address of machine 0 as --main_process_ip.") from None
    family, *_, address = found[0]
    if not is_host:
        return
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        message = f"machine 0 cannot listen at {rendezvous_address(launch)}: {os.strerror(error.errno or 0)}."
        fix = "Pass an address of this machine as --main_process_ip, and a free port as --main_process_port."
        raise _error("FSDP-E707", message, fix) from None


def _error(code: str, message: str, fix: str) -> SpecError:
    return SpecError([Problem(code=code, message=message, fix=fix)])
