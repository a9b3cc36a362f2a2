"""The report, and its output as JSON, file and text. The tables of the text are at most 100 columns wide."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.observe.memory import MemoryObservation
from hf_fsdp_plugin.observe.settings import SettingObservation, format_value
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.plan.names import common_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restart_policy import Restarts
from hf_fsdp_plugin.text import format_memory, format_names, format_table, plural, shorten, truncate_lines
from hf_fsdp_plugin.version import SCHEMA_VERSION

_WIDTH = 100
_MAX_LINES = 10
_OF_RUN = ("FSDP-W505", "FSDP-W511", "FSDP-W512", "FSDP-W516")
"""Warnings about the trained model that are printed nowhere else."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The input of one optimizer step on one rank.

    Attributes:
        per_device: sequences per forward.
        accumulation: forwards per optimizer step.
        seq_len: tokens per sequence; ``None`` if unknown.
    """

    per_device: int
    accumulation: int = 1
    seq_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankObservation:
    """Sizes on one rank: parameters in elements, memory in bytes.

    Attributes:
        weights_changed: whether trained weights have changed since the first optimizer step; ``None`` if no step with a
            learning rate above 0 was recorded.
    """

    rank: int
    host: str
    device: str
    num_local_params: int
    memory: MemoryObservation
    weights_changed: bool | None = None

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "memory"}
        return {**own, **self.memory.to_json()}


@dataclass(frozen=True, kw_only=True)
class TrainingObservation:
    """What the optimizer steps of this process changed.

    Attributes:
        steps: number of optimizer steps that were observed.
        examined_steps: number of them after which the weights were compared with those before the first one.
        changed_parameters: number of parameters whose weights differed then or at the end of the run; ``None`` if no
            step with a learning rate above 0 was observed.
        trained_parameters: number of parameters that required a gradient in the first step; ``None`` likewise.
    """

    steps: int = 0
    examined_steps: int = 0
    changed_parameters: int | None = None
    trained_parameters: int | None = None

    def line(self) -> str:
        """Return one line of the summary."""
        if not self.steps:
            return "training: no optimizer step was observed"
        text = f"training: {plural(self.steps, 'optimizer step')}"
        if self.changed_parameters is not None:
            trained = plural(self.trained_parameters or 0, "trained parameter")
            text += f"; {self.changed_parameters} of {trained} changed"
        return text


@dataclass(frozen=True, kw_only=True)
class Report:
    """The live model compared with the plan. It is the same on all ranks, except for ``units`` and ``memory``.

    Attributes:
        num_params: number of elements of the whole model.
        ranks: one entry per rank.
        problems: the plan's warnings and notes, then the problems of the live model.
        batch: the input of one step; ``None`` if unknown.
        other_models: the reports of the run's other models, such as a second trained one or a reference model.
        restarts: the failed attempts of the run.
        training: what the optimizer steps changed.
        steps_before: optimizer steps of the run that the checkpoint contained from which the last attempt has resumed.
    """

    backend: str
    model_class: str
    world_size: int
    mesh: dict[str, int]
    device: str
    units: tuple[UnitObservation, ...]
    num_params: int
    settings: tuple[SettingObservation, ...]
    memory: MemoryObservation
    ranks: tuple[RankObservation, ...]
    problems: tuple[Problem, ...]
    batch: BatchShape | None
    versions: dict[str, str]
    other_models: tuple[Report, ...] = ()
    restarts: Restarts = field(default_factory=Restarts)
    steps_before: int = 0
    training: TrainingObservation = field(default_factory=TrainingObservation)

    @property
    def differing(self) -> tuple[SettingObservation, ...]:
        return tuple(row for row in self.settings if row.status == "differs")

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read different samples. Tensor-parallel ranks outside the mesh read the same samples."""
        return self.mesh["replicate"] * self.mesh["shard"]

    @property
    def effective_batch_size(self) -> int:
        """Sequences per optimizer step; 0 if unknown."""
        return self.batch.per_device * self.batch.accumulation * self.num_data_ranks if self.batch else 0

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step; 0 if unknown."""
        return self.effective_batch_size * (self.batch.seq_len or 0) if self.batch else 0

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``fsdp_report.json``. ``docs/json.schema.json`` describes it as ``report``."""
        return {
            "schema_version": SCHEMA_VERSION,
            **self._model_json(),
            "world_size": self.world_size,
            "device": self.device,
            "ranks": [row.to_json() for row in self.ranks],
            "effective_batch_size": self.effective_batch_size,
            "tokens": self.tokens,
            "versions": self.versions,
            "other_models": [other._model_json() for other in self.other_models],
            "restarts": self.restarts.to_report(self.steps_before),
        }

    def _model_json(self) -> dict[str, Any]:
        """Return the part of the JSON that depends on the model."""
        return {
            "backend": self.backend,
            "model_class": self.model_class,
            "mesh": self.mesh,
            "num_params": self.num_params,
            "units": [unit.to_json() for unit in self.units],
            "settings": [row.to_json() for row in self.settings],
            "memory": self.memory.to_json(),
            "training": asdict(self.training),
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
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def __str__(self) -> str:
        """Return the tables of units, memory, settings and problems, at most 100 columns wide."""
        lines = _wrap(f"FSDP report of the live model: {self._facts()}")
        if self.batch is not None:
            tokens = f", {self.tokens:,} tokens" if self.tokens else ""
            lines.append(
                f"effective batch size {self.effective_batch_size} = {self.batch.per_device} per device × "
                f"{self.batch.accumulation} accumulated × {self.num_data_ranks} data-parallel ranks{tokens}"
            )
        parts = [
            "\n".join(filter(None, [*lines, self.restarts.summary(self.steps_before)])),
            units_table(self.units),
            memory_table([row.memory for row in self.ranks], self.memory),
            settings_table(self.settings),
            problem_lines(self.problems, {row.setting for row in self.differing}),
        ]
        for other in self.other_models:
            problems = [problem for problem in other.problems if problem not in self.problems]
            parts += [
                "\n".join(_wrap(f"other model: {other._facts()}")),
                units_table(other.units),
                settings_table(other.differing) if other.differing else "",
                problem_lines(problems, {row.setting for row in other.differing}),
            ]
        return "\n\n".join(filter(None, parts))

    def summary(self) -> str:
        """Return what ran, its memory, and every setting that differs: a few lines, at most 100 columns wide."""
        lines = [
            f"FSDP: {self._facts()}",
            memory_line([row.memory for row in self.ranks], self.memory),
            self.training.line(),
            status_line(self.settings, trained=self.training.steps > 0),
            *filter(None, [self.restarts.summary(self.steps_before)]),
            *difference_lines(self.settings, self.problems),
        ]
        for other in self.other_models:
            status = status_line(other.settings, trained=other.training.steps > 0)
            lines.append(f"other model: {other.model_class}, {status}")
            lines += difference_lines(other.settings, [p for p in other.problems if p not in self.problems])
        return "\n".join(wrapped for line in lines for wrapped in _wrap(line))

    def _facts(self) -> str:
        """Return model, sizes, backend and mesh."""
        low, high = (f"{limit(row.num_local_params for row in self.ranks):,}" for limit in (min, max))
        local, units = low if low == high else f"{low} to {high}", plural(len(self.units), "unit")
        return (
            f"{self.model_class}, {self.num_params:,} parameters, {local} per rank, {units}; {self.backend}, "
            f"{self.world_size} × {self.device}, replicate {self.mesh['replicate']} × shard {self.mesh['shard']}"
        )


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
        name = shorten(common_name([each.name for each in similar]) or "(root)", 30)
        class_name = shorten(unit.class_name, 30 - len(times)) + times
        dtypes = unit.param_dtype, unit.reduce_dtype, unit.master_dtype
        reshards = "yes" if unit.reshard_after_forward else "no"
        rows.append((name, class_name, f"{unit.num_params:,}", *dtypes, reshards, ", ".join(notes)))
    return format_table(rows, right={2})


def _similarity_key(unit: UnitObservation) -> tuple[object, ...]:
    """Return a key that is equal for units whose names differ only in the number."""
    facts = {key: value for key, value in unit.to_json().items() if key not in ("name", "num_local_params")}
    return re.sub(r"\d+", "#", unit.name), *facts.values()


def memory_table(ranks: Sequence[MemoryObservation], own: MemoryObservation) -> str:
    """Format the memory of all ranks, and the memory that this rank would need under DistributedDataParallel."""
    rows = [
        ("memory per rank", "this run", "data parallel"),
        ("  parameters", _range(m.params_bytes for m in ranks), format_memory(own.ddp_params_bytes)),
        ("  gradients", _range(m.grads_bytes for m in ranks), format_memory(own.ddp_grads_bytes)),
        ("  optimizer", _range(m.optimizer_bytes for m in ranks), format_memory(own.ddp_optimizer_bytes)),
        ("  total", _range(m.held_bytes for m in ranks), format_memory(own.ddp_bytes)),
        (f"  peak ({own.peak_source})", _range(m.peak_bytes for m in ranks), ""),
    ]
    return format_table(rows, right={1, 2})


def memory_line(ranks: Sequence[MemoryObservation], own: MemoryObservation) -> str:
    """Return the memory of all ranks as one line."""
    held, peak = _range(m.held_bytes for m in ranks), _range(m.peak_bytes for m in ranks)
    return (
        f"memory per rank: {held} of parameters, gradients and optimizer state (data parallel: "
        f"{format_memory(own.ddp_bytes)}); peak {peak} ({own.peak_source})"
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
    lines = {}
    for row in settings:
        if row.status == "differs":
            asked, observed = format_value(row.asked), format_value(row.observed)
            lines[row.setting] = f"DIFFERS  {row.setting}: {asked} requested, {observed} observed"
    errors = [f"ERROR    {p}" for p in problems if p.severity == "error" and p.setting not in lines]
    warnings = [f"WARNING  {p}" for p in problems if p.code in _OF_RUN]
    return [*truncate_lines(errors, _MAX_LINES), *truncate_lines(lines.values(), _MAX_LINES), *warnings]


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


def _range(counts: Iterable[int]) -> str:
    counts = list(counts)
    low, high = format_memory(min(counts)), format_memory(max(counts))
    return low if low == high else f"{low} to {high}"
