"""The clock of a rank: the time of its steps by phase, and the time in which they wait for other ranks.

On CPU ranks, the thread that trains waits in each collective, so the clock of the host measures all. With an
accelerator, this thread only enqueues: every few steps, the clock records events on the stream that computes, where a
phase begins and around each wait for a collective, and reads them when they are complete. It never waits for a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from hf_fsdp_plugin.devices import Device
from hf_fsdp_plugin.metrics.rows import Row

ClockPhase = Literal["data", "forward", "backward", "optimizer", "saving", "other"]
PHASES: Final[tuple[ClockPhase, ...]] = get_args(ClockPhase)
"""Parts of a step. ``forward`` includes the loss, ``optimizer`` all from the backward to the end of the step, such as
clipping; ``other`` is between the steps: logs, evaluations, and batches that the script makes itself.
"""
_EVERY: Final = 4
"""An accelerator's step of so many is measured: the events of a step take up to half a millisecond of the host."""


class HostClock:
    """The clock of a CPU rank, and the counter of tokens.

    Args:
        waited: returns the nanoseconds for which the thread that trains has waited in collectives so far.
        written: called with the row of each measured step, whose numbers are sums since the begin.

    Attributes:
        phase: the phase that runs.
        tokens: tokens of training forwards so far.
        num_steps: steps so far.
    """

    def __init__(self, waited: Callable[[], int], written: Callable[[Row], None]) -> None:
        self._waited, self._written = waited, written
        self.phase: ClockPhase = "other"
        self.tokens = self.num_steps = 0
        self._num_measured, self._seconds = 0, dict.fromkeys((*PHASES, "waiting"), 0.0)
        self._begun, self._waited_before = time.perf_counter_ns(), waited()

    def enter(self, phase: ClockPhase) -> ClockPhase:
        """Begin a phase. Returns the phase before."""
        now, waited = time.perf_counter_ns(), self._waited()
        waiting = waited - self._waited_before
        self._seconds[self.phase] += (now - self._begun - waiting) / 1e9
        self._seconds["waiting"] += waiting / 1e9
        self._begun, self._waited_before = now, waited
        before, self.phase = self.phase, phase
        return before

    def skip(self) -> None:
        """Do not count the time since the last phase began, as before a training."""
        self._begun, self._waited_before, self.phase = time.perf_counter_ns(), self._waited(), "other"

    @contextmanager
    def exposed_wait(self) -> Iterator[None]:
        """The stream that computes waits for a collective in the block. On the CPU, the waits are counted anyway."""
        yield

    def step_ended(self) -> None:
        """End a step, and write its row."""
        self.enter("other")
        self.num_steps += 1
        self._write(self._row)

    def flush(self) -> None:
        """Write the rows of the steps whose events are complete."""

    @property
    def _row(self) -> Row:
        """The row of the step that has ended, without times of phases."""
        return Row(step=self.num_steps, time=time.time(), tokens=self.tokens)

    def _write(self, row: Row) -> None:
        self._num_measured += 1
        self._written(row._replace(measured=self._num_measured, **self._seconds))


@dataclass(slots=True)
class _Measured:
    """The events of a step: when a phase begins, and the waits in a phase."""

    marks: list[tuple[ClockPhase, Any]] = field(default_factory=list)
    waits: list[tuple[ClockPhase, Any, Any]] = field(default_factory=list)
    row: Row = field(default_factory=Row)


class DeviceClock(HostClock):
    """The clock of a rank with an accelerator. See :class:`HostClock`."""

    def __init__(self, device: Device, written: Callable[[Row], None]) -> None:
        super().__init__(lambda: 0, written)
        self._device = device
        self._measured: _Measured | None = None
        self._pending: deque[_Measured] = deque()

    def enter(self, phase: ClockPhase) -> ClockPhase:
        before, self.phase = self.phase, phase
        if self._measured is not None:
            self._measured.marks.append((phase, self._device.timed_event()))
        return before

    @contextmanager
    def exposed_wait(self) -> Iterator[None]:
        measured = self._measured
        if measured is None:
            yield
            return
        begin = self._device.timed_event()
        yield
        measured.waits.append((self.phase, begin, self._device.timed_event()))

    def step_ended(self) -> None:
        self.enter("other")
        self.num_steps += 1
        if self._measured is not None:
            self._measured.row = self._row
            self._pending.append(self._measured)
        # It begins with the end of this step, so that it contains the time until the next forward.
        is_next = self.num_steps % _EVERY == _EVERY - 1
        self._measured = _Measured([(self.phase, self._device.timed_event())]) if is_next else None
        self.flush()

    def flush(self) -> None:
        while self._pending and self._pending[0].marks[-1][1].query():
            measured = self._pending.popleft()
            for (phase, begin), (_, end) in zip(measured.marks, measured.marks[1:], strict=False):
                self._seconds[phase] += begin.elapsed_time(end) / 1e3
            for phase, begin, end in measured.waits:
                waited = begin.elapsed_time(end) / 1e3
                self._seconds[phase] -= waited
                self._seconds["waiting"] += waited
            self._write(measured.row)
