"""``hf-fsdp bench``: Measure throughput, memory and scaling of a model over numbers of ranks, strategies and FSDP
versions.

Examples::

    hf-fsdp bench --model meta-llama/Llama-3.1-8B --world-sizes 1,2,4,8 --mixed_precision bf16 --json > bench.json
    hf-fsdp bench --model . --strategies full_shard --versions 1,2 --vs stock --blocks 20
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_failure, print_problems, print_result
from hf_fsdp_plugin.host_memory import available_memory
from hf_fsdp_plugin.launcher.flags import Parser, add_override_flag, add_setting_flags
from hf_fsdp_plugin.launcher.world import FoundDevices, World, find_devices, num_cores, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError, UsageError, has_errors
from hf_fsdp_plugin.rank_variables import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.runs.failures import AttemptResult, summarize_exit
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.environment_variables import variables_without_torchrun
from hf_fsdp_plugin.sources.handover import LaunchHandover
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import add_settings, combine, read_settings
from hf_fsdp_plugin.text import format_memory
from hf_fsdp_plugin.tools.bench import cases as bench
from hf_fsdp_plugin.tools.bench.cases import Case, CaseGroup, Results, bench_text
from hf_fsdp_plugin.tools.check.output import load_meta_model
from hf_fsdp_plugin.tools.common import run_job, whole_number
from hf_fsdp_plugin.tools.convert.conversion import print_conversion, with_converted_config
from hf_fsdp_plugin.tools.plan.verb import sequence_length

_DEFAULTS: Final = {"wrap.policy": "transformer", "prefetch.backward": "pre"}
"""Settings of all cases, unless a source sets them."""
_LIBRARIES: Final = 450_000_000
"""Resident bytes of a rank with torch, Transformers and Accelerate, before the model; measured with torch 2.13."""
_RANK: Final = "hf_fsdp_plugin.tools.bench.rank"
_MAX_ERROR: Final = 1000


def add_arguments(parser: Parser) -> None:
    """Add the flags of this verb, and those that set FSDP."""
    number = whole_number(1)
    parser.add_argument("--model", metavar="DIR|ID", help="folder with a config.json, or a model id")
    parser.add_argument("--config-file", "--config", metavar="CONFIG", help="Accelerate YAML or JSON of other settings")
    add_override_flag(parser)
    what = parser.add_argument_group("cases, each a list with commas")
    lists: tuple[tuple[str, str, Callable[[str], Any], str, str], ...] = (
        ("world-sizes", "N,…", number, "2", "numbers of ranks (default: 2)"),
        ("strategies", "S,…", _one_of(*bench.TITLES), "ddp,shard_grad_op,full_shard", f"of {', '.join(bench.TITLES)}"),
        ("versions", "V,…", _one_of("1", "2"), "2", "FSDP versions (default: 2)"),
    )
    for flag, metavar, parse, default, about in lists:
        what.add_argument(f"--{flag}", metavar=metavar, type=_list_of(parse), default=default, help=about)
    what.add_argument("--vs", choices=["stock"], default="", help="also run the same settings by stock Accelerate")
    how = parser.add_argument_group("measurement")
    for name, (value, text) in bench.WORKLOAD.items():
        flag = f"--{name.replace('_', '-')}"
        how.add_argument(flag, metavar="N", type=number, default=value, help=f"{text} (default: {value})")
    out = parser.add_argument_group("output")
    out.add_argument("--force", action="store_true", help="run cases that do not fit into CPU memory")
    out.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    add_setting_flags(parser)
    parser.epilog = "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --cpu, …"


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0 if every case that fits was measured, else 1; 130 after Ctrl-C."""
    if args.model is None:
        raise UsageError("give --model.")
    problems: list[Problem] = []
    try:
        given, spec = _settings(args, problems)
        model = load_meta_model(args.model)
        if has_errors(problems):
            raise SpecError(problems)
        found = find_devices()
        worlds = _find_worlds(args.world_sizes, spec, found, problems)
        _, too_long = sequence_length(args, model)  # type: ignore[arg-type]
        problems += [too_long] if too_long is not None else []
        if has_errors(problems):
            raise SpecError(problems)
        device = next(iter(worlds.values())).device
        folder = Path(args.model).expanduser()
        name = str(folder.absolute()) if folder.exists() else args.model
        num_params = sum(parameter.numel() for parameter in model.parameters())
        threads = 1 if device == "cpu" else max(1, num_cores() // max(args.world_sizes))
        head: dict[str, Any] = {
            "model": {"name": name, "class": type(model).__name__, "num_params": num_params},
            "device": {"type": device, "name": found.name or None},
            "threads": int(os.environ.get("OMP_NUM_THREADS") or threads),
            "workload": {number: getattr(args, number) for number in bench.WORKLOAD},
            "settings": {setting: str(value) for setting, value, _ in spec.settings() if spec.asked(setting)},
        }
        cases = [
            Case(world_size=world_size, strategy=strategy, version=int(version))
            for world_size in worlds
            for strategy in dict.fromkeys(args.strategies)
            for version in (dict.fromkeys(args.versions) if strategy != bench.DDP else (0,))
        ]
        groups = _with_stock(cases, spec, device, problems) if args.vs else [(case,) for case in cases]
        results = Results([case for group in groups for case in group])
        _leave_out(groups, num_params, results, problems, force=args.force)
    except SpecError as error:
        return print_failure(dict.fromkeys([*problems, *error.problems]), as_json=args.json)
    if not args.json:
        print_problems(problems)
    job = bench.WorldJob(model=name, device=device, threads=head["threads"], workload=head["workload"], groups=groups)
    number = run_worlds(job, worlds, results, LaunchHandover(given=given, quiet=True), spec)
    tree = results.to_json(head)
    fix = "The other cases are measured. Run this case again with other settings, or alone."
    failed = [
        Problem(code="FSDP-E786", message=f"{row['case']}: {row['reason'].rstrip('.')}.", fix=fix)
        for row in tree["cases"]
        if row["status"] == "failed"
    ]
    if not args.json:
        print_problems(failed)
    print_result(args, {**tree, "problems": [*problems, *failed]}, bench_text(tree))
    if number:
        print("hf-fsdp bench: stopped by a signal. The results are those until then.", file=sys.stderr)
        return 128 + number
    return OK if tree["ok"] else PROBLEMS


def _settings(args: argparse.Namespace, problems: list[Problem]) -> tuple[tuple[SourceSettings, ...], FsdpSpec]:
    """Return the settings that all cases share."""
    sources = Sources(
        config=ConfigFile.at(args.config_file) if args.config_file is not None else None,
        command_line=args.command_line,
        overrides=["launch.distributed_type=FSDP", *args.overrides],
        environ=variables_without_torchrun(os.environ),
    )
    sources = with_converted_config(sources)
    given = read_settings(sources)
    assessment = combine(given)
    if assessment.ok:
        added = [f"{name}={value}" for name, value in _DEFAULTS.items() if not assessment.spec.asked(name)]
        given = add_settings(given, overrides=added)
        assessment = combine(given)
    if assessment.ok:
        print_conversion(sources.converted)
    problems += assessment.problems
    return tuple(given), assessment.spec


def _find_worlds(
    sizes: Sequence[int], spec: FsdpSpec, found: FoundDevices, problems: list[Problem]
) -> dict[int, World]:
    """Return the world of each number of ranks. Adds the problems of those for which this machine is too small."""
    worlds = {}
    for size in sorted(set(sizes)):
        launch = replace(spec.launch, num_processes=size, num_machines=1, machine_rank=0)
        mesh = replace(spec.mesh, shard="auto", replicate="auto")
        try:
            worlds[size] = resolve_world(replace(spec, launch=launch, mesh=mesh), found)
        except SpecError as error:
            problems += error.problems
    crowded = [size for size, world in worlds.items() if world.device == "cpu" and size > num_cores()]
    if crowded:
        message = f"{' and '.join(map(str, crowded))} ranks share {num_cores()} cores: "
        message += "their throughput and efficiency show the machine's limit, not the scaling of the model."
        problems.append(Problem(code="FSDP-N783", message=message))
    return worlds


def _with_stock(cases: Sequence[Case], spec: FsdpSpec, device: str, problems: list[Problem]) -> list[CaseGroup]:
    """Return each case with the same case of stock Accelerate. Warns why stock Accelerate cannot run some cases."""
    prefetches = spec.prefetch.forward or spec.prefetch.backward != "pre"
    reasons = {case: bench.why_not_in_stock(case, device, prefetches=prefetches) for case in cases}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        labels = dict.fromkeys(case.label for case in cases if reasons[case] == reason)
        message = f"stock Accelerate is not compared in {'; '.join(labels)}: {reason}."
        problems.append(Problem(code="FSDP-W787", message=message))
    return [(case,) if reasons[case] else (case, replace(case, system="stock")) for case in cases]


def _leave_out(
    groups: Sequence[CaseGroup], num_params: int, results: Results, problems: list[Problem], *, force: bool
) -> None:
    """Mark the cases that cannot run, and warn of them.

    Every rank builds the whole model in CPU memory before it is sharded.

    Args:
        force: whether cases are run whose models do not fit into the memory of the machine.

    Raises:
        SpecError: no case is left (FSDP-E781).
    """
    free = available_memory()
    reasons = []
    for group in groups:
        case, reason = group[0], group[0].impossible
        needed = len(group) * case.world_size * (_LIBRARIES + 4 * num_params)
        if not reason and needed > free and not force:
            reason = f"the ranks need {format_memory(needed)} of CPU memory for the whole models, "
            reason += f"and this machine has {format_memory(free)} free"
        if reason:
            results.end(group, "left out", reason)
            reasons.append(f"{case.name}: {reason}")
    if len(reasons) == len(groups):
        fix = "Choose a smaller model or other cases; --force runs cases that do not fit."
        raise SpecError([Problem(code="FSDP-E781", message=f"no case can run. {'; '.join(reasons)}.", fix=fix)])
    problems += [Problem(code="FSDP-W782", message=f"left out: {reason}.") for reason in reasons]


def run_worlds(
    job: bench.WorldJob, worlds: Mapping[int, World], results: Results, handover: LaunchHandover, spec: FsdpSpec
) -> int:
    """Measure what is not over in the results, and return the number of the signal that stopped it, or 0.

    After a failure, new ranks run what is left.

    Args:
        job: with the cases of all worlds.
        spec: the settings that all cases share.
    """
    from hf_fsdp_plugin.launcher.rendezvous import SignalException  # imports torch

    for size, world in worlds.items():
        groups = [group for group in job.groups if group[0].world_size == size]
        while left := [group for group in groups if not results.is_over(group)]:
            try:
                ended = run_world(replace(job, groups=left), world, results, handover, spec)
            except SignalException as stop:  # while no ranks run
                return int(stop.sigval)
            if ended.signal_number:
                return ended.signal_number
            running = next((group for group in left if not results.is_over(group)), None)
            if running is not None:
                results.end(running, "failed", _reason(ended))
    return 0


def run_world(
    job: bench.WorldJob, world: World, results: Results, handover: LaunchHandover, spec: FsdpSpec
) -> AttemptResult:
    """Run cases until their end, or until a rank has failed, and take over what is measured."""

    with tempfile.TemporaryDirectory(prefix="hf_fsdp_bench_", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / bench.JOB_FILE).write_bytes(pickle.dumps(job))
        left = list(enumerate(job.groups))

        def show() -> None:
            if left:
                print(f"hf-fsdp bench: {left[0][1][0].name}", file=sys.stderr, flush=True)

        def follow() -> None:
            while left and (file := folder / f"{left[0][0]}.json").exists():
                for measured in json.loads(file.read_text()):
                    results.add(measured)
                del left[0]
                show()

        show()
        env = {"OMP_NUM_THREADS": str(job.threads), "TMPDIR": scratch}
        env[HANG_LIMIT_VARIABLE] = "0"  # records of collectives would be a part of what is measured
        ended = run_job(["-m", _RANK, scratch], spec, world, handover, env=env, should_stop=follow)
        follow()
        return ended


def _reason(ended: AttemptResult) -> str:
    """Return why the ranks have ended before a group was measured."""
    first = ended.first
    if first is None:
        return "the ranks ended without a result"
    is_refusal = first.failure is not None and first.failure["kind"] == "spec"
    text = first.failure["message"] if is_refusal and first.failure is not None else summarize_exit(first)
    return f"rank {first.rank}: {' '.join(text.split())}"[:_MAX_ERROR]


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(word.strip().lower()) for word in text.split(",")]


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}.")
        return text

    return read
