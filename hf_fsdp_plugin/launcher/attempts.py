"""The attempts of a run: the ranks of this machine are started, and started again after a failure."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from hf_fsdp_plugin.launcher.agent import Job, run_once
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, SignalException
from hf_fsdp_plugin.runs.exits import RunResult
from hf_fsdp_plugin.runs.failure_summary import format_failures
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts, assess_attempt, decide_restart


def first_restarts(max_restarts: int, run_id: str = "") -> Restarts:
    """Return the state of a run that has not started yet."""
    return Restarts(run_id=run_id or uuid.uuid4().hex, max_restarts=max_restarts)


def run_attempts(job: Job, rendezvous: Rendezvous, on_start: Callable[[], None] = lambda: None) -> int:
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


def _run_attempt(job: Job, rendezvous: Rendezvous, on_start: Callable[[], None]) -> int | None:
    """Run the ranks once. Returns the exit code, or ``None`` if they are to be started again."""
    began = time.monotonic()
    result = run_once(job, rendezvous, on_start)
    if result is None:
        job.notice("the run has ended without this machine, which was a spare")
        return 0
    seconds = time.monotonic() - began
    code = result.exit_code
    restarts, machines = rendezvous.restarts, rendezvous.machines
    if result.joins and not result.signal_number:
        rendezvous.restarts = restarts.after(FailedAttempt(failure="a machine joined", seconds=seconds, counts=False))
        job.notice("a machine joins the run: the ranks of all machines are started again")
        return None
    _print_failures(job, result)
    if not code or not restarts.max_restarts:
        return code
    verdict = assess_attempt(result, restarts, machine=machines.machine, seconds=seconds)
    if machines.num_ended() and not verdict.final:
        verdict = replace(verdict, final="the ranks of another machine have ended.")
    decision = decide_restart([machines.agree(verdict)], restarts)
    rendezvous.restarts = decision.restarts
    if decision.problem is not None:
        print(f"hf-fsdp: {decision.problem}", file=sys.stderr, flush=True)
        return code
    job.notice(f"{decision.restarts.title}: {decision.restarts.last_failure}")
    return None


def run_locally(job: Job) -> RunResult:
    """Run ranks on this machine only, once, with hidden output. Returns how they exited."""
    rendezvous = Rendezvous(first_restarts(0))
    try:
        result = run_once(job, rendezvous)
    finally:
        rendezvous.shutdown()
    assert result is not None  # no machine is a spare
    return result


def _print_failures(job: Job, result: RunResult) -> None:
    live = [rank.rank for rank in (result.exits if job.show_all else result.exits[:1])]
    sys.stdout.flush()
    if text := format_failures(result, debug=job.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and result.first is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)
