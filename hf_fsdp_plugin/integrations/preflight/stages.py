"""The stages of a preflight, and the log in which each rank records them for the launcher. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from hf_fsdp_plugin.problems import Origin, Problem

VARIABLE: Final = "HF_FSDP_PREFLIGHT"
"""Environment variable with the :class:`Options` of a preflight as JSON. Set only for its ranks."""
REPORT_FILE: Final = "report.json"

STAGES: Final[Mapping[str, str]] = {
    "start": "imports, and the script up to the training",
    "clone": "the tiny clone of the model is made and loaded",
    "prepare": "units, optimizer and scheduler",
    "step": "data, forward and backward pass",
    "clip": "norm of the gradients",
    "update": "step of optimizer and scheduler",
    "evaluate": "evaluation and metrics",
    "save": "checkpoint with optimizer, scheduler and random state",
    "load best": "load_best_model_at_end",
    "resume": "a fresh model and optimizer continue from the checkpoint",
    "export": "merge of the checkpoint, and from_pretrained",
}
Result = Literal["passed", "failed", "stood still", "not tested"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """What all ranks have recorded of one stage.

    Attributes:
        seconds: time of the slowest rank; 0 for a stage that did not run.
        reason: why the stage was not tested.
    """

    stage: str
    result: Result
    seconds: float = 0.0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        row = {"stage": self.stage, "result": self.result, "seconds": round(self.seconds, 2)}
        return {**row, "reason": self.reason or None}


class EventLog:
    """A file of events that ranks write and the launcher reads: one JSON object a line, in the order of writing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def write(self, **event: Any) -> None:
        """Append an event. A line is written at once, so that lines of several ranks are not mixed."""
        line = json.dumps({"time": time.time(), **event}, default=str) + "\n"
        number = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(number, line.encode())
        finally:
            os.close(number)

    def new(self) -> list[dict[str, Any]]:
        """Return the complete events since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class StageLog(EventLog):
    """Records the stages of one rank. One stage runs at a time; a stage that runs again adds to its time.

    Attributes:
        current: the stage that runs; ``None`` between two stages.
        done: stages that have ended without a failure.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder / f"rank_{rank}.jsonl")
        self.current: str | None = None
        self._began = 0.0
        self._failed: set[str] = set()
        self.done: set[str] = set()

    def enter(self, stage: str | None) -> None:
        """End the current stage and begin another one; ``None`` begins no other one."""
        if stage == self.current:
            return
        self.leave()
        if stage is not None:
            self.current, self._began = stage, time.monotonic()
            self.write(event="begin", stage=stage)

    def leave(self) -> None:
        """End the current stage."""
        if self.current is not None:
            self.write(event="end", stage=self.current, seconds=time.monotonic() - self._began)
            self.done.add(self.current)
        self.current = None

    def fail(self, problems: Iterable[Problem]) -> None:
        """Record a failure of the current stage with its problems, and end the stage."""
        stage = self.current or "start"
        self._failed.add(stage)
        for problem in problems:
            self.write(event="problem", stage=stage, problem=asdict(problem))
        self.write(event="failed", stage=stage)
        self.leave()
        self.done.discard(stage)

    def skip_current(self, reason: str) -> None:
        """Record that the current stage cannot be tested here, and end it."""
        stage, self.current = self.current or "start", None
        self._failed.add(stage)
        self.write(event="skip", stage=stage, reason=reason)
        self.write(event="failed", stage=stage)

    def note(self, problem: Problem) -> None:
        """Record a warning or note, which fails no stage."""
        self.write(event="note", stage=self.current, problem=asdict(problem))

    def skip(self, stage: str, reason: str) -> None:
        """Record that a stage is not tested."""
        if stage not in self.done | self._failed:
            self._failed.add(stage)
            self.write(event="skip", stage=stage, reason=reason)

    def has_failed(self, stage: str) -> bool:
        return stage in self._failed


def read_events(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the events of every rank that has recorded any, in rank order."""
    return [EventLog(file).new() for file in sorted(folder.glob("rank_*.jsonl"))]


def running_stages(events: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | None]:
    """Return the stage in which each rank is; ``None`` between two stages."""
    running = []
    for of_rank in events:
        last = next((e for e in reversed(of_rank) if e["event"] in ("begin", "end", "failed")), None)
        running.append(last["stage"] if last is not None and last["event"] == "begin" else None)
    return running


def stage_results(events: Sequence[Sequence[Mapping[str, Any]]], *, stopped: bool) -> list[StageResult]:
    """Return the result of every stage.

    Args:
        stopped: whether the launcher has stopped the ranks at its time limit.
    """
    running = running_stages(events)
    results = []
    for stage in STAGES:
        of_stage = [[event for event in of_rank if event.get("stage") == stage] for of_rank in events]
        kinds = {event["event"] for of_rank in of_stage for event in of_rank}
        seconds = max((sum(e.get("seconds", 0.0) for e in of_rank) for of_rank in of_stage), default=0.0)
        reason = next((e["reason"] for of_rank in of_stage for e in of_rank if e["event"] == "skip"), "")
        result: Result = "passed"
        if "problem" in kinds:
            result = "failed"
        elif "skip" in kinds:
            result = "not tested"
        elif stage in running:
            result = "stood still" if stopped else "failed"
        elif "end" not in kinds:
            result, reason = "not tested", reason or "an earlier stage failed"
        results.append(StageResult(stage=stage, result=result, seconds=seconds, reason=reason * (result != "passed")))
    return results


def problems_of(events: Sequence[Sequence[Mapping[str, Any]]]) -> list[Problem]:
    """Return the problems and notes of all ranks, each once. One that only some ranks have names the first of them."""
    found: dict[tuple[str, str], Problem] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for rank, of_rank in enumerate(events):
        for event in of_rank:
            if event["event"] in ("problem", "note"):
                problem = _problem_of(event["problem"])
                key = problem.code, problem.message
                found.setdefault(key, problem)
                if event["event"] == "problem":
                    ranks.setdefault(key, set()).add(rank)
    for key, own in ranks.items():
        if len(own) < len(events) and found[key].rank is None:
            found[key] = replace(found[key], rank=min(own))
    return list(found.values())


def _problem_of(tree: Mapping[str, Any]) -> Problem:
    origin = tree["origin"]
    return Problem(**{**tree, "origin": Origin(**origin) if origin is not None else None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a preflight runs. The launcher passes it to the ranks.

    Attributes:
        folder: the temporary folder, in which the ranks record their stages.
        model: ``--model``; empty if the script names it.
        script: SCRIPT ARGS or ``-m`` MODULE ARGS; empty for the built-in script.
        arguments: arguments of ``TrainingArguments``, for the built-in script.
    """

    folder: str = ""
    model: str = ""
    script: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))


def options_of_rank() -> Options | None:
    """Return the options if this process is a rank of a preflight."""
    found = os.environ.get(VARIABLE)
    return Options(**json.loads(found)) if found else None
