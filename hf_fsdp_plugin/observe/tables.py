"""The tables of the printed report, at most 100 columns wide."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from hf_fsdp_plugin.observe.memory import MemoryObservation
from hf_fsdp_plugin.observe.settings import SettingObservation, format_value
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_bytes, format_names, format_table, plural, shorten, truncate_lines

_WIDTH = 100
_MAX_LINES = 10
_OF_RUN = ("FSDP-W505", "FSDP-W511", "FSDP-W512", "FSDP-W516")
"""Warnings about the trained model that are printed nowhere else."""


def units_table(units: Sequence[UnitObservation]) -> str:
    """Format the units. Consecutive units whose names differ only in the number share a row."""
    if not units:
        return "units: none, the model is not sharded"
    rows = [("unit", "class", "parameters", "compute", "reduce", "master", "reshard", "")]
    for similar in (list(group) for _, group in groupby(units, _similarity_key)):
        unit = similar[0]
        notes = [name for name, holds in (("checkpointed", unit.checkpointed), ("offloaded", unit.offloaded)) if holds]
        if unit.num_frozen:
            notes.append("frozen" if unit.num_frozen == unit.num_params else f"{unit.num_frozen:,} frozen")
        times = f" ×{len(similar)}" if len(similar) > 1 else ""
        name = shorten(_common_name(similar) or "(root)", 30)
        class_name = shorten(unit.class_name, 30 - len(times)) + times
        dtypes = unit.param_dtype, unit.reduce_dtype, unit.master_dtype
        reshards = "yes" if unit.reshard_after_forward else "no"
        rows.append((name, class_name, f"{unit.num_params:,}", *dtypes, reshards, ", ".join(notes)))
    return format_table(rows, right={2})


def _similarity_key(unit: UnitObservation) -> tuple[object, ...]:
    """Return what is equal for units whose names differ only in the number."""
    facts = {key: value for key, value in unit.to_json().items() if key not in ("name", "num_local_params")}
    return re.sub(r"\d+", "#", unit.name), *facts.values()


def _common_name(units: Sequence[UnitObservation]) -> str:
    """Return the common name, such as ``model.layers.0–29``: numbers that differ become a range."""
    first, last = (re.split(r"(\d+)", unit.name) for unit in (units[0], units[-1]))
    return "".join(a if a == b else f"{a}–{b}" for a, b in zip(first, last, strict=True))


def memory_table(ranks: Sequence[MemoryObservation], own: MemoryObservation) -> str:
    """Format the memory of all ranks, and the memory that this rank would need under DistributedDataParallel."""
    rows = [
        ("memory per rank", "this run", "data parallel"),
        ("  parameters", _range(m.params_bytes for m in ranks), _memory(own.ddp_params_bytes)),
        ("  gradients", _range(m.grads_bytes for m in ranks), _memory(own.ddp_grads_bytes)),
        ("  optimizer", _range(m.optimizer_bytes for m in ranks), _memory(own.ddp_optimizer_bytes)),
        ("  total", _range(m.held_bytes for m in ranks), _memory(own.ddp_bytes)),
        (f"  peak ({own.peak_source})", _range(m.peak_bytes for m in ranks), ""),
    ]
    return format_table(rows, right={1, 2})


def memory_line(ranks: Sequence[MemoryObservation], own: MemoryObservation) -> str:
    """Return the memory of all ranks as one line."""
    held, peak = _range(m.held_bytes for m in ranks), _range(m.peak_bytes for m in ranks)
    return (
        f"memory per rank: {held} of parameters, gradients and optimizer state (data parallel: "
        f"{_memory(own.ddp_bytes)}); peak {peak} ({own.peak_source})"
    )


def status_line(settings: Sequence[SettingObservation], *, trained: bool = True) -> str:
    """Return the number of settings of each status, and the names of the settings that differ.

    Args:
        trained: whether an optimizer step was observed. Without one, the absence of differences shows little.
    """
    counts = Counter(row.status for row in settings)
    differing = [row.setting for row in settings if row.status == "differs"]
    text = f"settings: {counts['applied']} applied, {counts['unobservable']} unobservable"
    if differing:
        return f"{text}, {counts['differs']} DIFFER from the requested value: {format_names(differing)}"
    return f"{text}, none differs" if trained else text


def difference_lines(settings: Sequence[SettingObservation], problems: Sequence[Problem]) -> list[str]:
    """Return one line for each error, each setting that differs and each warning of the run, at most 10 of each."""
    rows = [row for row in settings if row.status == "differs"]
    names = {row.setting for row in rows}
    errors = [f"ERROR    {p}" for p in problems if p.severity == "error" and p.setting not in names]
    values = ((row.setting, format_value(row.asked), format_value(row.observed)) for row in rows)
    lines = [f"DIFFERS  {name}: {asked} requested, {observed} observed" for name, asked, observed in values]
    warnings = [f"WARNING  {p}" for p in problems if p.code in _OF_RUN]
    return [*truncate_lines(errors, _MAX_LINES), *truncate_lines(lines, _MAX_LINES), *warnings]


def wrap(text: str) -> str:
    """Break a line that is wider than the tables."""
    return "\n".join(_wrap(text))


def settings_table(settings: Sequence[SettingObservation]) -> str:
    """Format the requested and observed value of each setting; unobservable launcher settings share the last line."""
    rows = [("setting", "asked", "observed", "")]
    reasons = {}
    launcher = [row for row in settings if row.status == "unobservable" and row.setting.startswith("launch.")]
    for row in settings:
        if row in launcher:
            continue
        asked = f"{row.asked} → {format_value(row.planned)}" if row.asked == "auto" else format_value(row.asked)
        observed = "?" if row.status == "unobservable" else format_value(row.observed)
        status = "DIFFERS  <<<" if row.status == "differs" else row.status
        rows.append((row.setting, shorten(asked, 30), shorten(observed, 28), status))
        if row.status != "applied" and row.reason:
            reasons[len(rows) - 1] = row.reason
    lines = []
    for index, line in enumerate(format_table(rows).split("\n")):
        lines += [line, *_wrap(reasons.get(index, ""), first="    ", rest="    ")]
    if launcher:
        names = ", ".join(row.setting.removeprefix("launch.") for row in launcher)
        lines += _wrap(f"used only by the launcher, not observable: {names}")
    return "\n".join(lines)


def problem_lines(problems: Sequence[Problem], differing: Collection[str]) -> str:
    """Format the errors, the settings that differ and the warnings of the run. Those from before it are counted."""
    warnings = [problem for problem in problems if problem.severity == "warning"]
    shown = [problem for problem in problems if problem.severity == "error"]
    # A setting's last warning is about the live model; earlier ones come from the plan.
    shown += {problem.setting: problem for problem in warnings if problem.setting in differing}.values()
    of_run = [problem for problem in warnings if problem.setting not in differing and problem.code in _OF_RUN]
    shown += of_run
    lines = [line for problem in shown for line in _wrap(str(problem))]
    if differing:
        verb = "setting differs" if len(differing) == 1 else "settings differ"
        lines = ["!" * _WIDTH, f"{len(differing)} {verb} from the requested value:", *lines, "!" * _WIDTH]
    num_others = sum(problem.setting not in differing for problem in warnings) - len(of_run)
    if num_others:
        lines.append(f"{plural(num_others, 'other warning')} from before the run: see 'problems' in the report's JSON.")
    return "\n".join(lines)


def _wrap(text: str, *, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def _memory(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)


def _range(counts: Iterable[int]) -> str:
    counts = list(counts)
    low, high = _memory(min(counts)), _memory(max(counts))
    return low if low == high else f"{low} to {high}"
