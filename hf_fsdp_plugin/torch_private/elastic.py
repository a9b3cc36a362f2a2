"""Torch's elastic agent for the ranks of one attempt. ``launcher.start_ranks.Attempt`` decides when it is over.

The documentation of torch says that a custom agent implements the methods that are replaced here, but torch does not
promise to keep them.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.contracts import contracts_in, missing_name_error

CONTRACTS = contracts_in(__file__)
_STOPPING: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class StartedRanks(Protocol):
    """The ranks of this machine from their start to their end: what an agent calls, in this order."""

    def begin(self, group: WorkerGroup) -> None:
        """Called when the machines have met, before the ranks are started."""

    def prepare(self, local_rank: int, env: dict[str, str]) -> tuple[str, str]:
        """Complete the environment of a rank, and return the files to which its stdout and stderr go."""

    def take_pids(self, pids: Mapping[int, int]) -> None:
        """Take the processes, by local rank."""

    def is_over(self) -> bool:
        """Return whether all ranks have exited. Stops them if one has failed."""

    def end(self, death_signal: signal.Signals) -> None:
        """End the ranks that still run."""


class _Streams(LogsSpecs):
    """The files of the output of the ranks, for torch, which asks when it has made their environment."""

    def __init__(self, ranks: StartedRanks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = {local_rank: self._ranks.prepare(local_rank, env) for local_rank, env in envs.items()}
        stdouts, stderrs = ({rank: paths[number] for rank, paths in found.items()} for number in (0, 1))
        errors = {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()}
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=errors)


class AttemptAgent(LocalElasticAgent):
    """Torch's agent. It reaps the ranks when all have exited, and restarts none.

    Args:
        ranks: the ranks of this machine.
        command: program and arguments of a rank.
        num_local: number of the ranks.

    Raises:
        ContractError: torch's agent does not have the methods that are replaced here.
    """

    def __init__(
        self, ranks: StartedRanks, handler: RendezvousHandler, command: Sequence[str], *, num_local: int, role: str
    ) -> None:
        for row in CONTRACTS:
            if not any(row.name in vars(base) for base in LocalElasticAgent.__mro__):
                raise missing_name_error(row)
        spec = WorkerSpec(
            role=role,
            local_world_size=num_local,
            rdzv_handler=handler,
            max_restarts=0,  # an attempt has an agent of its own
            monitor_interval=time_limits.WATCH,
            entrypoint=command[0],
            args=tuple(command[1:]),
        )
        super().__init__(spec, logs_specs=_Streams(ranks), start_method="spawn")
        self._ranks = ranks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ranks.begin(worker_group)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._ranks.take_pids(pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        while not self._ranks.is_over():  # torch would start the ranks again if another machine waits to join
            time.sleep(time_limits.WATCH)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self._ranks.end(death_sig)
        super()._shutdown(death_sig, *args, **kwargs)  # versions have different further parameters


def prepare_torch() -> None:
    """Let torch's agent handle no signal that this process ignores, as under nohup, and print no log of its own."""
    handled = [name for name in _STOPPING if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api", "rendezvous"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
