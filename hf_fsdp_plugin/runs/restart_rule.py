"""Decides whether the ranks of a failed run are started again, as ``hf-fsdp launch --max_restarts`` allows.

A restart helps if the cause was outside of the program: a killed rank, a lost machine, a broken connection. An error
of the program comes again, after minutes of loading. Therefore a run is not restarted

- after a signal to a launcher;
- if no attempt has made an optimizer step and the failure is a problem of the config, a wrong usage of the script, or
  an exception of the kinds in ``verdicts.PROGRAM_ERRORS``;
- if two attempts in succession have failed with the same exception, exit code or crash at the same place after the
  same optimizer step of the run. A rank that was killed from outside, and a lost connection, never count as the same
  failure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restarts import FailedAttempt, Restarts
from hf_fsdp_plugin.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the launcher of one machine knows about a failed attempt.

    Attributes:
        final: why the run must not be started again; empty if it may be.
        order: sorts the verdicts of all machines: the cause comes first.
    """

    attempt: FailedAttempt
    final: str = ""
    order: tuple[bool, bool, float] = (False, False, 0.0)

    def to_text(self) -> str:
        return json.dumps({"attempt": asdict(self.attempt), "final": self.final, "order": self.order})

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        tree = json.loads(text)
        stopped, lost, time = tree["order"]
        return cls(attempt=FailedAttempt(**tree["attempt"]), final=tree["final"], order=(stopped, lost, time))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether the ranks are started again.

    Attributes:
        restarts: with the failed attempt.
        problem: why they are not; ``None`` if they are.
    """

    restarts: Restarts
    problem: Problem | None = None

    def to_text(self) -> str:
        return json.dumps({"restarts": self.restarts.to_json(), "problem": made_from(self.problem)})

    @classmethod
    def from_text(cls, text: str) -> Decision:
        tree = json.loads(text)
        problem = Problem(**tree["problem"]) if tree["problem"] is not None else None
        return cls(restarts=Restarts.from_json(tree["restarts"]), problem=problem)


def made_from(problem: Problem | None) -> dict[str, str] | None:
    """Return the arguments from which another launcher makes this problem."""
    return None if problem is None else {"code": problem.code, "message": problem.message, "fix": problem.fix}


def lost_machine(machine: int, known: FailedAttempt | None = None) -> Verdict:
    """Return the verdict for a machine whose launcher has gone.

    Args:
        known: the attempt as another machine knows it.
    """
    attempt = known or FailedAttempt(failure="")
    return Verdict(attempt=replace(attempt, failure=f"machine {machine} was lost", machine=machine, same_as=""))


def decide(verdicts: Sequence[Verdict], restarts: Restarts) -> Decision:
    """Decide for all machines.

    Args:
        verdicts: one for each machine.
        restarts: without this attempt.
    """
    cause = min(verdicts, key=lambda verdict: verdict.order)
    known = [each.attempt for each in verdicts if each.attempt.steps is not None]
    attempt = cause.attempt
    if known:  # machines that were lost do not know their steps
        furthest = max(known, key=lambda each: each.steps or 0)
        attempt = FailedAttempt(**(asdict(attempt) | {"began": furthest.began, "steps": furthest.steps}))
    after = restarts.after(attempt)
    if final := next((each.final for each in verdicts if each.final), ""):
        return Decision(restarts=after, problem=_not_again(final))
    last = restarts.failures[-1] if restarts.failures else None
    if last is not None and attempt.same_as and (last.same_as, last.steps) == (attempt.same_as, attempt.steps):
        where = f"after step {attempt.steps}" if attempt.steps is not None else "before the first optimizer step"
        return Decision(restarts=after, problem=_not_again(f"two attempts have failed in the same way {where}."))
    if restarts.num_failures >= restarts.max_restarts:
        message = (
            f"the run has failed {plural(after.num_failures, 'time')}: no restart is left of {restarts.max_restarts}."
        )
        fix = "Read the failures above. Start the run again with resume_from_checkpoint=True."
        return Decision(restarts=after, problem=Problem(code="FSDP-E716", message=message, fix=fix))
    return Decision(restarts=after)


def _not_again(reason: str) -> Problem:
    fix = "Remove the cause, then start the run again with resume_from_checkpoint=True."
    return Problem(code="FSDP-E714", message=f"the run is not restarted: {reason}", fix=fix)
