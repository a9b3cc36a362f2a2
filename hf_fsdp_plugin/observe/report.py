"""The report, and its output as JSON, file and text."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.observe.memory import MemoryObservation
from hf_fsdp_plugin.observe.settings import SettingObservation
from hf_fsdp_plugin.observe.tables import (
    difference_lines,
    memory_line,
    memory_table,
    problem_lines,
    settings_table,
    status_line,
    units_table,
    wrap,
)
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.restart_policy import Restarts
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.version import SCHEMA_VERSION


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
            with target.open("w", encoding="utf-8") as stream:
                stream.write(text)
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
        parts = [
            self._header(),
            units_table(self.units),
            memory_table([row.memory for row in self.ranks], self.memory),
            settings_table(self.settings),
            problem_lines(self.problems, {row.setting for row in self.differing}),
            *(other._as_other_model(self) for other in self.other_models),
        ]
        return "\n\n".join(part for part in parts if part)

    def summary(self) -> str:
        """Return what ran, its memory, and every setting that differs: a few lines, at most 100 columns wide."""
        local = max(row.num_local_params for row in self.ranks)
        lines = [
            f"FSDP: {self.model_class}, {self.num_params:,} parameters, {local:,} per rank, "
            f"{plural(len(self.units), 'unit')}; {self.backend}, {self.world_size} × {self.device}, "
            f"replicate {self.mesh['replicate']} × shard {self.mesh['shard']}",
            memory_line([row.memory for row in self.ranks], self.memory),
            self.training.line(),
            status_line(self.settings, trained=self.training.steps > 0),
            *([restarts] if (restarts := self.restarts.summary(self.steps_before)) else []),
            *difference_lines(self.settings, self.problems),
        ]
        for other in self.other_models:
            status = status_line(other.settings, trained=other.training.steps > 0)
            lines.append(f"other model: {other.model_class}, {status}")
            lines += difference_lines(other.settings, [p for p in other.problems if p not in self.problems])
        return "\n".join(map(wrap, lines))

    def _as_other_model(self, trained: Report) -> str:
        """Return the tables of units, differing settings and problems that the report of ``trained`` lacks."""
        problems = [problem for problem in self.problems if problem not in trained.problems]
        parts = [
            f"other model: {self._header()}",
            units_table(self.units),
            settings_table(self.differing) if self.differing else "",
            problem_lines(problems, {row.setting for row in self.differing}),
        ]
        return "\n\n".join(part for part in parts if part)

    def _header(self) -> str:
        local = [row.num_local_params for row in self.ranks]
        each = f"{min(local):,}" if min(local) == max(local) else f"{min(local):,} to {max(local):,}"
        share = sum(local) / len(local) / self.num_params if self.num_params else 0.0
        lines = [
            f"FSDP report of the live model: {self.backend}, {self.world_size} × {self.device}, "
            f"mesh: replicate {self.mesh['replicate']} × shard {self.mesh['shard']}",
            f"{self.model_class}: {self.num_params:,} parameters, {each} on each rank ({share:.1%})",
        ]
        if self.batch is not None:
            tokens = f", {self.tokens:,} tokens" if self.tokens else ""
            lines.append(
                f"effective batch size {self.effective_batch_size} = {self.batch.per_device} per device × "
                f"{self.batch.accumulation} accumulated × {self.num_data_ranks} data-parallel ranks{tokens}"
            )
        if restarts := self.restarts.summary(self.steps_before):
            lines.append(restarts)
        return "\n".join(lines)
