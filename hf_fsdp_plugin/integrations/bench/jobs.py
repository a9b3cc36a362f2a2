"""The cases that the ranks of a benchmark measure, and the files of their results. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench.cases import Case

_JOB_FILE: Final = "job.json"
_EVENTS_FILE: Final = "events.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What every case trains, and how often.

    Attributes:
        micro_batch: samples of a rank in a step.
        seq_len: tokens of a sample.
        steps: steps of a block, which is timed as a whole.
        warm_up: steps of a case before its first block in a round.
        blocks: blocks of a case in a round.
        rounds: times that each case is built and measured.
    """

    micro_batch: int
    seq_len: int
    steps: int
    warm_up: int
    blocks: int
    rounds: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Cases of one setting that are built together, so that their blocks alternate, in one round."""

    cases: tuple[Case, ...]
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the ranks of one world measure."""

    model: str
    device: str
    workload: Workload
    tasks: tuple[Task, ...]

    def write(self, folder: Path) -> None:
        tasks = [{"round": task.round, "cases": [case.to_json() for case in task.cases]} for task in self.tasks]
        tree = {"model": self.model, "device": self.device, "workload": self.workload.to_json(), "tasks": tasks}
        (folder / _JOB_FILE).write_text(json.dumps(tree), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        tree = json.loads((folder / _JOB_FILE).read_text(encoding="utf-8"))
        tasks = tuple(
            Task(round=task["round"], cases=tuple(map(Case.from_json, task["cases"]))) for task in tree["tasks"]
        )
        return cls(model=tree["model"], device=tree["device"], workload=Workload(**tree["workload"]), tasks=tasks)


class Events:
    """Events of the ranks, in the order in which they were written: one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _EVENTS_FILE
        self._read = 0

    def write(self, **event: Any) -> None:
        """Append an event. A line is written at once, so that lines of several ranks are not mixed."""
        line = json.dumps({"time": time.time(), **event}, default=str) + "\n"
        number = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(number, line.encode())
        finally:
            os.close(number)

    def new(self) -> Sequence[Mapping[str, Any]]:
        """Return the complete events since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._read += len(complete)
        return [json.loads(line) for line in complete.splitlines()]
