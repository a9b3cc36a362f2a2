"""How the launchers of a run meet before each attempt, by torch's rendezvous, and what they tell each other.

One machine uses torch's static rendezvous on a free port. Several use the backend of ``--rdzv_backend``: ``static``,
where ``--machine_rank`` numbers the machines, or ``c10d``, where a lost machine may come back at a restart. When all
have met, they compare what each is about to run, and take the failed attempts of the machine that knows most. The
launcher of machine 0 opens a store for the ranks of each attempt: torch's own is the same for all attempts, and
contains the addresses of killed ranks (pytorch#167288).

During an attempt, the machine that sees a failure first announces it, and all stop their ranks. Then it writes the
failed attempt as it knows it, and all use this one: so every launcher knows the same failed attempts and makes the same
decision (``runs.attempts.refuse_restart``).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.launcher.world import World, rendezvous_address
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection
from hf_fsdp_plugin.text import plural, printable

_NAME: Final = "hf_fsdp"
"""Name of the rendezvous, the same for all runs: two runs on one port have to meet to be refused."""
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_STORE_LOST: Final = "the launcher that hosts the rendezvous is gone"
_MAX_TEXT: Final = 1000
"""Maximum number of characters of an announcement."""


# C++ stacks of a closed store are hidden. Torch reads the variable when it is imported. Python still raises the errors.
_LOG_LEVEL: Final = "TORCH_CPP_LOG_LEVEL"
_is_set: Final = _LOG_LEVEL in os.environ
os.environ.setdefault(_LOG_LEVEL, "FATAL")
try:
    from torch.distributed import PrefixStore, Store, TCPStore
    from torch.distributed.elastic import rendezvous as elastic
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing import SignalException as SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError as RendezvousError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
    from torch.distributed.elastic.utils.distributed import get_free_port
finally:
    if not _is_set:  # the ranks inherit the environment
        del os.environ[_LOG_LEVEL]


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
        kind: ``failed`` if one of its ranks has failed, ``hung`` if they have ended because of a hang, ``lost`` if the
            store is lost: then this machine knows nothing of the others.
    """

    machine: int
    text: str
    kind: Literal["failed", "hung", "lost"] = "failed"

    def __str__(self) -> str:
        return self.text if self.kind == "lost" else f"machine {self.machine}: {self.text}"


class _LostStore:
    """A store to which the connection is lost."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_STORE_LOST)


class Rendezvous:
    """The rendezvous of this machine with the others of the run, and the exchange with them during an attempt.

    Args:
        facts: what all machines must have in common (see :func:`compare_facts`).
        conf: options as in torchrun's ``--rdzv_conf``.
        notice: prints a warning.

    Attributes:
        restarts: the failed attempts of the run, from the machine that knows most.
        machine: the number of this machine in the present attempt.
        address: where the ranks of the present attempt meet; empty before the machines have met.
    """

    def __init__(
        self,
        launch: LaunchSection,
        world: World,
        restarts: Restarts,
        *,
        facts: Mapping[str, str] = MappingProxyType({}),
        conf: str = "",
        notice: Callable[[Problem], None] = lambda problem: None,
    ) -> None:
        self.restarts = restarts
        self.machine, self.address = world.machine_rank, ""
        self._launch, self._num_machines, self._facts = launch, world.num_machines, facts
        self._conf: dict[str, Any] = dict(pair.split("=", 1) for pair in conf.split(",") if "=" in pair)
        self._notice = notice
        is_alone = world.num_machines == 1
        self._is_static = is_alone or launch.rdzv_backend == "static"
        self._meets_at = f"127.0.0.1:{get_free_port()}" if is_alone else rendezvous_address(launch)
        self._port = launch.main_process_port if is_alone else 0
        self._handler: elastic.RendezvousHandler | None = None
        self._store: Any = None
        self._rank_store: Store | None = None
        self._announced: Announced | None = None
        self._next_look = 0.0

    def open(self) -> elastic.RendezvousHandler:
        """Return torch's handler. Raises ``SpecError`` if machine 0 cannot be reached."""
        if self._handler is None:
            try:
                self._handler = self._create()
            except (RendezvousError, RuntimeError, OSError, ValueError) as error:
                raise self.not_met(error) from error
        return self._handler

    def _create(self) -> elastic.RendezvousHandler:
        seconds = str(round(float(self._conf.get("timeout", time_limits.MEET))))
        options: dict[str, Any] = {"timeout": seconds, "rank": self._launch.machine_rank}
        if not self._is_static:
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise torch opens a store that is not used
            local = self._launch.main_process_ip if self._launch.main_process_ip in _LOCAL else None
            # The store is asked for as long, because machine 0 may not be started yet.
            options = {"join_timeout": seconds, "read_timeout": seconds, "local_addr": local, **self._conf}
        backend, size = "static" if self._is_static else "c10d", self._num_machines
        return get_rendezvous_handler(
            elastic.RendezvousParameters(backend, self._meets_at, _NAME, size, size, **options)
        )

    def meet(self, group: WorkerGroup) -> dict[str, str]:
        """Exchange what the machines know, when they have met. Returns the variables of the ranks for their store.

        Raises:
            SpecError: the machines are about to run different things.
        """
        number, store = group.group_rank, group.store
        assert number is not None and store is not None and group.master_addr is not None
        self.machine, self._announced = number, None
        # The store of c10d is another one after each meeting.
        attempt = self._store = PrefixStore(f"attempt/{self.restarts.count if self._is_static else ''}", store)
        if attempt.add(f"number/{number}", 1) > 1:
            message = f"machine {number} has already joined this run."
            fix = "Give each machine its own --machine_rank. After a failure, start all machines again."
            raise _error("FSDP-E719", message, fix)
        attempt.set(f"joined/{number}", json.dumps({"facts": dict(self._facts), "restarts": asdict(self.restarts)}))
        joined = [json.loads(attempt.get(f"joined/{each}")) for each in range(self._num_machines)]
        for other in joined:
            if problem := compare_facts(self._facts, other["facts"]):
                raise SpecError([problem])
        known = max((other["restarts"] for other in joined), key=lambda tree: len(tree["failures"]))
        self.restarts = Restarts.from_json(known)
        if number == 0:
            self._rank_store = self._open_rank_store(group.master_addr)
            attempt.set("port", str(self._rank_store.port))
        port = attempt.get("port").decode()
        self.address = f"{group.master_addr}:{port}"
        return {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": str(True)}

    def _open_rank_store(self, address: str) -> TCPStore:
        """Return a store, in the first attempt of a single machine on the requested port."""
        port, self._port = self._port, 0
        if port:
            try:
                return TCPStore(address, port, is_master=True, wait_for_workers=False)
            except RuntimeError:
                message = f"port {port} is in use on this machine. A free port is used instead."
                self._notice(Problem(code="FSDP-W711", setting="launch.main_process_port", message=message))
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def shutdown(self) -> None:
        """Leave the run, after its last attempt."""
        store, size = self._store, self._num_machines
        with contextlib.suppress(RuntimeError):  # the machine with the store has ended
            if store is not None and store.add("left", 1) < size and (self.machine == 0 or not self._is_static):
                wait_until(lambda: store.add("left", 0) >= size, time_limits.LEAVE)
        with contextlib.suppress(RuntimeError, RendezvousError):
            if self._handler is not None:
                self._handler.shutdown()

    def not_met(self, error: Exception | None) -> SpecError:
        """Return the error of a rendezvous that has failed; ``None``: the run has ended without this machine."""
        reason = _reason(error)
        if self._store is not None:
            fix = (
                "Start the launcher on every machine. --rdzv_conf timeout=SECONDS changes the limit. With the static "
                "rendezvous, or if machine 0 was lost, start the whole run again: it resumes with the same --run_id."
            )
            return _error("FSDP-E717", f"the machines did not meet again at {self._meets_at}: {reason}.", fix)
        fix = (
            "Check that machine 0 is started, that its address and port are reachable from here, that the port is free "
            "on machine 0, and that no two machines have the same --machine_rank."
        )
        message = f"the {plural(self._num_machines, 'machine')} did not meet at {self._meets_at}: {reason}."
        return _error("FSDP-E707", message, fix)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Send requests to the store. After one that fails, the rest of the block is skipped, and nobody is asked."""
        try:
            yield
        except RuntimeError:  # torch raises it if the connection is closed or the store does not answer
            self._store = _LostStore()
            self._announced = self._announced or Announced(self.machine, _STORE_LOST, "lost")

    def failure(self) -> Announced | None:
        """Return why a machine has ended the attempt; ``None`` if none has. Asks once per second."""
        now = time.monotonic()
        if self._announced is None and now >= self._next_look:
            self._next_look = now + time_limits.LOOK
            with self._asking():
                if self._store.check(["failed"]):
                    self._announced = self._read_announced()
        return self._announced

    def announce(self, text: str, kind: Literal["failed", "hung"] = "failed") -> Announced:
        """End the attempt on all machines. Returns what was announced first."""
        if self._announced is None:
            mine = Announced(self.machine, text[:_MAX_TEXT], kind)
            with self._asking():
                self._store.compare_set("failed", "", json.dumps(astuple(mine)))
                self._announced = self._read_announced()
            self._announced = self._announced or mine
        return self._announced

    def _read_announced(self) -> Announced:
        machine, text, kind = json.loads(self._store.get("failed"))
        return Announced(machine, printable(text), kind)

    @property
    def is_first(self) -> bool:
        """Whether this machine has announced the failure."""
        return self._announced is not None and self._announced.machine == self.machine

    def agree(self, attempt: FailedAttempt) -> FailedAttempt:
        """Return the failed attempt as the machine that announced the failure knows it. ``attempt``: as known here."""
        first = self._announced
        if first is not None:
            with self._asking():
                if self.is_first:
                    self._store.set("attempt", json.dumps(asdict(attempt)))
                    return attempt
                if wait_until(lambda: bool(self._store.check(["attempt"])), time_limits.VERDICT):
                    return FailedAttempt(**json.loads(self._store.get("attempt")))
                return replace(attempt, failure=f"machine {first.machine} was lost", machine=first.machine, same_as="")
        return replace(attempt, final=f"{_STORE_LOST}.") if isinstance(self._store, _LostStore) else attempt


def compare_facts(mine: Mapping[str, str], other: Mapping[str, str]) -> Problem | None:
    """Return a problem unless this machine is about to run what another one runs.

    Args:
        mine: the facts of this machine that must be equal on all machines of a run.
        other: the facts of the other machine.
    """
    differing = [name for name, here in mine.items() if other.get(name, here) != here]
    found = [f"{name} is {mine[name]} here, and {other[name]} on another machine" for name in differing]
    fix = "Give every machine the same command, config and package. Give each run a port of its own."
    message = f"the machines are about to run different things: {'; '.join(found)}."
    return Problem(code="FSDP-E708", message=message, fix=fix) if found else None


def _reason(error: Exception | None) -> str:
    """Return in one line why the machines have not met."""
    if error is None or isinstance(error, elastic.RendezvousClosedError):
        return "the run has ended on the other machines"
    if isinstance(error, elastic.RendezvousTimeoutError):
        return "not all of them came in time"
    cause = error.__cause__ or error  # of a lost connection, which has no reason of its own
    lines = (line.strip() for line in str(cause).splitlines())
    return next(filter(None, lines), type(cause).__name__)[:300].rstrip(".")


def _error(code: str, message: str, fix: str) -> SpecError:
    return SpecError([Problem(code=code, message=message, fix=fix)])
