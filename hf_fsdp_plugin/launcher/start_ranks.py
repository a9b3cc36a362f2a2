"""The attempts of a run: the ranks of this machine are started, watched, and started again after a failure.

Torch's agent meets the other machines, sets torch's variables, starts the processes and handles signals. Added to it
is what users miss in it: ranks have a moment to fail by themselves before they are stopped, so that the summary names
the first cause; all machines stop at once; a failure that would come again is not tried again; and the exit code is
that of the script.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

from hf_fsdp_plugin.launcher.attempt import Attempt
from hf_fsdp_plugin.launcher.rank_environment import RankJob
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, RendezvousError, SignalException  # imports torch
from hf_fsdp_plugin.runs.failures import AttemptResult, tell_failure
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts, assess_attempt, decide_restart
from hf_fsdp_plugin.torch_private.elastic import AttemptAgent, prepare_torch


def first_restarts(max_restarts: int, run_id: str = "") -> Restarts:
    """Return the state of a run that has not started yet."""
    return Restarts(run_id=run_id or uuid.uuid4().hex, max_restarts=max_restarts)


def run_attempts(job: RankJob, rendezvous: Rendezvous) -> int:
    """Run the ranks until they succeed, or until no restart is left or helps. Returns the exit code of the launcher.

    Raises:
        SpecError: the machines did not meet.
    """
    try:
        while (code := _run_attempt(job, rendezvous)) is None:
            pass
        return code
    except SignalException as stop:  # a signal between two attempts
        return 128 + int(stop.sigval)
    finally:
        rendezvous.shutdown()


def _run_attempt(job: RankJob, rendezvous: Rendezvous) -> int | None:
    """Run the ranks once. Returns the exit code, or ``None`` if they are to be started again.

    After a failure, its message is printed (``launcher.attempt`` has the steps before). All machines take the account
    of the machine that failed first, and decide by it whether the ranks are started again.
    """
    began = time.monotonic()
    result = run_once(job, rendezvous)
    seconds = time.monotonic() - began
    restarts, machines = rendezvous.restarts, rendezvous.machines
    if result.joins and not result.signal_number:
        rendezvous.restarts = restarts.after(FailedAttempt(failure="a machine joined", seconds=seconds, counts=False))
        job.notice("a machine joins the run: the ranks of all machines are started again")
        return None
    _print_failures(job, result)
    code = result.exit_code
    if not code or not restarts.max_restarts:
        return code
    attempt = assess_attempt(result, restarts, machine=machines.machine, seconds=seconds)
    if machines.num_ended() and not attempt.final:
        attempt = replace(attempt, final="the ranks of another machine have ended.")
    after = rendezvous.restarts = decide_restart(machines.agree(attempt), restarts)
    if after.refusal is not None:
        print(f"hf-fsdp: {after.refusal}", file=sys.stderr, flush=True)
        return code
    job.notice(f"{after.title}: {after.last_failure}")
    return None


def run_once(job: RankJob, rendezvous: Rendezvous) -> AttemptResult:
    """Run the ranks of this machine once, and return how they exited. None of them is left afterwards.

    Torch's agent (``torch_private.elastic``) takes these steps:

    1. The machines meet (torch's handler, ``Rendezvous.open``), exchange what they know (``Rendezvous.meet``), and
       ``RankJob.on_start`` is called (``Attempt.begin``).
    2. Each rank gets its environment, over that of the launcher and torch's variables
       (``rank_environment.rank_env``), and the files of its output (``Attempt.prepare``).
    3. Torch starts the processes, whose ids ``Attempt.take_pids`` gets. Each runs ``run_script.run_rank``: it arms
       the diagnosis, calls ``install()``, and runs the script.
    4. Every 50 ms, the ranks are looked at, until all have exited or were stopped (``Attempt.is_over``).
    5. A signal to the launcher is sent on to the ranks, which have time to exit (``Attempt.end``).

    Raises:
        SpecError: the machines did not meet, or are about to run different things.
    """
    prepare_torch()
    handler, problem = rendezvous.open()
    if problem is not None:
        job.notice(problem)
    with (
        tempfile.TemporaryDirectory(prefix="hf_fsdp_") as scratch,
        Attempt(job, rendezvous, Path(scratch)) as attempt,
    ):
        try:
            agent = AttemptAgent(attempt, handler, job.command, num_local=job.num_local, role=job.role)
            if agent.run() is None:
                raise rendezvous.not_met(None)
            return attempt.result()
        except SignalException as stop:
            return attempt.result(signal_number=stop.sigval)
        except BrokenPipeError:
            return attempt.result(signal_number=signal.SIGPIPE)
        except (RendezvousError, RuntimeError, OSError) as error:
            if attempt.ranks:
                raise
            raise rendezvous.not_met(error) from error


def _print_failures(job: RankJob, result: AttemptResult) -> None:
    live = [rank.rank for rank in (result.exits if job.show_all else result.exits[:1])]
    sys.stdout.flush()
    if text := tell_failure(result, debug=job.debug, shown_live=live):
        print(text, file=sys.stderr, flush=True)
        if job.log_dir is not None and result.first is not None:
            print(f"hf-fsdp: all output is in {job.log_dir}{os.sep}rank_*.log", file=sys.stderr)
