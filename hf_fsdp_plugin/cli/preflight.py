"""``hf-fsdp check --run``: a tiny clone of the model trains on CPU ranks, through every stage of a run.

The ranks record their stages in a temporary folder (:mod:`hf_fsdp_plugin.integrations.preflight.stages`).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.devices import DEVICES
from hf_fsdp_plugin.integrations.preflight.stages import (
    REPORT_FILE,
    STAGES,
    VARIABLE,
    Options,
    StageResult,
    problems_of,
    read_events,
    running_stages,
    stage_results,
)
from hf_fsdp_plugin.launcher.attempts import run_job
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem, has_errors
from hf_fsdp_plugin.runs.exits import RunResult, first_failure, summarize_exit
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources
from hf_fsdp_plugin.sources.launchers import LaunchHandover, user_variables
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import fit_table, format_count, format_names, plural

_MAX_TAIL: Final = 5
_FAILED: Final = ("failed", "stood still")
_NUM_RANKS: Final = 2
_NUM_HYBRID_RANKS: Final = 4
_MIN_NUM_PARAMS: Final = 10_000
"""Largest ``wrap.min_num_params``: a clone has units of this size, because its layers have some 100,000 parameters."""
_BUILTIN: Final = "hf_fsdp_plugin.integrations.preflight.builtin_script"
_DTYPES: Final = ("launch.mixed_precision", *(f"precision.{name}" for name in ("param", "reduce", "output", "buffer")))
_ONE_MACHINE: Final = {
    "launch.num_machines": 1, "launch.machine_rank": 0, "launch.main_process_ip": "", "launch.gpu_ids": "all",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightResult:
    """The result of a preflight.

    Attributes:
        seconds: time from the start of the ranks to their end.
        model: class and parameters of the model and of its clone.
        signal_number: the signal that stopped it, or 0.
    """

    stages: Sequence[StageResult] = ()
    problems: Sequence[Problem] = ()
    seconds: float = 0.0
    world_size: int = _NUM_RANKS
    model: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    signal_number: int = 0

    @property
    def ok(self) -> bool:
        return not self.signal_number and all(stage.result not in _FAILED for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the object ``run`` of ``check --json``."""
        return {
            "ok": self.ok,
            "seconds": round(self.seconds, 2),
            "world_size": self.world_size,
            "model": dict(self.model) or None,
            "stages": [stage.to_json() for stage in self.stages],
        }


def run_preflight(spec: FsdpSpec, sources: Sources, options: Options, limit_s: float) -> PreflightResult:
    """Run a preflight. Writes to a temporary folder only, and leaves no process.

    Args:
        spec: the spec of `sources`, without errors.
        limit_s: seconds until the ranks are stopped.
    """
    overrides, changes = overrides_for_cpu(spec)
    size = _world_size(spec)
    launch = replace(spec.launch, use_cpu=True, num_machines=1, machine_rank=0, num_processes=size)
    launch = replace(launch, dynamo_config=MappingProxyType({}), main_process_port=0, enable_cpu_affinity=False)
    if launch.mixed_precision == "fp16":
        launch = replace(launch, mixed_precision="bf16")
    world = World(device="cpu", num_machines=1, machine_rank=0, num_local=size)
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_preflight_", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        options = replace(options, folder=str(folder))
        sources = replace(
            sources,
            config=_as_file(sources.config, Path(scratch)),
            overrides=(*sources.overrides, *overrides),
            training_arguments={},
            world_size=None,
            environ=user_variables(os.environ),
        )
        handover = LaunchHandover(sources=sources, report=str(folder / REPORT_FILE))
        env = {VARIABLE: options.to_text(), "TMPDIR": scratch, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        # Accelerators are hidden, so that a script cannot take them.
        env |= {device.visible_variable: "" for device in DEVICES.values() if device.visible_variable}
        began, limit = time.monotonic(), _Limit(limit_s, folder)
        words = list(options.script) or ["-m", _BUILTIN]
        try:
            result = run_job(words, replace(spec, launch=launch), world, handover, env=env, should_stop=limit.reached)
        finally:
            limit.close()
        seconds = time.monotonic() - began
        preflight = _read(result, limit.reason, folder)
    return replace(preflight, seconds=seconds, world_size=size, problems=(*changes, *preflight.problems))


def _as_file(config: Any, scratch: Path) -> Any:
    """Return a config that the ranks can read: text from stdin is written to a temporary file."""
    if not isinstance(config, ConfigFile) or config.data is None:
        return config
    path = scratch / "config.yaml"
    path.write_bytes(config.data)
    return replace(config, path=path)


def overrides_for_cpu(spec: FsdpSpec) -> tuple[list[str], list[Problem]]:
    """Return values of ``--set`` for a small world of CPU ranks, and notes on settings of the user that they change."""
    size = _world_size(spec)
    mesh = spec.mesh
    values: dict[str, Any] = {"launch.use_cpu": "true", "launch.num_processes": size}
    if spec.asked("mesh.shard") or spec.asked("mesh.replicate") or size == _NUM_HYBRID_RANKS:
        replicas = 2 if size == _NUM_HYBRID_RANKS or mesh.shard == 1 else 1
        values |= {"mesh.shard": size // replicas, "mesh.replicate": replicas}
    values |= {name: value for name, value in _ONE_MACHINE.items() if spec.asked(name)}
    values |= {name: "bf16" for name in _DTYPES if spec.get(name) == "fp16"}
    if spec.wrap.policy == "size":
        values["wrap.min_num_params"] = min(spec.wrap.min_num_params, _MIN_NUM_PARAMS)
    notes = [
        Problem(
            code="FSDP-N757",
            setting=name,
            origin=spec.origin(name),
            message=f"the preflight has {value or 'no value'} instead of {spec.get(name)}.",
        )
        for name, value in values.items()
        if name not in ("launch.use_cpu", "launch.gpu_ids")
        and spec.asked(name)
        and str(spec.get(name)).lower() != str(value)
    ]
    if spec.launch.dynamo_config:
        notes.append(Problem(code="FSDP-W756", message="not tested: torch.compile (dynamo_config)."))
    return [f"{name}={value}" for name, value in values.items() if value != ""], notes


def _world_size(spec: FsdpSpec) -> int:
    """Return two ranks, or four if the mesh has two axes."""
    mesh = spec.mesh
    has_replicas = mesh.replicate not in ("auto", 1) and mesh.shard != 1
    is_hybrid = STRATEGIES[spec.sharding.strategy].hybrid or has_replicas
    return _NUM_HYBRID_RANKS if is_hybrid else _NUM_RANKS


class _Limit:
    """Ends a run that takes too long, and shows its stage on a terminal."""

    def __init__(self, limit: float, folder: Path) -> None:
        self._limit, self._folder = limit, folder
        self._began, self._shown = time.monotonic(), ""
        self.reason = ""

    def close(self) -> None:
        self._show("")

    def reached(self) -> str | None:
        """Return why the ranks are stopped; ``None`` if they are not."""
        running = running_stages(read_events(self._folder))
        self._show(f"preflight: {running[0]} …" if running and running[0] else "")
        if time.monotonic() - self._began > self._limit:
            self.reason = f"{self._limit:g} s (--limit)"
        return self.reason or None

    def _show(self, text: str) -> None:
        if text != self._shown and sys.stderr.isatty():
            self._shown = text
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _read(result: RunResult, reason: str, folder: Path) -> PreflightResult:
    """Return the result of the preflight, read from the records of the ranks. ``reason``: why they were stopped."""
    events = read_events(folder)
    stages, problems = stage_results(events, stopped=bool(reason)), problems_of(events)
    running, first = running_stages(events), first_failure(result.exits)
    if first is not None and first.tail:
        problems = [_with_reason(problem, first.tail[-1]) for problem in problems]
    if reason:
        places = [f"rank {rank} in the stage '{stage}'" for rank, stage in enumerate(running) if stage is not None]
        message = f"the preflight was stopped after {reason}: {format_names(places) or 'the ranks had not started'}."
        fix = "If the ranks are in different stages, make all of them run the same collective calls. Give slow data "
        fix += "processing more time with --limit."
        problems.append(Problem(code="FSDP-E755", message=message, fix=fix))
    elif first is not None and not result.signal_number and not has_errors(problems):
        stage = next((stage for stage in running if stage is not None), "start")
        message = f"rank {first.rank} failed in the stage '{stage}': {summarize_exit(first)}"
        message += "".join(f"\n  | {line}" for line in first.tail[-_MAX_TAIL:])
        problems.append(Problem(code="FSDP-E750", message=message))
        stages = [replace(each, result="failed", reason="") if each.stage == stage else each for each in stages]
    model = next((event for of_rank in events for event in of_rank if event["event"] == "model"), {})
    model = {key: model[key] for key in ("name", "num_params", "real_num_params") if key in model}
    return PreflightResult(stages=stages, problems=problems, model=model, signal_number=result.signal_number)


def _with_reason(problem: Problem, last_line: str) -> Problem:
    """Add the last line of stderr to an exit of the script, such as argparse's, which has no other message."""
    return replace(problem, message=f"{problem.message}: {last_line}") if "SystemExit" in problem.message else problem


def stage_table(preflight: PreflightResult) -> str:
    """Return the table of stages, with colors on a terminal, and one line with the result."""
    rows = [("stage", "result", "seconds", "")]
    for stage in preflight.stages:
        seconds = f"{stage.seconds:.1f}" if stage.seconds else ""
        rows.append((stage.stage, stage.result, seconds, stage.reason or STAGES[stage.stage]))
    head, *lines = fit_table(rows, text_width()).split("\n")
    colors: dict[str, Color] = {**dict.fromkeys(_FAILED, "red"), "not tested": "dim"}
    shown = [
        colored(line, colors[stage.result]) if stage.result in colors else line
        for line, stage in zip(lines, preflight.stages, strict=False)
    ]
    return "\n".join([colored(head, "bold"), *shown, "", _summary(preflight)])


def _summary(preflight: PreflightResult) -> str:
    if preflight.signal_number:
        return f"preflight: stopped by {signal.Signals(preflight.signal_number).name}"
    failed = [stage.stage for stage in preflight.stages if stage.result in _FAILED]
    result = colored(f"failed: {format_names(failed)}", "red") if failed else colored("passed", "green")
    ran = plural(preflight.world_size, "CPU rank")
    if model := preflight.model:
        sizes = f"{format_count(model['num_params'])} of {format_count(model['real_num_params'])} parameters"
        ran += f" of a clone of {model['name']} with {sizes}"
    return f"preflight: {result} ({ran} in {preflight.seconds:.0f} s)"
