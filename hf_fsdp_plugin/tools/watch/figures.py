"""What is shown of a run, in a terminal and on a page: figures with their units, times, and lines of text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_fsdp_plugin.text import format_count, format_names, plural
from hf_fsdp_plugin.tools.common import format_seconds
from hf_fsdp_plugin.tools.plan.estimate.types import MEMORY_KINDS, Moment
from hf_fsdp_plugin.tools.watch.events import Figures, RunEvent
from hf_fsdp_plugin.tools.watch.run_folder import Run

_FIRST: Final = (
    "loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second", "tokens_per_second_per_rank", "mfu",
    "memory_peak_gib", "memory_reserved_gib", "memory_share", "communication_exposed", "data_wait",
)  # fmt: skip
"""The figures that are shown first."""
_SHARES: Final = frozenset({"mfu", "memory_share", "communication_exposed", "data_wait", "slowest_rank_by"})
"""Figures that are parts of a whole, and shown in percent."""
_ELSEWHERE: Final = frozenset({"epoch", "steps_left", "seconds_left", "slowest_rank", "slowest_rank_by"})
_KINDS: Final = {f"memory_{kind}_gib": kind for kind in MEMORY_KINDS}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure over the steps of a run. Values may be infinite or not a number."""

    name: str
    series: list[tuple[int, float]]

    @property
    def title(self) -> str:
        return self.name.removesuffix("_gib").removesuffix("_seconds").replace("_", " ")

    @property
    def finite(self) -> list[float]:
        return [value for _, value in self.series if math.isfinite(value)]

    @property
    def last(self) -> str:
        return self.format(self.series[-1][1])

    @property
    def lowest(self) -> str:
        return self.format(min(self.finite)) if self.finite else "-"

    @property
    def highest(self) -> str:
        return self.format(max(self.finite)) if self.finite else "-"

    def format(self, value: float) -> str:
        """Return a value with its unit."""
        if not math.isfinite(value):
            return str(value)
        if self.name in _SHARES:
            return f"{value:.1%}"
        if self.name.endswith("_gib"):
            return f"{value:.2f} GiB"
        if self.name.endswith("_seconds"):
            return format_seconds(value)
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def figures_of(run: Run) -> list[Figure]:
    """Return the figures that are shown over the steps."""
    names = [name for name in run.events.latest() if name not in _ELSEWHERE and name not in _KINDS]
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    return [Figure(name=name, series=run.events.series(name)) for name in names]


def memory_moments(run: Run) -> list[Moment]:
    """Return the memory by kind at each logged step that has it."""

    def num_bytes(row: Figures) -> dict[Any, int]:
        sizes = {kind: row.get(name, 0.0) for name, kind in _KINDS.items()}
        return {kind: int(size * 2**30) if 0 <= size < 1e9 else 0 for kind, size in sizes.items()}

    rows = [
        (step, num_bytes(row)) for step, row in sorted(run.events.rows.items()) if not _KINDS.keys().isdisjoint(row)
    ]
    return [Moment(where=f"step {step:,}", bytes_by_kind=sizes) for step, sizes in rows]


def format_duration(seconds: float) -> str:
    """Format a time of a run: ``12 s``, ``12 min``, ``3 h 5 min``, ``2 d 4 h``."""
    minutes = int(min(seconds, 1e12)) // 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"


def headline(run: Run) -> str:
    """Return the state of the run."""
    age = "" if run.seconds is None else format_duration(run.seconds)
    texts = {
        "running": f"running, last event {age} ago",
        "silent": f"no event for {age}, and no end is recorded",
        "unknown": f"as of {run.source}" if run.source else "nothing has been logged yet",
    }
    return texts.get(run.state) or str(run.events.result)


def facts(run: Run) -> Iterator[str]:
    """Yield what is known of the progress, then of the ranks."""
    latest, start, step = run.events.latest(), run.events.start, run.events.step
    progress = []
    if step is not None:
        of_all = f" of {total:,} ({step / total:.0%})" if (total := run.max_steps or 0) > 0 else ""
        progress.append(f"step {step:,}{of_all}")
    progress += [f"epoch {latest['epoch']:.4g}"] if "epoch" in latest else []
    left = latest.get("seconds_left")
    if left is not None and left >= 0 and run.state == "running":
        progress.append(f"{format_duration(left)} left")
    yield ", ".join(progress)
    ranks = [plural(start["world_size"], "rank")] if "world_size" in start else []
    ranks += [f"on {plural(len(machines), 'machine')}"] if (machines := start.get("machines")) else []
    yield ", ".join(filter(None, [" ".join(ranks), start.get("backend"), start.get("device")]))


def restart_line(event: RunEvent) -> str:
    """Return one line about a restart."""
    line = f"restart {event['attempt']}" if "attempt" in event else "started again"
    line += f" at step {event['resumed']:,}" if event["resumed"] is not None else ""
    line += f", after step {event['reached']:,}" if event["reached"] is not None else ""
    return f"{line}: {event['result'] or 'the attempt before has no recorded end'}"


def straggler_line(event: RunEvent) -> str:
    """Return one line about a slow rank."""
    if event.get("text"):
        return str(event["text"])
    step = f"step {event['step']:,}: " if "step" in event else ""
    machine = f" on {event['machine']}" if event.get("machine") else ""
    slower = f" {event['slower_by']:.0%} slower" if "slower_by" in event else " slower"
    phase = f" in {event['phase']}" if event.get("phase") else ""
    return f"{step}rank {event['rank']}{machine} is{slower}{phase}"


def checkpoint_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a checkpoint: its name, the time of its save, how long training stood still, its state."""
    times = ["-" if row[name] is None else format_seconds(row[name]) for name in ("seconds", "stall_seconds")]
    return row["name"], *times, "complete" if row["complete"] else f"incomplete: {row['incomplete']}"


CHECKPOINT_HEAD: Final = ("checkpoint", "save", "stall", "state")


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the report says, in a few lines. Fields of other types than a report's are left out."""
    settings = [row for row in _list(report.get("settings")) if isinstance(row, dict)]
    model, params = report.get("model_class"), report.get("num_params")
    if isinstance(model, str) and isinstance(params, int) and params < 1 << 60:
        yield f"{model}, {format_count(params)} parameters, {plural(len(_list(report.get('units'))), 'unit')}"
    counts = Counter(str(row.get("status")) for row in settings)
    if settings:
        applied, unknown = f"{counts['applied']} applied", f"{counts['unobservable']} unobservable"
        yield f"settings: {applied}, {unknown}, {counts['differs']} differ"
    for row in settings:
        if row.get("status") == "differs":
            yield f"differs: {row.get('setting')}: {row.get('asked')} asked, {row.get('observed')} observed"
    restarts = report.get("restarts")
    if isinstance(restarts, dict) and restarts.get("count"):
        yield f"restarts: {restarts['count']}, {restarts.get('lost_steps')} optimizer steps trained again"
    problems = [row for row in _list(report.get("problems")) if isinstance(row, dict)]
    for row in problems:
        if row.get("severity") == "error":
            yield f"{row.get('code')}: {row.get('message')}"
    if warnings := [str(row.get("code")) for row in problems if row.get("severity") == "warning"]:
        yield f"warnings: {format_names(list(dict.fromkeys(warnings)), 6)}"


def notes(run: Run) -> Iterator[str]:
    """Yield what a reader should know of the files."""
    if run.events.damaged:
        what = plural(run.events.damaged, "damaged line")
        yield f"{what} of {run.source}: not shown"
    if run.num_checkpoints > len(run.checkpoints):
        yield f"{run.num_checkpoints - len(run.checkpoints)} older checkpoints are not shown"


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
