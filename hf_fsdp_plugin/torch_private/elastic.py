"""Torch's elastic agent for the ranks of one attempt. Another object, the attempt, decides when the attempt is over.

The documentation of torch says that a custom agent implements the methods that are replaced here, but torch does not
promise to keep them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from hf_fsdp_plugin.contracts import contracts_of, missing_name_error

CONTRACTS = contracts_of(
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent",
    "refused",
    "`hf-fsdp launch`",
    *("_start_workers", "_monitor_workers", "_exit_barrier", "_shutdown"),
)


class Attempt(Protocol):
    """The ranks of this machine from their start to their end."""

    def begin(self) -> None:
        """Called when the machines have met, before the ranks are started."""

    def take_pids(self, pids: Mapping[int, int]) -> None:
        """Take the processes of the ranks, by local rank."""

    def is_over(self) -> bool:
        """Return whether all ranks have exited. Stops them if one has failed."""

    def end(self, death_signal: signal.Signals) -> None:
        """End the ranks that still run."""


class AttemptAgent(LocalElasticAgent):
    """Torch's agent. It reaps the ranks when all have exited, and restarts none.

    Raises:
        ContractError: torch's agent does not have the methods that are replaced here.
    """

    def __init__(self, spec: WorkerSpec, attempt: Attempt, logs: LogsSpecs) -> None:
        for row in CONTRACTS:
            if not any(row.name in vars(base) for base in LocalElasticAgent.__mro__):
                raise missing_name_error(row)
        super().__init__(spec, logs_specs=logs, start_method="spawn")
        self._attempt = attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt.begin()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._attempt.take_pids(pids)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._attempt.is_over():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Do nothing: the attempt has waited for the other machines."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self._attempt.end(death_sig)
        super()._shutdown(death_sig, *args, **kwargs)  # versions have different further parameters
