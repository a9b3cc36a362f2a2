"""The report, and its output as JSON, file and text. The tables of the text are at most 100 columns wide."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.observe.observed_run import JsonObject, format_value
from hf_fsdp_plugin.observe.units import HELD, UnitObservation
from hf_fsdp_plugin.plan.names import common_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.attempts import Restarts
from hf_fsdp_plugin.text import format_memory, format_names, format_table, plural, shorten, truncate_lines, wrap_words
from hf_fsdp_plugin.version import SCHEMA_VERSION


class ReportRow(dict[str, Any]):
    """An object of the report's JSON, described in docs/json.schema.json, whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the report has no {name!r} here, only {', '.join(self)}")


class MemoryRow(ReportRow):
    """The memory of this rank (``observed_memory``), or a rank with its memory (``observed_rank``)."""

    @property
    def held_bytes(self) -> int:
        """The sum of parameters, gradients and optimizer state."""
        return sum(self[name] for name in HELD)


_WIDTH = 100
_MAX_LINES = 10
_OF_RUN = tuple(f"FSDP-W{number}" for number in (505, 512, 516, 519, 520))
"""Warnings about the trained model that are printed nowhere else."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The input of one optimizer step on one rank.

    Attributes:
        per_device: sequences per forward.
        accumulation: forwards per optimizer step.
        seq_len: tokens per sequence; ``None`` if unknown.
        all_ranks: sequences per optimizer step of all ranks, if these have different numbers.
    """

    per_device: int
    accumulation: int = 1
    seq_len: int | None = None
    all_ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The live model compared with the plan, as JSON (``report`` of docs/json.schema.json) and as text.

    It is the same on all ranks, except for ``units`` and ``memory``.

    Attributes:
        backend: ``fsdp1``, ``fsdp2``, both, ``ddp`` or ``none``.
        mesh: sizes of ``replicate`` and ``shard``, and of ``context``, ``tensor`` and ``expert`` if they are above 1.
        device: type of the device on which the units compute.
        units: one entry for each FSDP unit, with its sizes on this rank.
        num_params: number of elements of the whole model.
        settings: one entry for each setting that is shown (``observed_setting`` of the schema).
        memory: memory of this rank (``observed_memory``).
        ranks: one entry per rank (``observed_rank``).
        problems: the plan's warnings and notes, then the problems of the live model.
        batch: the input of one step; ``None`` if unknown.
        training: what the optimizer steps changed (``observed_training``).
        versions: versions of libraries.
        other_models: the reports of the run's other models, such as a second trained one or a reference model.
        restarts: the failed attempts of the run.
        steps_before: optimizer steps of the run that the checkpoint contained from which the last attempt has resumed.
    """

    backend: str
    model_class: str
    world_size: int
    mesh: dict[str, int]
    device: str
    units: tuple[UnitObservation, ...]
    num_params: int
    settings: tuple[ReportRow, ...]
    memory: MemoryRow
    ranks: tuple[MemoryRow, ...]
    problems: tuple[Problem, ...]
    batch: BatchShape | None
    training: ReportRow
    versions: dict[str, str]
    other_models: tuple[Report, ...] = ()
    restarts: Restarts = field(default_factory=Restarts)
    steps_before: int = 0

    @property
    def differing(self) -> tuple[ReportRow, ...]:
        """The settings whose observed value is not the requested one."""
        return tuple(row for row in self.settings if row.status == "differs")

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different samples. Tensor-parallel ranks outside the mesh read the same samples."""
        return self.mesh["replicate"] * self.mesh["shard"]

    @property
    def effective_batch_size(self) -> int:
        """Sequences per optimizer step; 0 if unknown."""
        if self.batch is None:
            return 0
        return self.batch.all_ranks or self.batch.per_device * self.batch.accumulation * self.num_data_ranks

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step; 0 if unknown. The model's inputs are a part of each sequence on a context axis."""
        seq_len = (self.batch.seq_len or 0) * self.mesh.get("context", 1) if self.batch else 0
        return self.effective_batch_size * seq_len

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``fsdp_report.json``."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self._model_json(),
            "world_size": self.world_size,
            "device": self.device,
            "ranks": list(map(dict, self.ranks)),
            "effective_batch_size": self.effective_batch_size,
            "tokens": self.tokens,
            "versions": self.versions,
            "other_models": [other._model_json() for other in self.other_models],
            "restarts": self.restarts.to_report(self.steps_before),
        }

    def _model_json(self) -> dict[str, Any]:
        """Return what depends on the model (``observed_model`` of the schema)."""
        return {
            "backend": self.backend,
            "model_class": self.model_class,
            "mesh": self.mesh,
            "num_params": self.num_params,
            "units": [unit.to_json() for unit in self.units],
            "settings": list(map(dict, self.settings)),
            "memory": dict(self.memory),
            "training": dict(self.training),
            "problems": [problem.to_json() for problem in self.problems],
        }

    def write(self, path: str | os.PathLike[str]) -> Path | None:
        """Write the JSON on rank 0 and return its path; return ``None`` on other ranks.

        A file is written atomically; a device or a pipe, such as ``/dev/stdout``, is kept and written to.
        """
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        target = Path(path)
        text = json.dumps(self.to_json(), indent=2) + "\n"
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, text)
        return target

    def __str__(self) -> str:
        """Return the tables of units, memory, settings and problems, at most 100 columns wide."""
        lines = wrap_words(f"FSDP report of the live model: {self._facts()}", _WIDTH)
        if self.batch is not None:
            tokens = f", {self.tokens:,} tokens" if self.tokens else ""
            factors = f" = {self.batch.per_device} per device × {self.batch.accumulation} accumulated"
            factors = f"{factors} × {self.num_data_ranks} data-parallel ranks"
            factors = ", of different sizes by rank" if self.batch.all_ranks else factors
            lines.append(f"effective batch size {self.effective_batch_size}{factors}{tokens}")
        parts = [
            "\n".join(filter(None, [*lines, self.restarts.summary(self.steps_before)])),
            units_table([unit.to_json() for unit in self.units]),
            memory_table(self.ranks, self.memory),
            settings_table(self.settings),
            problem_lines(self.problems, {row.setting for row in self.differing}),
        ]
        for other in self.other_models:
            problems = [each for each in other.problems if each not in self.problems]
            parts += [
                "\n".join(wrap_words(f"other model: {other._facts()}", _WIDTH)),
                units_table([unit.to_json() for unit in other.units]),
                settings_table(other.differing) if other.differing else "",
                problem_lines(problems, {row.setting for row in other.differing}),
            ]
        return "\n\n".join(filter(None, parts))

    def summary(self) -> str:
        """Return what ran, its memory, and every setting that differs: a few lines, at most 100 columns wide."""
        lines = [
            f"FSDP: {self._facts()}",
            memory_line(self.ranks, self.memory),
            training_line(self.training),
            status_line(self.settings, trained=self.training.steps > 0),
            *filter(None, [self.restarts.summary(self.steps_before)]),
            *difference_lines(self.settings, self.problems),
        ]
        for other in self.other_models:
            status = status_line(other.settings, trained=other.training.steps > 0)
            lines.append(f"other model: {other.model_class}, {status}")
            lines += difference_lines(other.settings, [each for each in other.problems if each not in self.problems])
        return "\n".join(wrapped for line in lines for wrapped in wrap_words(line, _WIDTH))

    def _facts(self) -> str:
        """Return model, sizes, backend and mesh."""
        local = _range((row.num_local_params for row in self.ranks), "{:,}".format)
        return (
            f"{self.model_class}, {self.num_params:,} parameters, {local} per rank, "
            f"{plural(len(self.units), 'unit')}; {self.backend}, {self.world_size} × {self.device}, "
            + " × ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        )


def units_table(units: Sequence[JsonObject]) -> str:
    """Format the units. Consecutive units whose names differ only in the number share a row."""
    if not units:
        return "units: none, the model is not sharded"

    def similarity(unit: JsonObject) -> tuple[str, JsonObject]:
        facts = {key: value for key, value in unit.items() if key not in ("name", "num_local_params")}
        facts["fp8_modules"] = re.sub(r"\d+", "#", str(unit["fp8_modules"]))
        return re.sub(r"\d+", "#", unit["name"]), facts

    rows = [("unit", "class", "parameters", "compute", "reduce", "master", "reshard", "")]
    for similar in (list(group) for _, group in groupby(units, similarity)):
        unit = similar[0]
        notes = [name for name in ("checkpointed", "offloaded") if unit[name]]
        if unit["num_frozen"]:
            is_frozen = unit["num_frozen"] == unit["num_params"]
            notes.append("frozen" if is_frozen else f"{unit['num_frozen']:,} frozen")
        if unit["fp8_modules"]:
            notes.append(f"{plural(len(unit['fp8_modules']), 'layer')} in fp8")
        times = f" ×{len(similar)}" if len(similar) > 1 else ""
        name = shorten(common_name([each["name"] for each in similar]) or "(root)", 30)
        class_name = shorten(unit["class"], 30 - len(times)) + times
        dtypes = unit["param_dtype"], unit["reduce_dtype"], unit["master_dtype"]
        reshards = "yes" if unit["reshard_after_forward"] else "no"
        rows.append((name, class_name, f"{unit['num_params']:,}", *dtypes, reshards, ", ".join(notes)))
    return format_table(rows, right={2})


def memory_table(ranks: Sequence[MemoryRow], own: MemoryRow) -> str:
    """Format the memory of all ranks, and the memory that this rank would need under DistributedDataParallel."""
    rows = [("memory per rank", "this run", "data parallel")]
    for title, name in zip(("parameters", "gradients", "optimizer"), HELD, strict=True):
        rows.append((f"  {title}", _range(rank[name] for rank in ranks), format_memory(own[f"ddp_{name}"])))
    rows.append(("  total", _range(rank.held_bytes for rank in ranks), format_memory(own["ddp_bytes"])))
    rows.append((f"  peak ({own['peak_source']})", _range(rank["peak_bytes"] for rank in ranks), ""))
    return format_table(rows, right={1, 2})


def memory_line(ranks: Sequence[MemoryRow], own: MemoryRow) -> str:
    """Return the memory of all ranks as one line."""
    held, peak = _range(rank.held_bytes for rank in ranks), _range(rank.peak_bytes for rank in ranks)
    return (
        f"memory per rank: {held} of parameters, gradients and optimizer state (data parallel: "
        f"{format_memory(own.ddp_bytes)}); peak {peak} ({own.peak_source})"
    )


def training_line(training: Mapping[str, Any]) -> str:
    """Return what the optimizer steps changed as one line."""
    if not training["steps"]:
        return "training: no optimizer step was observed"
    text = f"training: {plural(training['steps'], 'optimizer step')}"
    if training["changed_parameters"] is not None:
        trained = plural(training["trained_parameters"], "trained parameter")
        text += f"; {training['changed_parameters']} of {trained} changed"
        if training["changed_parameters"] and (unchanged := training["unchanged_parameters"]):
            text += f", not {format_names(unchanged, 3)}"
    return text


def status_line(settings: Sequence[JsonObject], *, trained: bool = True) -> str:
    """Return the number of settings of each status, and the names of the settings that differ.

    Args:
        trained: whether an optimizer step was observed. Without one, the absence of differences shows little.
    """
    counts = Counter(row["status"] for row in settings)
    differing = [row["setting"] for row in settings if row["status"] == "differs"]
    text = f"settings: {counts['applied']} applied, {counts['unobservable']} unobservable"
    if differing:
        return f"{text}, {counts['differs']} DIFFER from the requested value: {format_names(differing)}"
    return f"{text}, none differs" if trained else text


def difference_lines(settings: Sequence[JsonObject], problems: Sequence[Problem]) -> list[str]:
    """Return one line for each error, each setting that differs and each warning of the run, at most 10 of each."""
    lines = {}
    for row in settings:
        if row["status"] == "differs":
            asked, observed = format_value(row["asked"]), format_value(row["observed"])
            lines[row["setting"]] = f"DIFFERS  {row['setting']}: {asked} requested, {observed} observed"
    errors = [f"ERROR    {p}" for p in problems if p.severity == "error" and p.setting not in lines]
    warnings = [f"WARNING  {p}" for p in problems if p.code in _OF_RUN]
    return [*truncate_lines(errors, _MAX_LINES), *truncate_lines(lines.values(), _MAX_LINES), *warnings]


def settings_table(settings: Sequence[JsonObject]) -> str:
    """Format the requested and observed value of each setting; unobservable launcher settings share the last line."""
    rows = [("setting", "asked", "observed", "")]
    reasons = {}
    launcher = [row for row in settings if row["status"] == "unobservable" and row["setting"].startswith("launch.")]
    for row in settings:
        if row in launcher:
            continue
        asked = f"auto → {format_value(row['planned'])}" if row["asked"] == "auto" else format_value(row["asked"])
        observed = "?" if row["status"] == "unobservable" else format_value(row["observed"])
        status = "DIFFERS  <<<" if row["status"] == "differs" else row["status"]
        rows.append((row["setting"], shorten(asked, 30), shorten(observed, 28), status))
        if row["status"] != "applied" and row["reason"]:
            reasons[len(rows) - 1] = row["reason"]
    lines = []
    for index, line in enumerate(format_table(rows).split("\n")):
        lines.append(line)
        if index in reasons:
            lines += wrap_words(f"    {reasons[index]}", _WIDTH, "    ")
    if launcher:
        names = ", ".join(row["setting"].removeprefix("launch.") for row in launcher)
        lines += wrap_words(f"used only by the launcher, not observable: {names}", _WIDTH)
    return "\n".join(lines)


def problem_lines(problems: Sequence[Problem], differing: Collection[str]) -> str:
    """Format the errors, the settings that differ and the warnings of the run. Those from before it are counted."""
    warnings = [problem for problem in problems if problem.severity == "warning"]
    shown = [problem for problem in problems if problem.severity == "error"]
    # A setting's last warning is about the live model; earlier ones come from the plan.
    shown += {problem.setting: problem for problem in warnings if problem.setting in differing}.values()
    of_run = [problem for problem in warnings if problem.setting not in differing and problem.code in _OF_RUN]
    shown += of_run
    lines = [line for problem in shown for line in wrap_words(str(problem), _WIDTH)]
    if differing:
        verb = "setting differs" if len(differing) == 1 else "settings differ"
        lines = ["!" * _WIDTH, f"{len(differing)} {verb} from the requested value:", *lines, "!" * _WIDTH]
    num_others = sum(problem.setting not in differing for problem in warnings) - len(of_run)
    if num_others:
        lines.append(f"{plural(num_others, 'other warning')} from before the run: see 'problems' in the report's JSON.")
    return "\n".join(lines)


def _range(counts: Iterable[int], shown: Callable[[int], str] = format_memory) -> str:
    counts = list(counts)
    low, high = shown(min(counts)), shown(max(counts))
    return low if low == high else f"{low} to {high}"
