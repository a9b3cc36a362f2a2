"""The rendezvous: the address and port at which all ranks meet.

On one machine the launcher imports no torch, which saves seconds: rank 0 hosts the store, on a port that the launcher
reserves, another one for each attempt. :mod:`hf_fsdp_plugin.launcher.machines` is the rendezvous of several machines.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hf_fsdp_plugin.hangs.places import RanksAt
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.restart_rule import Decision, Verdict, decide
from hf_fsdp_plugin.runs.restarts import Restarts
from hf_fsdp_plugin.spec.model import LaunchSection
from hf_fsdp_plugin.text import plural

DEFAULT_PORT = 29500


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

    def decide(self, verdict: Verdict, restarts: Restarts) -> Decision:
        """Return whether the ranks of all machines are started again. Call it after the ranks of this machine ended."""
        return decide([verdict], restarts)

    def meet_again(self, launch: LaunchSection, restarts: Restarts) -> Rendezvous:
        """Return the rendezvous of the next attempt.

        Raises:
            RendezvousError: a machine did not come back in time.
        """
        return meet_locally(replace(launch, main_process_port=0))[0]

    def leave(self) -> None:
        """Announce that the ranks of this machine have exited. Returns when the store is no longer needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The address and port at which the ranks meet, and this machine's place in the run.

    Attributes:
        machine: number of this machine.
        first_rank: the global rank of this machine's local rank 0.
        hosted: True if the launcher of machine 0 hosts the store, False if rank 0 does.
        restarts: the failed attempts of the run; ``None`` if this launcher knows them itself.
        reserved: the sockets that reserve the port until rank 0 listens on it.
    """

    address: str
    port: int
    machine: int
    first_rank: int
    hosted: bool
    restarts: Restarts | None = None
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
