"""The preflight of this process: its stages, what it has recorded of them, and the results of all ranks.

A rank keeps what it has recorded in one file, which it replaces with each change. The other ranks and the launcher read
it. Imports no torch.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_rank, launched_world_size
from hf_fsdp_plugin.state import process

VARIABLE: Final = "HF_FSDP_PREFLIGHT"
"""Environment variable with the :class:`Options` of a preflight as JSON. Set only for its ranks."""
REPORT_FILE: Final = "report.json"

STAGES: Final[Mapping[str, str]] = {
    "start": "imports, and the arguments of the training",
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
_MAX_MESSAGE: Final = 300
_NOT_OF_USER: Final = (str(Path(__file__).parents[2]), "<")
_LIBRARIES: Final = "site-packages"
_NEEDS_GPU: Final = re.compile(
    r"not compiled with CUDA|No CUDA GPUs are available|requires? (a |an )?(CUDA|GPU|NVIDIA)|No GPU found"
    r"|NVIDIA driver|torch\.cuda\.is_available|only (works|supported|available) (on|with) (CUDA|GPU)"
    r"|0 active drivers|Could not run .* from the 'CPU' backend",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a preflight runs. The launcher passes it to the ranks.

    Attributes:
        folder: the temporary folder, which contains the files of the ranks.
        model: ``--model``.
        arguments: arguments of ``TrainingArguments``.
    """

    folder: str = ""
    model: str = ""
    arguments: Sequence[str] = ()


@dataclass(kw_only=True, slots=True)
class PreflightRecord:
    """What one rank has recorded: the content of its file.

    Attributes:
        running: the stage that runs; ``None`` between two stages.
        seconds: the stages that have ended, with their times. A stage that runs again adds to its time.
        failed: the stages that have failed.
        skipped: the stages that are not tested, with the reasons.
        problems: the problems of the failed stages, and warnings and notes.
        model: class and parameters of the model and of its clone.
    """

    running: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)


def read_records(folder: Path) -> list[PreflightRecord]:
    """Return the records of all ranks that have begun, in rank order."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("rank_*.pickle"))]


def stage_results(records: Sequence[PreflightRecord], *, stopped: bool) -> list[dict[str, Any]]:
    """Return the result of every stage, as ``check --json`` contains it, with the time of the slowest rank.

    Args:
        stopped: whether the launcher has stopped the ranks at its time limit.
    """
    rows = []
    for stage in STAGES:
        result = "passed"
        reason = next((record.skipped[stage] for record in records if stage in record.skipped), None)
        if any(stage in record.failed for record in records):
            result, reason = "failed", None
        elif reason is not None:
            result = "not tested"
        elif any(stage == record.running for record in records):
            result = "stood still" if stopped else "failed"
        elif not any(stage in record.seconds for record in records):
            result, reason = "not tested", "an earlier stage did not pass"
        seconds = max((record.seconds.get(stage, 0.0) for record in records), default=0.0)
        rows.append({"stage": stage, "result": result, "seconds": round(seconds, 2), "reason": reason})
    return rows


def problems_of(records: Sequence[PreflightRecord]) -> list[Problem]:
    """Return the problems and notes of all ranks, each once. An error that only some ranks have names the first."""
    ranks: dict[Problem, list[int]] = {}
    for rank, record in enumerate(records):
        for problem in dict.fromkeys(record.problems):
            ranks.setdefault(problem, []).append(rank)
    return [
        replace(problem, rank=own[0])
        if problem.severity == "error" and problem.rank is None and len(own) < len(records)
        else problem
        for problem, own in ranks.items()
    ]


class Preflight:
    """The preflight of one rank, from :meth:`begin` to :meth:`end`. One stage runs at a time.

    Attributes:
        records: whether what runs is recorded as a stage: in the first run.
        record: what was recorded.
    """

    def __init__(self) -> None:
        self.active = False
        self.options, self.folder = Options(), Path()
        self.records = False
        self.rank, self.world_size = 0, 1
        self.record = PreflightRecord()
        self._began = 0.0

    def begin_in_rank(self) -> None:
        """Begin with the options from the launcher of this process."""
        self.begin(Options(**json.loads(os.environ[VARIABLE])))
        printer().listener = self._note_warning

    def _note_warning(self, message: object) -> None:
        if self.active and isinstance(message, Problem) and message.severity == "warning":
            self.note(message)

    def begin(self, options: Options) -> None:
        self.active, self.options, self.records = True, options, False
        self.folder = Path(options.folder)
        self.rank, self.world_size = launched_rank(), launched_world_size()
        self.record = PreflightRecord()
        self.enter("start")

    def end(self, error: BaseException | None = None) -> None:
        """Record how the script has ended: with an exception, or with none."""
        if error is not None:
            self.fail(error)
        self.enter(None)
        self.active = False

    def enter(self, stage: str | None) -> None:
        """End the current stage and begin another one; ``None`` begins no other one."""
        now, record = time.monotonic(), self.record
        if stage == record.running:
            return
        if record.running is not None:
            record.seconds[record.running] = record.seconds.get(record.running, 0.0) + now - self._began
        record.running, self._began = stage, now
        self._write()

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Run the block as a stage, and go back to the stage before."""
        before = self.record.running
        self.enter(stage)
        yield
        self.enter(before)

    def fail(self, error: BaseException) -> None:
        """Record a failure of the current stage, and end the stage. What only a GPU can run is not tested instead."""
        stage, text = self.record.running or "start", _text_of(error)
        if not isinstance(error, SpecError) and _NEEDS_GPU.search(text):
            self.record.skipped[stage] = f"needs a GPU: {text}"
            self.not_tested(f"{stage}, which needs a GPU: {text}")
        else:
            self.record.failed.append(stage)
            self.record.problems += problems_of_error(error, stage)
        self.enter(None)
        self._write()

    def skip(self, stage: str, reason: str) -> None:
        """Record that a stage is not tested, unless it is over."""
        if stage not in self.record.seconds:
            self.record.skipped[stage] = reason
            self._write()

    def note(self, problem: Problem) -> None:
        """Record a warning or note, which fails no stage."""
        self.record.problems.append(problem)
        self._write()

    def note_change(self, text: str) -> None:
        """Record what the preflight has changed."""
        self.note(Problem(code="FSDP-N757", message=f"{text}."))

    def not_tested(self, what: str) -> None:
        """Record what a preflight cannot test."""
        self.note(Problem(code="FSDP-W756", message=f"not tested: {what}."))

    def _write(self) -> None:
        write_atomically(self.folder / f"rank_{self.rank}.pickle", pickle.dumps(self.record))


def problems_of_error(error: BaseException, stage: str) -> list[Problem]:
    """Return the problems of a failed stage: those of this package, or one that describes the exception."""
    if isinstance(error, SpecError):
        return [problem for problem in error.problems if problem.severity == "error"]
    message = f"the stage '{stage}' failed{_place_of(error)}: {_text_of(error)}"
    return [Problem(code="FSDP-E750", message=message)]


def _text_of(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_MESSAGE, placeholder=" …")


def _place_of(error: BaseException) -> str:
    """Return where the user's code was, or else the last line of code.

    The user's code is neither of this package nor of an installed library nor of Python.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_NOT_OF_USER) and _LIBRARIES not in each.filename]
    return "".join(f" in {os.path.basename(frame.filename)}:{frame.lineno}" for frame in (own or frames)[-1:])


preflight = process.owns(Preflight, kept=True)
"""Return the preflight of this process."""
