"""Torch's elastic agent for the ranks of one attempt. ``launcher.start_ranks.AttemptRanks`` decides when it is over.

The documentation of torch says that a custom agent implements the methods that are replaced here, but torch does not
promise to keep them.
"""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from hf_fsdp_plugin.contracts import contracts_of, missing_name_error

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_METHODS = ("_start_workers", "_monitor_workers", "_exit_barrier", "_shutdown")
CONTRACTS = contracts_of(_AGENT, "refused", "`hf-fsdp launch`", *_METHODS)


class AttemptAgent(LocalElasticAgent):
    """Torch's agent. It reaps the ranks when all have exited, and restarts none.

    Args:
        attempt: the ranks of this machine from their start to their end. Its methods are ``begin(group)``, called when
            the machines have met, before the ranks are started; ``take_pids(pids)`` with the processes by local rank;
            ``is_over()``, which returns whether all ranks have exited, and stops them if one has failed; and
            ``end(signal)``, which ends the ranks that still run.

    Raises:
        ContractError: torch's agent does not have the methods that are replaced here.
    """

    def __init__(self, spec: WorkerSpec, attempt: Any, logs: LogsSpecs) -> None:
        for row in CONTRACTS:
            if not any(row.name in vars(base) for base in LocalElasticAgent.__mro__):
                raise missing_name_error(row)
        super().__init__(spec, logs_specs=logs, start_method="spawn")
        self._attempt = attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt.begin(worker_group)
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
