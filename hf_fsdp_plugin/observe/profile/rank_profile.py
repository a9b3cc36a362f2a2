"""The profile of one rank: what it writes to its file, a few numbers for each phase and each collective."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hf_fsdp_plugin.estimate.intervals import clip, measure
from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.observe.profile.calls import Activity, Call, read_activity
from hf_fsdp_plugin.observe.profile.marks import RATE_LIMITER, UNIT, Phase
from hf_fsdp_plugin.observe.profile.phases import DeviceClock, Segment, on_device, read_boundaries, read_steps
from hf_fsdp_plugin.observe.profile.trace import Trace

_DIGITS = 7
"""Digits of seconds in the file: tenths of a microsecond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a phase.

    Attributes:
        compute: computation.
        communication: collectives, whether or not something is computed meanwhile.
        exposed: the part of ``communication`` during which nothing is computed.
    """

    seconds: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0

    @property
    def idle(self) -> float:
        """Neither computation nor communication: Python, launches of kernels, waiting for data."""
        return max(0.0, self.seconds - self.compute - self.exposed)

    def __add__(self, other: Times) -> Times:
        return Times(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def scaled(self, factor: float) -> Times:
        return Times(**{name: getattr(self, name) * factor for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall(Call):
    """One collective of a profiled step, in seconds since the first profiled step began on this rank."""

    step: int
    phase: Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSeconds:
    """Seconds of one unit in one step, without its collectives: kernels of a device, or time of the CPU thread."""

    forward: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """One rank's profile.

    Attributes:
        began: when the first profiled step began, in seconds since the epoch.
        steps: phases of each profiled step, in the order of the step, in seconds since ``began``.
        times: seconds of each phase, averaged over the steps.
        units: computation of each unit, averaged over the steps.
        rate_limited: seconds of a step in which FSDP1 waits before an all-gather (``limit_all_gathers``).
        profiled, unprofiled: wall-clock seconds of steps with and without the profiler.
        memory: moments of one step, ``Moment.seconds`` since the step began.
        facts: what is needed beside the trace; see ``integrations.profiling``.
    """

    rank: int
    world_size: int
    host: str
    device: str
    began: float
    steps: Sequence[Sequence[Segment]]
    times: Mapping[Phase, Times]
    calls: Sequence[StepCall]
    units: Mapping[str, UnitSeconds] = field(default_factory=dict)
    rate_limited: float = 0.0
    profiled: Sequence[float] = ()
    unprofiled: Sequence[float] = ()
    memory: Sequence[Moment] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    @property
    def reductions_per_step(self) -> float:
        """How often the gradients of a unit are reduced in a step: more than once if each micro-batch reduces them."""
        kinds = ("reduce_scatter", "all_reduce")
        counts = Counter((call.unit, call.kind) for call in self.calls if call.unit is not None and call.kind in kinds)
        return max(counts.values(), default=0) / max(1, len(self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file: calls as rows of numbers, and units by their index."""
        names = list(dict.fromkeys(call.unit for call in self.calls if call.unit is not None))
        index = {name: at for at, name in enumerate(names)}
        rows = [
            [call.step, call.phase, call.kind, index.get(call.unit, -1) if call.unit is not None else -1]
            + [round(getattr(call, key), _DIGITS) for key in ("issued", "arrived", "start", "end", "exposed")]
            + [call.bytes]
            for call in self.calls
        ]
        return {
            "rank": self.rank, "world_size": self.world_size, "host": self.host, "device": self.device,
            "began": self.began,
            "steps": [[[s.phase, round(s.start, _DIGITS), round(s.end, _DIGITS)] for s in step] for step in self.steps],
            "times": {phase: asdict(times) for phase, times in self.times.items()},
            "unit_names": names, "calls": rows,
            "units": {name: asdict(unit) for name, unit in self.units.items()}, "rate_limited": self.rate_limited,
            "profiled": list(self.profiled), "unprofiled": list(self.unprofiled),
            "memory": [[moment.where, moment.seconds, dict(moment.bytes_by_kind)] for moment in self.memory],
            "facts": dict(self.facts),
        }  # fmt: skip

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RankProfile:
        names = tree["unit_names"]
        fields = ("issued", "arrived", "start", "end", "exposed")
        calls = [
            StepCall(
                step=step, phase=phase, kind=kind, unit=names[unit] if unit >= 0 else None, bytes=size,
                **dict(zip(fields, seconds, strict=True)),
            )
            for step, phase, kind, unit, *seconds, size in tree["calls"]
        ]  # fmt: skip
        return cls(
            rank=tree["rank"], world_size=tree["world_size"], host=tree["host"], device=tree["device"],
            began=tree["began"], steps=[[Segment(*row) for row in step] for step in tree["steps"]],
            times={phase: Times(**times) for phase, times in tree["times"].items()}, calls=calls,
            units={name: UnitSeconds(**unit) for name, unit in tree["units"].items()},
            rate_limited=tree["rate_limited"], profiled=tuple(tree["profiled"]),
            unprofiled=tuple(tree["unprofiled"]),
            memory=tuple(Moment(where=row[0], seconds=row[1], bytes_by_kind=row[2]) for row in tree["memory"]),
            facts=tree["facts"],
        )  # fmt: skip


def profile_of(
    trace: Trace, *, rank: int, world_size: int, host: str, device: str, skip: int = 0, most: int | None = None
) -> RankProfile | None:
    """Return the profile of a rank's trace; ``None`` if the trace contains no complete step.

    Args:
        skip: steps of the trace that warm the profiler up. They are used only if there are no others.
        most: number of steps after them that are used.
    """
    boundaries = read_boundaries(trace)
    if len(boundaries) < 2:
        return None
    skip = min(skip, len(boundaries) - 2)
    boundaries = boundaries[skip:] if most is None else boundaries[skip : skip + most + 1]
    clock, activity = DeviceClock(trace), read_activity(trace)
    steps = read_steps(trace, boundaries)
    device_steps = [on_device(segments, clock) for segments in steps]
    began = device_steps[0][0].start
    times: dict[Phase, Times] = {}
    for segment in (segment for step in device_steps for segment in step):
        times[segment.phase] = times.get(segment.phase, Times()) + _times_of(segment, activity)
    return RankProfile(
        rank=rank, world_size=world_size, host=host, device=device, began=began,
        steps=[[Segment(s.phase, s.start - began, s.end - began) for s in step] for step in device_steps],
        times={phase: each.scaled(1 / len(steps)) for phase, each in times.items()},
        calls=list(_calls_in(activity.calls, steps, began)), units=_unit_seconds(trace, steps, activity, clock),
        rate_limited=sum(
            mark.end - mark.start
            for mark in trace.marks
            if mark.name == RATE_LIMITER and boundaries[0] <= mark.start < boundaries[-1]
        ) / len(steps),
    )  # fmt: skip


def _times_of(segment: Segment, activity: Activity) -> Times:
    def within(intervals: Sequence[tuple[float, float]]) -> float:
        return measure(clip(intervals, segment.start, segment.end))

    return Times(
        seconds=segment.end - segment.start,
        compute=within(activity.compute),
        communication=within(activity.communication),
        exposed=within(activity.exposed),
    )


def _calls_in(calls: Sequence[Call], steps: Sequence[Sequence[Segment]], began: float) -> list[StepCall]:
    """Return the collectives that were called in a step, with the phase in which they were called."""
    segments = [(segment, number) for number, step in enumerate(steps) for segment in step]
    starts = [segment.start for segment, _ in segments]
    found = []
    for call in calls:
        at = bisect_right(starts, call.issued) - 1
        if at < 0 or call.issued >= segments[at][0].end:
            continue
        found.append(
            StepCall(
                step=segments[at][1], phase=segments[at][0].phase, kind=call.kind, unit=call.unit, bytes=call.bytes,
                issued=call.issued - began, arrived=call.arrived - began, start=call.start - began,
                end=call.end - began, exposed=call.exposed,
            )
        )  # fmt: skip
    return found


def _unit_seconds(
    trace: Trace, steps: Sequence[Sequence[Segment]], activity: Activity, clock: DeviceClock
) -> dict[str, UnitSeconds]:
    """Return the computation in the marks of each unit, which cover its forward and its recomputed forward."""
    segments = [segment for step in steps for segment in step]
    starts = [segment.start for segment in segments]
    found: dict[str, UnitSeconds] = {}
    for mark in trace.marks:
        at = bisect_right(starts, mark.start) - 1
        if not mark.name.startswith(UNIT) or at < 0 or mark.start >= segments[at].end:
            continue
        start, end = clock.at(mark.start), clock.at(mark.end)
        if trace.kernels:
            seconds = measure(clip(activity.compute, start, end)) / len(steps)
        else:
            seconds = (end - start - measure(clip(activity.exposed, start, end))) / len(steps)
        name, unit = mark.name.removeprefix(UNIT), found.get(mark.name.removeprefix(UNIT), UnitSeconds())
        if segments[at].phase == "backward":
            found[name] = replace(unit, recomputed=unit.recomputed + seconds)
        elif segments[at].phase == "forward":
            found[name] = replace(unit, forward=unit.forward + seconds)
    return found


def wall_seconds(times: Sequence[float]) -> list[float]:
    """Return the seconds between consecutive times."""
    return [later - earlier for earlier, later in pairwise(times)]
