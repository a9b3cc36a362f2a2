"""``hf-fsdp check --run``: its arguments, and a tiny clone that trains on CPU ranks, through every stage of a run.

Each rank records its stages in a file of a temporary folder (:mod:`hf_fsdp_plugin.tools.preflight.stages`).
``check`` imports this module at its start, so what only a run needs is imported in the functions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.cli.output import Color, colored
from hf_fsdp_plugin.launcher.flags import Parser, why_refused
from hf_fsdp_plugin.problems import Problem, UsageError, has_errors
from hf_fsdp_plugin.sources.command_line import flag_name
from hf_fsdp_plugin.sources.environment_variables import variables_without_torchrun
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import read_settings
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_names, plural
from hf_fsdp_plugin.tools.common import colored_table, run_job

if TYPE_CHECKING:
    from hf_fsdp_plugin.runs.failures import AttemptResult
    from hf_fsdp_plugin.tools.preflight import stages

RUN_FLAG: Final = "--run"
DEFAULT_LIMIT: Final = 240.0
"""Seconds until the ranks of a preflight are stopped."""
_FILE_SUFFIXES: Final = (".yaml", ".yml", ".json", ".py")
"""Endings of words that are more likely CONFIG or a script than the value of a flag."""
_MAX_TAIL: Final = 5
_FAILED: Final = ("failed", "stood still")
_NUM_RANKS: Final = 2
_NUM_HYBRID_RANKS: Final = 4
_MIN_NUM_PARAMS: Final = 10_000
"""Largest ``wrap.min_num_params``: a clone has units of this size, because its layers have some 100,000 parameters."""
_BUILTIN: Final = "hf_fsdp_plugin.tools.preflight"
_DTYPES: Final = ("launch.mixed_precision", *(f"precision.{name}" for name in ("param", "reduce", "output", "buffer")))
_ONE_MACHINE: Final = {
    "launch.num_machines": 1, "launch.machine_rank": 0, "launch.main_process_ip": "", "launch.gpu_ids": "all",
}  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--run`` and its options to the arguments of ``check``."""
    about = "also train a tiny clone of the model on CPU ranks: prepare, step, clip, evaluate, save, resume, export"
    parser.add_argument("--run", action="store_true", help=about)
    about = f"with --run: stop the ranks after this time (default: {DEFAULT_LIMIT:g})"
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT, metavar="SECONDS", help=about)


def split_run_words(argv: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Return the words of ``check`` and of settings, and those of ``TrainingArguments``.

    A flag that neither ``check`` nor ``launch`` has belongs to ``TrainingArguments``, with the words up to the next
    flag.

    Args:
        parser: the parser of ``check``.

    Raises:
        UsageError: a script is given.
    """
    words, training = list(argv), []
    checked: list[str] = []
    while words:
        word = words.pop(0)
        written, equals, _ = word.partition("=")
        action = parser.find(written)
        if word == "-m" or word.endswith(".py"):
            given = " ".join([word, *words[: word == "-m"]])
            raise UsageError(
                f"check --run runs a script of its own, and not {given}. Pass --model DIR|ID and arguments of "
                "TrainingArguments; test your script with a short run of hf-fsdp launch."
            )
        if not word.startswith("--"):
            checked.append(word)
        elif action is not None or why_refused(flag_name(written)):
            checked.append(word)
            takes_value = not equals and action is not None and action.nargs != 0
            if takes_value and words and not words[0].startswith("--"):
                checked.append(words.pop(0))
        else:
            training.append(word)
            while not equals and words and not words[0].startswith("--") and not words[0].endswith(_FILE_SUFFIXES):
                training.append(words.pop(0))
    return checked, training


def options_of(args: argparse.Namespace) -> stages.Options:
    """Return the options of a preflight. ``--fsdp`` and ``--fsdp-config`` belong to ``TrainingArguments`` too."""
    from hf_fsdp_plugin.tools.preflight import stages

    given = {name: value for name in ("fsdp", "fsdp_config") if (value := getattr(args, name)) is not None}
    return stages.Options(
        model=args.model,
        arguments=[*(word for name, value in given.items() for word in (f"--{name}", str(value))), *args.training],
    )


def check_run_usage(args: argparse.Namespace, num_configs: int) -> None:
    """Raise ``UsageError`` if the usage of ``--run`` is wrong."""
    if num_configs != 1 or args.distributed_config:
        raise UsageError("--run needs one config, and does not combine with --distributed-config.")
    if not args.model:
        raise UsageError("--run needs --model DIR|ID.")
    if not args.limit > 0:
        raise UsageError(f"--limit is {args.limit:g}; expected a positive number of seconds.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightResult:
    """The result of a preflight.

    Attributes:
        tree: the object ``run`` of ``check --json``.
        signal_number: the signal that stopped it, or 0.
    """

    tree: dict[str, Any]
    problems: Sequence[Problem]
    signal_number: int


def run_preflight(spec: FsdpSpec, sources: Sources, options: stages.Options, limit_s: float) -> PreflightResult:
    """Run a preflight. Writes to a temporary folder only, and leaves no process.

    Args:
        spec: the spec of `sources`, without errors.
        limit_s: seconds until the ranks are stopped.
    """
    import tempfile

    from hf_fsdp_plugin.devices import DEVICES
    from hf_fsdp_plugin.launcher.world import World
    from hf_fsdp_plugin.tools.preflight import stages

    overrides, changes = overrides_for_cpu(spec)
    size = _world_size(spec)
    precision = "bf16" if spec.launch.mixed_precision == "fp16" else spec.launch.mixed_precision
    launch = replace(
        spec.launch, mixed_precision=precision, dynamo_config=MappingProxyType({}), enable_cpu_affinity=False
    )
    world = World(device="cpu", num_machines=1, machine_rank=0, num_local=size)
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_preflight_", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        sources = replace(
            sources,
            overrides=(*sources.overrides, *overrides),
            training_arguments={},
            world_size=None,
            environ=variables_without_torchrun(os.environ),
        )
        handover = LaunchHandover(given=tuple(read_settings(sources)), report=str(folder / stages.REPORT_FILE))
        env = {"TMPDIR": scratch, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        env[stages.VARIABLE] = json.dumps(asdict(replace(options, folder=str(folder))))
        # Accelerators are hidden, so that libraries cannot take them.
        env |= {device.visible_variable: "" for device in DEVICES.values() if device.visible_variable}
        began = time.monotonic()
        run = run_job(
            ["-m", _BUILTIN], replace(spec, launch=launch), world, handover, env=env,
            should_stop=lambda: f"{limit_s:g} s (--limit)" if time.monotonic() - began > limit_s else None,
        )  # fmt: skip
        seconds = time.monotonic() - began
        records = stages.read_records(folder)
    rows, problems = _read_results(run, records)
    tree = {
        "ok": not run.signal_number and all(row["result"] not in _FAILED for row in rows),
        "seconds": round(seconds, 2),
        "world_size": size,
        "model": next((record.model for record in records if record.model), None),
        "stages": rows,
    }
    return PreflightResult(tree=tree, problems=(*changes, *problems), signal_number=run.signal_number)


def overrides_for_cpu(spec: FsdpSpec) -> tuple[list[str], list[Problem]]:
    """Return values of ``--set`` for a small world of CPU ranks, and notes on settings of the user that they change."""
    size = _world_size(spec)
    mesh = spec.mesh
    values: dict[str, Any] = {"launch.use_cpu": "true", "launch.num_processes": size}
    if spec.asked("mesh.shard") or spec.asked("mesh.replicate") or size == _NUM_HYBRID_RANKS:
        replicas = 2 if size == _NUM_HYBRID_RANKS or mesh.shard == 1 else 1
        values |= {"mesh.shard": size // replicas, "mesh.replicate": replicas}
    values |= {f"mesh.{axis}": 1 for axis in MODEL_AXES if spec.asked(f"mesh.{axis}")}
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


def _read_results(
    run: AttemptResult, records: Sequence[stages.PreflightRecord]
) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Return the results of the stages and the problems, from the records of the ranks and how these exited."""
    from hf_fsdp_plugin.runs.failures import first_failure, summarize_exit
    from hf_fsdp_plugin.tools.preflight import stages

    stopped = run.remote_failure  # why the launcher has stopped the ranks
    rows, problems = stages.stage_results(records, stopped=bool(stopped)), stages.problems_of(records)
    first = first_failure(run.exits)
    running = {rank: record.running for rank, record in enumerate(records) if record.running}
    if stopped:
        places = [f"rank {rank} in the stage '{stage}'" for rank, stage in running.items()]
        message = f"the preflight was stopped after {stopped}: {format_names(places) or 'the ranks had not started'}."
        fix = "Give a slow machine more time with --limit."
        problems.append(Problem(code="FSDP-E755", message=message, fix=fix))
    elif first is not None and not run.signal_number and not has_errors(problems):
        stage = next(iter(running.values()), "start")
        message = f"rank {first.rank} failed in the stage '{stage}': {summarize_exit(first)}"
        message += "".join(f"\n  | {line}" for line in first.tail[-_MAX_TAIL:])
        problems.append(Problem(code="FSDP-E750", message=message))
        rows = [{**row, "result": "failed", "reason": None} if row["stage"] == stage else row for row in rows]
    return rows, problems


def stage_table(preflight: PreflightResult) -> str:
    """Return the table of stages, with colors on a terminal, and one line with the result."""
    from hf_fsdp_plugin.tools.preflight import stages

    rows = preflight.tree["stages"]
    cells = [("stage", "result", "seconds", "")]
    for row in rows:
        seconds = f"{row['seconds']:.1f}" if row["seconds"] else ""
        cells.append((row["stage"], row["result"], seconds, row["reason"] or stages.STAGES[row["stage"]]))
    colors: dict[str, Color] = {**dict.fromkeys(_FAILED, "red"), "not tested": "dim"}
    table = colored_table(cells, [colors.get(row["result"]) for row in rows])
    return f"{table}\n\n{_summary(preflight)}"


def _summary(preflight: PreflightResult) -> str:
    if preflight.signal_number:
        return f"preflight: stopped by {signal.Signals(preflight.signal_number).name}"
    tree = preflight.tree
    failed = [row["stage"] for row in tree["stages"] if row["result"] in _FAILED]
    result = colored(f"failed: {format_names(failed)}", "red") if failed else colored("passed", "green")
    ran = plural(tree["world_size"], "CPU rank")
    if model := tree["model"]:
        sizes = f"{format_count(model['num_params'])} of {format_count(model['real_num_params'])} parameters"
        ran += f" of a clone of {model['name']} with {sizes}"
    return f"preflight: {result} ({ran} in {tree['seconds']:.0f} s)"
