"""Decides whether the ranks of a failed run are started again, from what is known of its failed attempts.

A restart helps if the cause was outside of the program: a killed rank, a lost machine, a broken connection. An error
of the program comes again, after minutes of loading. Therefore a run is not restarted

- after a signal to a launcher, or without the launcher that hosts the rendezvous of the machines;
- if two attempts in succession have failed with the same exception, exit code or crash at the same place after the
  same optimizer step of the run. A rank that was killed from outside, and a lost connection, never count as the same
  failure.
"""

from __future__ import annotations

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.text import plural


def refuse_restart(attempt: FailedAttempt, restarts: Restarts) -> Problem | None:
    """Return why the ranks must not be started again after a failed attempt; ``None`` if they may be.

    Args:
        attempt: the attempt, on which the machines have agreed.
        restarts: without this attempt.
    """
    last = restarts.failures[-1] if restarts.failures else None
    if attempt.final:
        return _not_again(attempt.final)
    if last is not None and attempt.same_as and (last.same_as, last.steps) == (attempt.same_as, attempt.steps):
        where = f"after step {attempt.steps}" if attempt.steps is not None else "before the first optimizer step"
        return _not_again(f"two attempts have failed in the same way {where}.")
    if restarts.count < restarts.max_restarts:
        return None
    times = plural(restarts.count + 1, "time")
    message = f"the run has failed {times}: no restart is left of {restarts.max_restarts}."
    fix = "Read the failures above. Start the run again with resume_from_checkpoint=True."
    return Problem(code="FSDP-E716", message=message, fix=fix)


def _not_again(reason: str) -> Problem:
    fix = "Remove the cause, then start the run again with resume_from_checkpoint=True."
    return Problem(code="FSDP-E714", message=f"the run is not restarted: {reason}", fix=fix)
