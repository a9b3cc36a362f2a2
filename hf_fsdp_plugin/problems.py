"""The one shape of every complaint in the house: where, what was given, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a value was written.

    Attributes:
        source: a file name as the user gave it (``fsdp.yaml``), or ``TrainingArguments``, ``command line``,
            ``environment``, ``--set``, ``default``.
        line: 1-based line in that file, where the source is a file.
        spelling: the key as written (``fsdp_sharding_strategy``); empty for defaults.
        text: the value as written (``1``); empty for defaults.
    """

    source: str
    line: int | None = None
    spelling: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        """``fsdp.yaml:12``, or the source's name where there are no lines."""
        return f"{self.source}:{self.line}" if self.line is not None else self.source

    def __str__(self) -> str:
        return f"{self.place} {self.spelling}={self.text}" if self.spelling else self.place


DEFAULT_ORIGIN = Origin(source="default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One complaint.

    Attributes:
        severity: ``error`` stops the run; ``warning`` and ``note`` are shown and carried into the report.
        message: what was given and what was expected.
        fix: what to do about it, as one imperative sentence; may be empty for notes.
        setting: canonical name (``wrap.classes``), where the complaint is about one.
        origin: where the offending value was written.
        rank: the rank that raised it, where only some did.
    """

    severity: Severity
    message: str
    fix: str = ""
    setting: str | None = None
    origin: Origin | None = None
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that ``check --json`` and ``fsdp_report.json`` print."""
        return {
            "severity": self.severity,
            "setting": self.setting,
            "origin": self.origin.place if self.origin is not None else None,
            "message": self.message,
            "fix": self.fix,
            **({"rank": self.rank} if self.rank is not None else {}),
        }

    def __str__(self) -> str:
        place = f"{self.origin.place}: " if self.origin is not None else ""
        label = "" if self.severity == "error" else f"{self.severity}: "
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        setting = f"{self.setting}: " if self.setting else ""
        fix = f" {self.fix}" if self.fix else ""
        return f"{place}{label}{rank}{setting}{self.message}{fix}"


def has_errors(problems: Iterable[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


class SpecError(ValueError):
    """All problems of a config at once; at least one of them is an error.

    Attributes:
        problems: every complaint found, warnings and notes included.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        shown = [problem for problem in self.problems if problem.severity != "note"]
        super().__init__("\n".join(str(problem) for problem in shown))


class CheckpointError(SpecError):
    """All problems of a checkpoint at once: it is damaged, incomplete, foreign, unreadable, or none at all."""
