"""The attempts of a run: the ranks of this machine are started, watched, and started again after a failure.

This is the page of ``hf-fsdp launch`` after its config is checked, and of a rank's failure until its summary:
:func:`_run_attempt` and :func:`run_once` list the steps.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.launcher.agent import AttemptRanks, OutputClosed, RankJob
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, SignalException
from hf_fsdp_plugin.runs.exits import RunResult
from hf_fsdp_plugin.runs.failure_summary import format_failures
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts, assess_attempt, decide_restart
from hf_fsdp_plugin.torch_private.elastic import AttemptAgent

# isort: split
from torch.distributed.elastic.agent.server.api import WorkerSpec

_POLL_SECONDS: Final = 0.05
_STOPPING: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def first_restarts(max_restarts: int, run_id: str = "") -> Restarts:
    """Return the state of a run that has not started yet."""
    return Restarts(run_id=run_id or uuid.uuid4().hex, max_restarts=max_restarts)


def run_attempts(job: RankJob, rendezvous: Rendezvous, on_start: Callable[[], None] = lambda: None) -> int:
    """Run the ranks until they succeed, or until no restart is left or helps. Returns the exit code of the launcher.

    Args:
        on_start: called when the machines have met, before ranks are started.

    Raises:
        RendezvousError: the machines did not meet.
    """
    try:
        while (code := _run_attempt(job, rendezvous, on_start)) is None:
            pass
        return code
    except SignalException as stop:  # between two attempts
        return 128 + int(stop.sigval)
    finally:
        rendezvous.shutdown()


def run_locally(job: RankJob) -> RunResult:
    """Run ranks on this machine only, once, with hidden output. Returns how they exited."""
    rendezvous = Rendezvous(first_restarts(0))
    try:
        result = run_once(job, rendezvous)
    finally:
        rendezvous.shutdown()
    assert result is not None  # no machine is a spare
    return result


def _run_attempt(job: RankJob, rendezvous: Rendezvous, on_start: Callable[[], None]) -> int | None:
    """Run the ranks once. Returns the exit code, or ``None`` if they are to be started again.

    The steps after a failure:

    1. The rank records its exception before it exits (``hangs.rank_exit.failure_of``); a hang is recorded by the rank
       that has found it (``hangs.watcher``).
    2. The launcher sees the record or the exit, asks the other ranks for their stacks, gives them time to fail by
       themselves, announces the failure to the other machines, and stops its ranks (``AttemptRanks.is_over``).
    3. How each rank exited is read from its files; the first failure is determined, and the machine that has it gets
       the places of the ranks of other machines (``AttemptRanks.result``).
    4. The summary is printed.
    5. All machines take the attempt as the one that failed first knows it, and decide whether the ranks are started again.
    """
    began = time.monotonic()
    result = run_once(job, rendezvous, on_start)  # 1 to 3
    if result is None:
        job.notice("the run has ended without this machine, which was a spare")
        return 0
    seconds = time.monotonic() - began
    restarts, machines = rendezvous.restarts, rendezvous.machines
    if result.joins and not result.signal_number:
        rendezvous.restarts = restarts.after(FailedAttempt(failure="a machine joined", seconds=seconds, counts=False))
        job.notice("a machine joins the run: the ranks of all machines are started again")
        return None
    _print_failures(job, result)  # 4
    code = result.exit_code
    if not code or not restarts.max_restarts:
        return code
    attempt = assess_attempt(result, restarts, machine=machines.machine, seconds=seconds)  # 5
    if machines.num_ended() and not attempt.final:
        attempt = replace(attempt, final="the ranks of another machine have ended.")
    after = rendezvous.restarts = decide_restart([machines.agree(attempt)], restarts)
    if after.refusal is not None:
        print(f"hf-fsdp: {after.refusal}", file=sys.stderr, flush=True)
        return code
    job.notice(f"{after.title}: {after.last_failure}")
    return None


def run_once(job: RankJob, rendezvous: Rendezvous, on_start: Callable[[], None] = lambda: None) -> RunResult | None:
    """Run the ranks of this machine once. No process of theirs is left afterwards.

    Torch's agent takes these steps:

    1. The machines meet (``Rendezvous.next_rendezvous``), and ``on_start`` is called (``AttemptRanks.begin``).
    2. Each rank gets its variables and the files of its output (``AttemptRanks.reify``, ``environment.rank_env``).
    3. The processes of the ranks are started (``AttemptRanks.watch``); each runs ``run_script``.
    4. Every 50 ms, the ranks are looked at, until all have exited or were stopped (``AttemptRanks.is_over``).
    5. A signal to the launcher is sent on to the ranks, which have time to exit (``AttemptRanks.end``).

    Returns:
        How they exited; ``None`` if the run has ended while this machine was a spare.

    Raises:
        RendezvousError: the machines did not meet.
    """
    _prepare_torch()
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch:
        attempt = AttemptRanks(job, rendezvous, Path(scratch), on_start)
        spec = WorkerSpec(
            role=job.role,
            local_world_size=job.num_local,
            rdzv_handler=rendezvous,
            max_restarts=0,  # an attempt has an agent of its own
            monitor_interval=_POLL_SECONDS,
            entrypoint=job.command[0],
            args=tuple(job.command[1:]),
        )
        with attempt:
            try:
                return attempt.result() if AttemptAgent(spec, attempt, attempt).run() is not None else None
            except SignalException as stop:
                return attempt.result(signal_number=stop.sigval)
            except OutputClosed:
                return attempt.result(signal_number=signal.SIGPIPE)


def _print_failures(job: RankJob, result: RunResult) -> None:
    live = [rank.rank for rank in (result.exits if job.show_all else result.exits[:1])]
    sys.stdout.flush()
    if text := format_failures(result, debug=job.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and result.first is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)


def _prepare_torch() -> None:
    """Let torch's agent handle no signal that this process ignores, as under nohup, and print no log of its own."""
    handled = [name for name in _STOPPING if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(handled)
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api", "rendezvous"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
