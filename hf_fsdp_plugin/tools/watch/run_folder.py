"""What the files in the folder of a run show: its events, its checkpoints and its report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.completeness import check_trainer_state, why_incomplete
from hf_fsdp_plugin.checkpoint.file_io import object_in
from hf_fsdp_plugin.metrics.run_file import RUN_FILE
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.inspect.summary import checkpoints_of_run
from hf_fsdp_plugin.tools.watch.events import EventFile, RunEvents

_CHECKPOINTS: Final = 10
"""Number of checkpoints that are examined, the newest."""
_SILENT: Final = 600.0
"""Seconds without an event after which a run is not shown as running."""
RunState = Literal["running", "silent", "finished", "failed", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its files show it at one moment.

    Attributes:
        source: the file with the history, relative to the folder; ``None`` without one.
        checkpoints: name, step, whether it is complete, the reason if not, and seconds of its save, newest first.
        num_checkpoints: number of all checkpoints.
        report: the content of ``fsdp_report.json``; empty without one, or if it is older than the last start.
        seconds: since the last event; ``None`` if unknown.
    """

    folder: Path
    events: RunEvents
    source: str | None = None
    max_steps: int | None = None
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    num_checkpoints: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def state(self) -> RunState:
        """Whether the run is running, as far as the events show it."""
        if self.events.result is not None:
            return "failed" if self.events.result.startswith("failed") else "finished"
        if self.seconds is None:
            return "unknown"
        return "running" if self.seconds < _SILENT else "silent"


class RunFolder:
    """The folder of a run, which can be read again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events = EventFile(folder / RUN_FILE)
        self._complete: set[Path] = set()

    def read(self) -> Run:
        """Return the run as it is now.

        Raises:
            CheckpointError: the file of events cannot be read.
        """
        paths, events = checkpoints_of_run(self._folder), self._events.read()
        source: str | None = RUN_FILE
        max_steps: int | None = None
        if events is None:
            events, source, max_steps = _trainer_history(self._folder, paths)
        report = self._folder / file_names.REPORT_NAME
        is_current = report.is_file() and report.stat().st_mtime >= events.start.get("time", 0.0)
        return Run(
            folder=self._folder,
            events=events,
            source=source,
            max_steps=events.start.get("max_steps", max_steps),
            checkpoints=tuple(self._checkpoint(path, events) for path in paths[:_CHECKPOINTS]),
            num_checkpoints=len(paths),
            report=object_in(report) if is_current else {},
            seconds=max(0.0, time.time() - events.time) if events.time else None,
        )

    def _checkpoint(self, path: Path, events: RunEvents) -> Mapping[str, Any]:
        """Return the row of a checkpoint. One that was complete is not examined again."""
        reason = None if path in self._complete else why_incomplete(path)
        if reason is None:
            self._complete.add(path)
        save = events.saves.get(path.name, {})
        number = "".join(filter(str.isdigit, path.name))
        times = {name: save.get(name) for name in ("seconds", "stall_seconds", "asynchronous")}
        return {
            "name": path.name, "step": int(number) if number.isdecimal() else None, "complete": reason is None,
            "incomplete": reason, **times,
        }  # fmt: skip


def _trainer_history(folder: Path, checkpoints: list[Path]) -> tuple[RunEvents, str | None, int | None]:
    """Return what a Trainer has logged, the file that contains it, and the number of steps; of a run without events.

    The newest of the states in the run's folder and in its newest readable checkpoint is used.
    """
    found: list[tuple[int, Path, Mapping[str, Any]]] = []
    for place in (folder, *checkpoints):
        path = place / file_names.TRAINER_STATE
        try:
            check_trainer_state(path)
        except CheckpointError:
            continue
        tree = object_in(path)
        found.append((tree.get("global_step", 0), path, tree))
        if place != folder:
            break
    events = RunEvents()
    if not found:
        return events, None, None
    step, path, newest = max(found, key=lambda each: each[0])
    for entry in (*newest.get("log_history", ()), {"step": step}):
        events.add({**entry, "event": "log"} if isinstance(entry, dict) else {})
    return events, path.relative_to(folder).as_posix(), newest.get("max_steps")
