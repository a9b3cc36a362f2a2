"""The restarts of a run by its launcher: its failures, and the steps that were trained again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from hf_fsdp_plugin.text import plural

RESTART_VARIABLE: Final = "HF_FSDP_RESTART_COUNT"
"""Environment variable of the ranks with the number of restarts so far; 0 on the first start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """One attempt of a run that failed.

    Attributes:
        failure: one line, such as ``rank 1: killed by SIGKILL``.
        machine: number of the machine whose rank failed first, or that was lost.
        began: optimizer steps of the run that its checkpoint contained, 0 without one; ``None`` if it trained nothing.
        steps: optimizer steps of the run when it failed; ``None`` if it trained nothing.
        seconds: duration of the attempt.
        same_as: what identifies the same failure in another attempt: type and place; empty for one from outside.
        counts: whether it counts as a restart: not if the attempt was ended because a machine joined the run.
    """

    failure: str
    machine: int = 0
    began: int | None = None
    steps: int | None = None
    seconds: float = 0.0
    same_as: str = ""
    counts: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """The failed attempts of a run, oldest first.

    Attributes:
        run_id: identifies the run in the manifests of its checkpoints; empty if nothing does (``runs.identity``).
        max_restarts: the limit of the launcher; 0 if it says none. Machines that join start the ranks again, too, but
            torch does not count that.
    """

    run_id: str = ""
    max_restarts: int = 0
    failures: tuple[FailedAttempt, ...] = field(default=())

    @property
    def count(self) -> int:
        """Number of attempts before this one."""
        return len(self.failures)

    @property
    def num_failures(self) -> int:
        """Number of attempts that have failed; each allows one restart less."""
        return sum(attempt.counts for attempt in self.failures)

    @property
    def title(self) -> str:
        """Such as ``restart 1 of 3``."""
        limit = f" of {self.max_restarts}" if self.num_failures <= self.max_restarts else ""
        return f"restart {self.num_failures}{limit}"

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
        lost = [0] * len(self.failures)
        last: int | None = None
        for number, attempt in enumerate(self.failures):
            if attempt.began is None or attempt.steps is None:
                continue
            if last is not None:
                lost[last] = max(0, (self.failures[last].steps or 0) - attempt.began)
            last = number
        if last is not None and began is not None:
            lost[last] = max(0, (self.failures[last].steps or 0) - began)
        return lost

    def to_report(self, began: int | None) -> dict[str, Any]:
        """Return the object ``restarts`` of ``fsdp_report.json``."""
        lost = self.lost_steps(began)
        rows = [
            {
                "failure": attempt.failure,
                "machine": attempt.machine,
                "steps": attempt.steps,
                "lost_steps": steps,
                "seconds": round(attempt.seconds, 1),
            }
            for attempt, steps in zip(self.failures, lost, strict=True)
        ]
        return {"count": self.num_failures, "max": self.max_restarts, "lost_steps": sum(lost), "failures": rows}

    def summary(self, began: int | None) -> str:
        """Return one line; empty without restarts."""
        if not self.failures:
            return ""
        lost = plural(sum(self.lost_steps(began)), "optimizer step")
        limit = f" of at most {self.max_restarts}" if self.num_failures <= self.max_restarts else ""
        return f"{plural(self.num_failures, 'restart')}{limit}, {lost} trained again"

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> Restarts:
        if tree is None:
            return cls()
        failures = tuple(FailedAttempt(**attempt) for attempt in tree["failures"])
        return cls(run_id=tree["run_id"], max_restarts=tree["max_restarts"], failures=failures)
