"""The events of a run: ``fsdp_run.jsonl``, to which the run appends, or the history in a Trainer's state.

The file may end in the middle of a line, contain damaged lines, and be large: only what was appended since the last
read is read. Values of other types than expected make a line damaged. Nothing is sent to the run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading
from hf_fsdp_plugin.metrics.run_file import NOT_FINITE

RunEvent = dict[str, Any]
Figures = dict[str, float]
"""Name in the log -> value. It may be infinite or not a number."""

_FIELDS: Final[Mapping[str, Mapping[str, type]]] = {
    "start": {"attempt": int, "world_size": int, "machines": list, "backend": str, "device": str, "max_steps": int},
    "log": {"step": int},
    "save": {"step": int, "checkpoint": str, "seconds": float, "stall_seconds": float, "asynchronous": bool},
    "straggler": {"step": int, "rank": int, "machine": str, "phase": str, "slower_by": float, "text": str},
    "end": {"step": int, "result": str},
}
"""RunEvent -> the types of its fields, of which each may be absent or null. Further fields are ignored."""
_NEEDED: Final = {"log": "step", "save": "checkpoint", "straggler": "rank", "end": "result"}
_NAME: Final = re.compile(r"[\w][\w /.,:@-]{0,63}", re.ASCII)
_MAX_NAMES: Final = 200
_MAX_LINE: Final = 1 << 20
_MAX_ROWS: Final = 4096
"""Number of logged steps that are kept. If there are twice as many, every second one is dropped."""
_MAX_EVENTS: Final = 1000
_LARGEST: Final = 1 << 53


@dataclass(kw_only=True)
class RunEvents:
    """What the events say of a run, up to the last one that was read.

    Attributes:
        rows: step -> what was logged at it. Steps that were trained again after a restart have the later values.
        start: the last start; empty without one.
        restarts: the starts after the first one, with the step that was reached before (``reached``), the result of the
            attempt before (``result``), and the first step that was logged after it (``resumed``); ``None`` if unknown.
        saves: name of a checkpoint -> its last save.
        stragglers: the notices of slow ranks, oldest first.
        result: how the last attempt has ended; ``None`` if no end is recorded.
        time: Unix time of the last event; 0.0 without one.
        damaged: number of lines that could not be read.
    """

    rows: dict[int, Figures] = field(default_factory=dict)
    start: RunEvent = field(default_factory=dict)
    restarts: list[RunEvent] = field(default_factory=list)
    saves: dict[str, RunEvent] = field(default_factory=dict)
    stragglers: list[RunEvent] = field(default_factory=list)
    step: int | None = None
    result: str | None = None
    time: float = 0.0
    damaged: int = 0
    _names: set[str] = field(default_factory=set)
    _begins: bool = False
    """Whether no step was logged yet since the last start."""

    def add(self, line: bytes | RunEvent) -> None:
        """Add one event: a line of the file, or an object. A damaged one is counted."""
        event: Any = None
        with suppress(ValueError, RecursionError):
            event = json.loads(line) if isinstance(line, bytes) else line
        kind = event.get("event") if isinstance(event, dict) else None
        if not isinstance(kind, str):
            self.damaged += 1
            return
        fields = {"time": float, **_FIELDS.get(kind, {})}
        found = {name: value for name in fields if (value := event.get(name)) is not None}
        needed = _NEEDED.get(kind)
        if not all(_is_valid(value, fields[name]) for name, value in found.items()) or (needed and needed not in found):
            self.damaged += 1
            return
        self.time = found.get("time", self.time)
        if kind in _FIELDS:  # a later version may write further events
            getattr(self, f"_add_{kind}")(found, event)

    def _add_start(self, found: RunEvent, event: RunEvent) -> None:
        if self.start:
            self.restarts = [*self.restarts, {**found, "reached": self.step, "result": self.result, "resumed": None}]
            self.restarts = self.restarts[-_MAX_EVENTS:]
        self.start, self.result, self._begins = found, None, True

    def _add_log(self, found: RunEvent, event: RunEvent) -> None:
        step = found["step"]
        if self._begins and self.rows:
            # The steps from here on are trained again, or for the first time in this folder.
            self.rows = {number: row for number, row in self.rows.items() if number < step}
            if self.restarts:
                self.restarts[-1]["resumed"] = step
        self._begins = False
        figures = {
            name: float(value)
            for name, value in event.items()
            if name not in ("time", "step") and _NAME.fullmatch(name)
            if _is_valid(value, float) or value in NOT_FINITE
        }
        self._names |= set(sorted(figures.keys() - self._names)[: _MAX_NAMES - len(self._names)])
        row = self.rows.setdefault(step, {})
        row.update((name, value) for name, value in figures.items() if name in self._names)
        self.step = step
        if len(self.rows) > 2 * _MAX_ROWS:
            self.rows = dict(list(self.rows.items())[::2])

    def _add_save(self, found: RunEvent, event: RunEvent) -> None:
        self.saves.pop(found["checkpoint"], None)
        self.saves[found["checkpoint"]] = found
        if len(self.saves) > _MAX_EVENTS:
            del self.saves[next(iter(self.saves))]

    def _add_straggler(self, found: RunEvent, event: RunEvent) -> None:
        self.stragglers = [*self.stragglers, found][-_MAX_EVENTS:]

    def _add_end(self, found: RunEvent, event: RunEvent) -> None:
        self.result = found["result"]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a figure, in the order of the steps."""
        return sorted((step, row[name]) for step, row in self.rows.items() if name in row)

    def latest(self) -> Figures:
        """Return the last value of every figure that was logged."""
        found: Figures = {}
        for _, row in sorted(self.rows.items()):
            found.update(row)
        return found


def _is_valid(value: Any, kind: type[Any]) -> bool:
    """Return whether a value of a file has a type. Numbers are of a printable size, and lists contain texts."""
    if isinstance(value, bool):
        return kind is bool
    if kind in (int, float):
        return (isinstance(value, float) and kind is float) or (isinstance(value, int) and abs(value) < _LARGEST)
    return isinstance(value, kind) and (kind is not list or all(isinstance(each, str) for each in value))


class EventFile:
    """The file of a run's events, of which only what was appended is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._events = RunEvents()

    def read(self) -> RunEvents | None:
        """Return the events up to now; ``None`` if there is no file.

        Raises:
            CheckpointError: the file cannot be read (FSDP-E472).
        """
        try:
            with open_for_reading(self._path) as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # another run has written a new file
                    self._offset, self._events = 0, RunEvents()
                self._add_lines(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            refuse("FSDP-E472", self._path, f"cannot be read: {error.strerror or error}.")
        return self._events

    def _add_lines(self, file: BinaryIO) -> None:
        """Add the lines that are complete."""
        file.seek(self._offset)
        while chunk := file.read(_MAX_LINE):
            *lines, rest = chunk.split(b"\n")
            if not lines and len(chunk) < _MAX_LINE:
                break  # the run is writing this line
            if not lines:
                lines, rest = [b"too long"], b""
            for line in lines:
                self._events.add(line)
            self._offset += len(chunk) - len(rest)
            file.seek(self._offset)
