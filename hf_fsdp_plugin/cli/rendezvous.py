"""The rendezvous: the address and port at which all ranks meet.

On one machine the launcher imports no torch, which saves seconds: rank 0 hosts the store, on a port that the launcher
reserves. On several machines this is torchrun's own rendezvous (``static`` or ``c10d``), which waits for all machines
and hosts the store. The launchers also use this store to compare their worlds, and to stop all ranks if one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_fsdp_plugin.cli.places import RanksAt
from hf_fsdp_plugin.cli.world import World
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.model import LaunchSection
from hf_fsdp_plugin.text import plural

DEFAULT_PORT = 29500
_RUN_ID = "hf_fsdp"
_PLACES_SECONDS = 10.0
"""Seconds that the launcher of the first failure waits until the others have stopped their ranks."""
_MAX_SHARED = 8
"""Number of places that a launcher shares."""
_EXIT_BARRIER_SECONDS = 300.0
"""Seconds that a launcher keeps the store open for machines whose ranks exit later. Same as torchrun's exit barrier."""


class RendezvousError(SpecError):
    """Not all machines joined, or their settings differ."""


class Peers:
    """The launchers of the other machines. This base class is for a single machine, without other launchers."""

    def failure(self) -> str | None:
        """Return the failure that another machine has announced, if any."""
        return None

    def announce(self, text: str) -> None:
        """Announce to the other machines that a rank failed here."""

    def share_places(self, places: Sequence[RanksAt]) -> tuple[list[RanksAt], list[str]]:
        """Share where the ranks of this machine were when the run failed.

        Returns:
            On the machine that has announced its failure first: where the ranks of the other machines were. On the
            others: nothing. And notes on the machines that are not included.
        """
        return [], []

    def leave(self) -> None:
        """Announce that the ranks of this machine have exited. Returns when the store is no longer needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The address and port at which the ranks meet, and this machine's place in the run.

    Attributes:
        machine: number of this machine.
        first_rank: the global rank of this machine's local rank 0.
        hosted: True if the launcher of machine 0 hosts the store, False if rank 0 does.
        reserved: the sockets that reserve the port until rank 0 listens on it.
    """

    address: str
    port: int
    machine: int
    first_rank: int
    hosted: bool
    peers: Peers = field(default_factory=Peers)
    reserved: tuple[socket.socket, ...] = ()

    def close(self) -> None:
        """Release the port."""
        for each in self.reserved:
            each.close()


def meet_locally(launch: LaunchSection) -> tuple[Rendezvous, tuple[Problem, ...]]:
    """Return the rendezvous of one machine, and a warning if the requested port is in use."""
    problems: tuple[Problem, ...] = ()
    reserved = _reserve(launch.main_process_port)
    if not reserved:
        message = f"port {launch.main_process_port} is in use on this machine. A free port is used instead."
        problems = (Problem(code="FSDP-W711", setting="launch.main_process_port", message=message),)
        reserved = _reserve(0)
    address, port = reserved[0].getsockname()
    return Rendezvous(address=address, port=port, machine=0, first_rank=0, hosted=False, reserved=reserved), problems


def describe(world: World, launch: LaunchSection, *, rendezvous: Rendezvous | None = None) -> str:
    """Return one line: ``rendezvous: 1 machine, 2 ranks, 127.0.0.1:41234, static, gloo on cpu``."""
    ranks = plural(world.size, "rank")
    if world.num_machines > 1:
        first = rendezvous.first_rank if rendezvous is not None else launch.machine_rank * world.num_local
        ranks += f", machine {rendezvous.machine if rendezvous is not None else launch.machine_rank}"
        if rendezvous is not None or launch.rdzv_backend == "static":
            last = first + world.num_local - 1
            ranks += f" runs rank {first}" if first == last else f" runs ranks {first} to {last}"
    if rendezvous is not None:
        address = f"{rendezvous.address}:{rendezvous.port}"
    elif world.num_machines > 1:
        address = endpoint(launch)
    else:
        address = f"127.0.0.1:{launch.main_process_port or 'a free port'}"
    backend = launch.rdzv_backend if world.num_machines > 1 else "static"
    machines = plural(world.num_machines, "machine")
    return f"rendezvous: {machines}, {ranks}, {address}, {backend}, {world.backend} on {world.device}"


def endpoint(launch: LaunchSection) -> str:
    """Return the address at which several machines meet: ``10.0.0.1:29500``."""
    return f"{launch.main_process_ip}:{launch.main_process_port or DEFAULT_PORT}"


def meet_machines(launch: LaunchSection, world: World, *, rdzv_conf: str = "") -> Rendezvous:
    """Wait for the other machines in torchrun's rendezvous. Signals interrupt the wait.

    Raises:
        RendezvousError: not all machines arrived before the timeout, or they start different numbers of ranks.
    """
    results: list[Rendezvous] = []
    errors: list[Exception] = []

    def wait() -> None:
        try:
            results.append(_meet(launch, world, rdzv_conf))
        except Exception as error:
            errors.append(error)

    # The store's constructor blocks without handling signals, so it runs outside the main thread.
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if not errors:
        return results[0]
    if isinstance(errors[0], RendezvousError):
        raise errors[0]
    lines = [line for line in str(errors[0]).splitlines() if line.strip()] or [type(errors[0]).__name__]
    message = f"the {world.num_machines} machines did not meet at {endpoint(launch)}: {lines[0]}"
    fix = (
        "Check that machine 0 is started, that its address and port are reachable from here, and that no two machines "
        "have the same --machine_rank."
    )
    raise RendezvousError([Problem(code="FSDP-E707", message=message, fix=fix)]) from errors[0]


def _meet(launch: LaunchSection, world: World, rdzv_conf: str) -> Rendezvous:
    with _torch_log_level():
        import torch.distributed.elastic.rendezvous.registry as registry
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.launcher.api import LaunchConfig  # noqa: F401  (registers the handlers in every torch)

    conf = dict(pair.split("=", 1) for pair in rdzv_conf.split(",") if "=" in pair)
    is_local = launch.main_process_ip in ("127.0.0.1", "localhost", "::1")
    if launch.rdzv_backend == "static":
        conf["rank"] = launch.machine_rank  # type: ignore[assignment]
    parameters = RendezvousParameters(
        backend=launch.rdzv_backend,
        endpoint=endpoint(launch),
        run_id=_RUN_ID,
        min_nodes=world.num_machines,
        max_nodes=world.num_machines,
        local_addr=launch.main_process_ip if is_local else None,
        **conf,
    )
    handler = registry.get_rendezvous_handler(parameters)
    info = handler.next_rendezvous()
    bootstrap = info.bootstrap_store_info
    assert bootstrap is not None
    check_worlds_agree(info.store, info.rank, world)
    return Rendezvous(
        address=bootstrap.master_addr,
        port=bootstrap.master_port,
        machine=info.rank,
        first_rank=info.rank * world.num_local,
        hosted=True,
        peers=StorePeers(handler=handler, store=info.store, machine=info.rank, num_machines=world.num_machines),
    )


@contextlib.contextmanager
def _torch_log_level() -> Iterator[None]:
    """Import torch with a log level that hides C++ stacks of a closed store. Python still raises these errors.

    Torch reads the variable when it is imported. It is removed afterwards, because the ranks inherit the environment.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


def check_worlds_agree(store: Any, machine: int, world: World) -> None:
    """Raise ``RendezvousError`` unless all machines start the same number of ranks on the same device type."""
    mine = {"ranks": world.num_local, "device": world.device}
    store.set(f"world/{machine}", json.dumps(mine))
    for other in range(world.num_machines):
        theirs = json.loads(store.get(f"world/{other}"))
        if theirs != mine:
            store.set(f"left/{machine}", "1")
            message = (
                f"machine {other} starts {plural(theirs['ranks'], 'rank')} on {theirs['device']}, but machine "
                f"{machine} starts {plural(world.num_local, 'rank')} on {world.device}."
            )
            fix = "Give every machine the same config."
            raise RendezvousError([Problem(code="FSDP-E708", message=message, fix=fix)])


class StorePeers(Peers):
    """The other launchers, which share the store of the rendezvous."""

    def __init__(self, *, handler: Any, store: Any, machine: int, num_machines: int) -> None:
        self._handler = handler  # kept because under c10d it hosts the store
        self._store = store
        self._machine = machine
        # Machine 0 hosts the store; under c10d another machine may host a second store. A host must exit last.
        self._waits = machine == 0 or handler.get_backend() != "static"
        self._num_machines = num_machines
        self._next_check = 0.0
        self._first_to_fail = ""

    def failure(self) -> str | None:
        if time.monotonic() < self._next_check:
            return None
        self._next_check = time.monotonic() + 0.5
        try:
            if self._store.check(["failed"]):
                text: str = self._store.get("failed").decode()
                return None if text.startswith(f"machine {self._machine}:") else text
        except Exception:  # the process that hosts the store can fail in many ways
            return "the launcher that hosts the rendezvous has exited"
        return None

    def announce(self, text: str) -> None:
        # If the host of the store has exited, the other machines detect this in failure().
        with contextlib.suppress(Exception):
            failed: bytes = self._store.compare_set("failed", "", f"machine {self._machine}: {text}")
            self._first_to_fail = failed.decode().partition(":")[0]

    def share_places(self, places: Sequence[RanksAt]) -> tuple[list[RanksAt], list[str]]:
        # One machine reads what the others write, so the number of messages grows with the number of machines only.
        try:
            if self._first_to_fail != f"machine {self._machine}":
                content = [(each.ranks, each.state, each.place) for each in places[:_MAX_SHARED]]
                self._store.set(f"places/{self._machine}", json.dumps(content))
                return [], [f"{self._first_to_fail} failed first: see the output of its launcher"]
            return self._collect_places([machine for machine in range(self._num_machines) if machine != self._machine])
        except Exception:  # see failure()
            return [], ["the ranks of other machines are not included: see the output of their launchers"]

    def _collect_places(self, machines: Sequence[int]) -> tuple[list[RanksAt], list[str]]:
        found: list[RanksAt] = []
        silent: list[str] = []
        ended: list[str] = []
        deadline = time.monotonic() + _PLACES_SECONDS
        for machine in machines:
            while not (left := self._store.check([f"left/{machine}"])) and time.monotonic() < deadline:
                if self._store.check([f"places/{machine}"]):
                    break
                time.sleep(0.1)
            if self._store.check([f"places/{machine}"]):  # written before "left"
                content = json.loads(self._store.get(f"places/{machine}"))
                found += [RanksAt(tuple(ranks), state, place) for ranks, state, place in content]
            else:
                (ended if left else silent).append(str(machine))
        notes = [f"the ranks of machines {', '.join(ended)} had ended"] if ended else []
        if silent:
            notes.append(f"the ranks of machines {', '.join(silent)} are not included: see their launchers' output")
        return found, notes

    def leave(self) -> None:
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._machine}", "1")
            if self._waits:
                keys = [f"left/{other}" for other in range(self._num_machines)]
                deadline = time.monotonic() + _EXIT_BARRIER_SECONDS
                while time.monotonic() < deadline and not self._store.check(keys):
                    time.sleep(0.1)
            self._handler.shutdown()


def _reserve(port: int) -> tuple[socket.socket, ...]:
    """Bind sockets that do not listen, so that no other process gets the port; none if the port is in use.

    Rank 0 can still listen on the port, because the first socket has SO_REUSEADDR, as its own. So has that of another
    launcher, which could bind the same port until one of the two runs listens. The second socket, whose name only
    launchers use, keeps them apart.
    """
    reserved = [socket.socket(socket.AF_INET, socket.SOCK_STREAM)]
    try:
        reserved[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved[0].bind(("127.0.0.1", port))
        if sys.platform.startswith("linux"):
            reserved.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            reserved[1].bind(f"\0hf_fsdp_port_{reserved[0].getsockname()[1]}")  # an abstract name: no file
    except OSError:
        for each in reserved:
            each.close()
        if port == 0:
            raise
        return ()
    return tuple(reserved)
