"""The failed attempts of a run: their failures, the optimizer steps that were trained again, and when it is restarted.

A restart helps if the cause was outside of the program: a killed rank, a lost machine, a broken connection. An error
of the program comes again, after minutes of loading. Therefore a run is not restarted

- after a signal to a launcher, or without the launcher that hosts the rendezvous of the machines;
- if two attempts in succession have failed with the same exception, exit code or crash at the same place after the
  same optimizer step of the run. A rank that was killed from outside, and a lost connection, never count as the same
  failure.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_fsdp_plugin.hangs.process_end import CRASHES, stack_of
from hf_fsdp_plugin.hangs.python_stacks import is_library
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit, signal_name, summarize_exit
from hf_fsdp_plugin.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """One attempt of a run that failed.

    With several machines, it is what the machine knows that has failed first.

    Attributes:
        failure: one line, such as ``rank 1: killed by SIGKILL``.
        machine: number of the machine whose rank failed first.
        began: optimizer steps of the run that its checkpoint contained, 0 without one; ``None`` if it trained nothing.
        steps: optimizer steps of the run when it failed; ``None`` if it trained nothing.
        seconds: duration of the attempt.
        same_as: what identifies the same failure in another attempt: type and place; empty for one from outside.
        final: why the run must not be started again; empty if it may be.
    """

    failure: str = ""
    machine: int = 0
    began: int | None = None
    steps: int | None = None
    seconds: float = 0.0
    same_as: str = ""
    final: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """The failed attempts of a run, oldest first.

    Attributes:
        run_id: identifies the run in the manifests of its checkpoints; empty if nothing does (``runs.identity``).
        max_restarts: the launcher's limit of restarts; 0 if it is unknown.
    """

    run_id: str = ""
    max_restarts: int = 0
    failures: tuple[FailedAttempt, ...] = ()

    @property
    def count(self) -> int:
        """Number of attempts before this one."""
        return len(self.failures)

    @property
    def title(self) -> str:
        """Name of the present attempt, such as ``restart 1 of 3``."""
        return f"restart {self.count}{self._limit(' of')}"

    def _limit(self, of: str) -> str:
        return f"{of} {self.max_restarts}" if self.count <= self.max_restarts else ""

    @property
    def last_failure(self) -> str:
        """The failure before this attempt, with its steps."""
        last = self.failures[-1]
        return last.failure + (f" after step {last.steps} of the run" if last.steps is not None else "")

    def after(self, attempt: FailedAttempt) -> Restarts:
        """Return the restarts after one more failed attempt."""
        return replace(self, failures=(*self.failures, attempt))

    def lost_steps(self, began: int | None) -> list[int]:
        """Return for each failed attempt the optimizer steps that were trained again after it.

        Args:
            began: as in :class:`FailedAttempt`, for the present attempt; ``None`` counts no steps after the last one.
        """
        trained = [(number, each) for number, each in enumerate(self.failures) if each.began is not None]
        begins = [*(each.began for _, each in trained[1:]), began]
        lost = [0] * len(self.failures)
        for (number, attempt), next_began in zip(trained, begins, strict=False):
            if next_began is not None:
                lost[number] = max(0, (attempt.steps or 0) - next_began)
        return lost

    def to_report(self, began: int | None) -> dict[str, Any]:
        """Return the object ``restarts`` of ``fsdp_report.json``."""
        lost = self.lost_steps(began)
        rows = []
        for attempt, steps in zip(self.failures, lost, strict=True):
            row = {"failure": attempt.failure, "machine": attempt.machine, "steps": attempt.steps}
            rows.append({**row, "lost_steps": steps, "seconds": round(attempt.seconds, 1)})
        return {"count": self.count, "max": self.max_restarts, "lost_steps": sum(lost), "failures": rows}

    def summary(self, began: int | None) -> str:
        """Return one line; empty without restarts."""
        if not self.failures:
            return ""
        lost = plural(sum(self.lost_steps(began)), "optimizer step")
        return f"{plural(self.count, 'restart')}{self._limit(' of at most')}, {lost} trained again"

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Restarts:
        """Return the restarts from the value of ``dataclasses.asdict``."""
        return cls(**{**tree, "failures": tuple(FailedAttempt(**attempt) for attempt in tree["failures"])})


_MAX_TEXT: Final = 200


def assess_attempt(result: AttemptResult, *, machine: int, seconds: float) -> FailedAttempt:
    """Return the attempt as this machine knows it. It must have failed, here or on another machine."""
    began, steps = count_steps(result.exits)
    attempt = FailedAttempt(machine=machine, began=began, steps=steps, seconds=seconds)
    if result.hang is not None and not result.signal_number:
        # The same code in the same unit after the same step comes from the program.
        return replace(attempt, failure=result.hang.message[:_MAX_TEXT], same_as=result.hang.same_as)
    first = result.first
    is_cause = first is not None and not first.only_stopped and not first.has_lost_connection
    text = f"rank {first.rank}: {summarize_exit(first)}" if first is not None else ""
    if result.remote_failure and not is_cause:
        text = result.remote_failure
    final = ""
    if result.signal_number:
        final = f"the launcher of machine {machine} received {signal.Signals(result.signal_number).name}."
    same_as = _identity(first) if first is not None and is_cause else ""
    return replace(attempt, failure=text[:_MAX_TEXT], same_as=same_as, final=final)


def _identity(first: RankExit) -> str:
    """Return a text that identifies a failure: exception and place, exit code or crash; empty for one from outside."""
    if first.failure is not None and (frames := stack_of(first.failure)):
        own = [frame for frame in frames if not is_library(frame.file)]
        return f"{first.failure['type']} at {' '.join(f'{each.file}:{each.line}' for each in (*own, frames[-1]))}"
    if first.code < 0:
        return signal_name(-first.code) if -first.code in CRASHES else ""
    return f"exit code {first.code}"


def count_steps(exits: Iterable[RankExit]) -> tuple[int | None, int | None]:
    """Return the optimizer steps of the run before this attempt and at its end; ``None`` if it trained nothing."""
    counts = [rank.counts for rank in exits if rank.counts is not None]
    furthest = max(counts, key=lambda each: each.total, default=None)
    return (furthest.before, furthest.total) if furthest is not None and furthest.total else (None, None)


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
