"""The preflight of this process: its folder, its phase, and what happens when a stage fails."""

from __future__ import annotations

import os
import re
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from hf_fsdp_plugin.integrations.preflight.stages import Options, StageLog, options_of_rank, read_events
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_rank, launched_world_size

RunPhase = Literal["script", "first run", "after it", "second run"]
_AGREEMENT_SECONDS: Final = 10.0
"""Seconds that the other ranks have to fail too. Then the rank ends, and the launcher stops the others."""
_MAX_MESSAGE: Final = 300
_NOT_OF_USER: Final = (str(Path(__file__).parents[2]), "<")
_LIBRARIES: Final = "site-packages"
_NEEDS_GPU: Final = re.compile(
    r"not compiled with CUDA|No CUDA GPUs are available|requires? (a |an )?(CUDA|GPU|NVIDIA)|No GPU found"
    r"|NVIDIA driver|torch\.cuda\.is_available|only (works|supported|available) (on|with) (CUDA|GPU)"
    r"|0 active drivers|Could not run .* from the 'CPU' backend",
    re.IGNORECASE,
)
_CAUSES: Final = (
    (
        "metric_for_best_model",
        "Return this metric from compute_metrics, or set metric_for_best_model to one that evaluation returns.",
    ),
    ("same dtype|expected scalar type", "Give all parts of the model one dtype, or set mixed_precision: bf16."),
    ("eval_dataset", "Pass an eval_dataset to the Trainer, or set eval_strategy to no."),
    ("pickle", "Objects for worker processes and checkpoints must be importable: no lambdas or local classes."),
)
"""Pattern of the message of an exception of other libraries -> what to do."""
_NO_TRAINING: Final = Problem(
    code="FSDP-E758",
    message="the script ended without a training of a Trainer, and without two optimizer steps of an Accelerator.",
    fix="Pass the arguments with which it trains. If it uses neither of them, pass --model instead of the script.",
)


class Preflight:
    """The preflight of one rank. Without :meth:`begin` it is not active, and the hooks call the originals.

    Attributes:
        phase: ``script`` until the training begins; the hooks record stages in the first run only.
    """

    def __init__(self) -> None:
        self._recorder: StageLog | None = None
        self._reported: BaseException | None = None
        self.options = Options()
        self.phase: RunPhase = "script"
        self.rank, self.world_size = 0, 1

    def begin_in_rank(self) -> None:
        """Begin, and install the hooks, if the launcher of this process runs a preflight."""
        if (options := options_of_rank()) is None:
            return
        from hf_fsdp_plugin.integrations.patching import install_hooks

        self.begin(options)
        install_hooks("preflight")
        printer.listener = self._note_warning

    def _note_warning(self, message: object) -> None:
        if self._recorder is not None and isinstance(message, Problem) and message.severity == "warning":
            self._recorder.note(message)

    def begin(self, options: Options) -> None:
        self.rank, self.world_size = launched_rank(), launched_world_size()
        self.options, self.phase, self._reported = options, "script", None
        self._recorder = StageLog(self.folder, self.rank)
        self._recorder.enter("start")

    def end(self, error: BaseException | None = None) -> None:
        """Record how the script has ended: with an exception, or with none."""
        if not self.active:
            return
        if error is not None and error is not self._reported:
            self.failed(error)
        elif error is None and self.phase == "script":
            self.recorder.fail([_NO_TRAINING])
        self.recorder.leave()
        self.close()

    def close(self) -> None:
        self._recorder = None

    @property
    def active(self) -> bool:
        return self._recorder is not None

    @property
    def is_in_script(self) -> bool:
        """Whether the script of the user runs, before the training of a Trainer."""
        return self.active and self.phase == "script"

    @property
    def folder(self) -> Path:
        return Path(self.options.folder)

    @property
    def recorder(self) -> StageLog:
        assert self._recorder is not None, "a preflight was begun"
        return self._recorder

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Run the block as a stage, and go back to the stage before."""
        before = self.recorder.current
        self.recorder.enter(stage)
        yield
        self.recorder.enter(before)

    def failed(self, error: BaseException) -> None:
        """Record a failure of the current stage. An error that only a GPU can avoid means that it is not tested."""
        stage, self._reported = self.recorder.current or "start", error
        if isinstance(error, SpecError) or not _NEEDS_GPU.search(text := _text_of(error)):
            self.recorder.fail(problems_of_error(error, stage))
            return
        self.recorder.skip_current(f"needs a GPU: {text}")
        not_tested(f"{stage}, which needs a GPU: {text}")

    def stage_failed(self, error: Exception) -> None:
        """Record a failure, and raise it again unless all ranks fail as often as this one.

        If they do not, their collectives no longer match, and the run ends.
        """
        self.failed(error)
        own = _num_failures(read_events(self.folder)[self.rank])
        deadline = time.monotonic() + _AGREEMENT_SECONDS
        while time.monotonic() < deadline:
            events = read_events(self.folder)
            if len(events) == self.world_size and all(_num_failures(each) >= own for each in events):
                return
            time.sleep(0.1)
        raise error

    def attempt(self, stage: str, run: Callable[[], Any]) -> bool:
        """Run a stage, and return whether it has succeeded. Raises its error if other ranks do not fail too."""
        self.recorder.enter(stage)
        try:
            run()
            self.recorder.leave()
        except Exception as error:
            self.stage_failed(error)
            return False
        return True


def _num_failures(events: Iterable[dict[str, object]]) -> int:
    return sum(event["event"] == "failed" for event in events)


def problems_of_error(error: BaseException, stage: str) -> list[Problem]:
    """Return the problems of a failed stage: those of this package, or one that describes the exception."""
    if isinstance(error, SpecError):
        return [problem for problem in error.problems if problem.severity == "error"]
    text = _text_of(error)
    fix = next((fix for pattern, fix in _CAUSES if re.search(pattern, text, re.IGNORECASE)), "")
    message = f"the stage '{stage}' failed{_place_of(error)}: {text}"
    return [Problem(code="FSDP-E750", message=message, fix=fix)]


def _text_of(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _MAX_MESSAGE, placeholder=" …")


def _place_of(error: BaseException) -> str:
    """Return where the user's code was, or else the last line of code.

    The user's code is neither of this package nor of an installed library nor of Python.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_NOT_OF_USER) and _LIBRARIES not in each.filename]
    return "".join(f" in {os.path.basename(frame.filename)}:{frame.lineno}" for frame in (own or frames)[-1:])


preflight = Preflight()
"""The preflight of this process."""


def note_change(text: str) -> None:
    """Record what the preflight has changed."""
    preflight.recorder.note(Problem(code="FSDP-N757", message=f"{text}."))


def not_tested(what: str) -> None:
    """Record what a preflight cannot test."""
    preflight.recorder.note(Problem(code="FSDP-W756", message=f"not tested: {what}."))
