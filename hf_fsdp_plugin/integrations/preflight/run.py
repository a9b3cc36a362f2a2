"""The preflight of this process: its folder, its phase, and what happens when a stage fails."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from hf_fsdp_plugin.integrations.preflight.stages import (
    Options,
    Recorder,
    folder_of_preflight,
    read_events,
    read_options,
)
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import Problem, SpecError

Phase = Literal["script", "first run", "after it", "second run"]
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
        re.compile(r"metric_for_best_model"),
        "Return this metric from compute_metrics, or set metric_for_best_model to one that evaluation returns.",
    ),
    (
        re.compile(r"same dtype|mat1 and mat2 must have the same dtype|expected scalar type"),
        "Give all parts of the model one dtype, or set mixed_precision: bf16.",
    ),
    (
        re.compile(r"evaluation requires an eval_dataset|no eval_dataset|eval_dataset"),
        "Pass an eval_dataset to the Trainer, or set eval_strategy to no.",
    ),
    (
        re.compile(r"pickle", re.IGNORECASE),
        "Objects for worker processes and checkpoints must be importable: no lambdas or local classes.",
    ),
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
        self._folder: Path | None = None
        self._recorder: Recorder | None = None
        self._reported: BaseException | None = None
        self.options = Options()
        self.phase: Phase = "script"
        self.rank, self.world_size = 0, 1

    def begin_in_rank(self) -> None:
        """Begin, and install the hooks, if the launcher of this process runs a preflight."""
        if (folder := folder_of_preflight()) is None:
            return
        from hf_fsdp_plugin.integrations.patching import install_hooks

        self.begin(folder)
        install_hooks("preflight")
        printer.listener = self._note_warning

    def _note_warning(self, message: object) -> None:
        if self._recorder is not None and isinstance(message, Problem) and message.severity == "warning":
            self._recorder.note(message)

    def begin(self, folder: Path) -> None:
        self._folder, self._reported = folder, None
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._recorder = Recorder(folder, self.rank)
        self.options, self.phase = read_options(folder), "script"
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
        self._folder = self._recorder = None

    @property
    def active(self) -> bool:
        return self._folder is not None

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "a preflight was begun"
        return self._folder

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None, "a preflight was begun"
        return self._recorder

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Run the block as a stage, and go back to the stage before. In the second run, do nothing."""
        before = self.recorder.current
        if self.phase != "first run" and self.phase != "script":
            yield
            return
        self.recorder.enter(stage)
        yield
        if before is None:
            self.recorder.leave()
        else:
            self.recorder.enter(before)

    def failed(self, error: BaseException) -> None:
        """Record a failure of the current stage. An error that only a GPU can avoid means that it is not tested."""
        stage, self._reported = self.recorder.current, error
        text = f"{type(error).__name__}: {error}"
        if stage is not None and not isinstance(error, SpecError) and _NEEDS_GPU.search(text):
            self.recorder.skip_current(f"needs a GPU: {_short(str(error))}")
            self.recorder.note(
                Problem(code="FSDP-W756", message=f"{stage} is not tested on the CPU: {_short(str(error))}")
            )
            return
        self.recorder.fail(problems_of_error(error, stage or "start"))

    def stage_failed(self, error: Exception) -> None:
        """Record a failure, and raise it again unless all ranks fail as often as this one.

        If they do not, their collectives no longer match, and the run ends.
        """
        self.failed(error)
        if not self._all_have_failed():
            raise error

    def _all_have_failed(self) -> bool:
        own = _num_failures(read_events(self.folder)[self.rank])
        deadline = time.monotonic() + _AGREEMENT_SECONDS
        while time.monotonic() < deadline:
            events = read_events(self.folder)
            if len(events) == self.world_size and all(_num_failures(each) >= own for each in events):
                return True
            time.sleep(0.1)
        return False


def _num_failures(events: Iterable[dict[str, object]]) -> int:
    return sum(event["event"] == "failed" for event in events)


def problems_of_error(error: BaseException, stage: str) -> list[Problem]:
    """Return the problems of a failed stage: those of this package, or one that describes the exception."""
    if isinstance(error, SpecError):
        return [problem for problem in error.problems if problem.severity == "error"]
    text = _short(f"{type(error).__name__}: {error}")
    fix = next((fix for pattern, fix in _CAUSES if pattern.search(text)), "")
    message = f"the stage '{stage}' failed{_place_of(error)}: {text}"
    return [Problem(code="FSDP-E750", message=message, fix=fix)]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"


def _place_of(error: BaseException) -> str:
    """Return where the user's code was, or else the last line of code.

    The user's code is neither of this package nor of an installed library nor of Python.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_NOT_OF_USER) and _LIBRARIES not in each.filename]
    return "".join(f" in {os.path.basename(frame.filename)}:{frame.lineno}" for frame in (own or frames)[-1:])


preflight = Preflight()
"""The preflight of this process."""
