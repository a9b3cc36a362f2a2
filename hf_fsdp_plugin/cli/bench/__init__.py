"""``hf-fsdp bench``: measures steps of a model over numbers of ranks, strategies and FSDP versions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.bench.output import bench_text
from hf_fsdp_plugin.cli.bench.worlds import Bench, CaseGroup, available_bytes
from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_failure, print_json, print_problems
from hf_fsdp_plugin.cli.plan.arguments import sequence_length
from hf_fsdp_plugin.cli.verbs import whole_number
from hf_fsdp_plugin.integrations.bench import TITLES, BenchWorkload, Case, all_cases, why_not_in_stock
from hf_fsdp_plugin.integrations.bench.results import Results
from hf_fsdp_plugin.launcher.flags import Parser, UsageError, add_override_flag, add_setting_flags
from hf_fsdp_plugin.launcher.world import FoundDevices, find_devices, num_cores, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources
from hf_fsdp_plugin.sources.launchers import user_variables
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.text import format_memory

HELP = "Measure throughput, memory and scaling of a model over numbers of ranks, strategies and FSDP versions."
EXAMPLES = (
    "hf-fsdp bench --model meta-llama/Llama-3.1-8B --world-sizes 1,2,4,8 --mixed_precision bf16 --json > bench.json",
    "hf-fsdp bench --model . --strategies full_shard --versions 1,2 --vs stock --rounds 10",
)
_DEFAULTS: Final = {"wrap.policy": "transformer", "prefetch.backward": "pre"}
"""Settings of all cases, unless a source sets them."""
_BLOCKS: Final = {"": 1, "stock": 5}
"""Value of ``--vs`` -> blocks of a round by default."""
_LIBRARIES: Final = 450_000_000
"""Resident bytes of a rank with torch, Transformers and Accelerate, before the model; measured with torch 2.13."""


def add_arguments(parser: Parser) -> None:
    """Add the flags of this verb, and those that set FSDP."""
    number = whole_number(1)
    parser.add_argument("--model", metavar="DIR|ID", help="folder with a config.json, or a model id")
    parser.add_argument("--config-file", "--config", metavar="CONFIG", help="Accelerate YAML or JSON of other settings")
    add_override_flag(parser)
    what = parser.add_argument_group("cases, each a list with commas")
    what.add_argument(
        "--world-sizes", metavar="N,…", type=_list_of(number), default="2", help="numbers of ranks (default: 2)"
    )
    what.add_argument(
        "--strategies",
        metavar="S,…",
        type=_list_of(_one_of(*TITLES)),
        default="ddp,shard_grad_op,full_shard",
        help=f"of {', '.join(TITLES)}",
    )
    what.add_argument(
        "--versions", metavar="V,…", type=_list_of(_one_of("1", "2")), default="2", help="FSDP versions (default: 2)"
    )
    what.add_argument("--vs", choices=["stock"], default="", help="also run the same settings by stock Accelerate")
    how = parser.add_argument_group("measurement")
    for name, default, text in (
        ("micro-batch", 1, "samples per rank and step"),
        ("seq-len", 512, "tokens per sample"),
        ("steps", 5, "steps of a timed block"),
        ("warm-up", 2, "steps of a case before its blocks"),
        ("rounds", 3, "times that each case is built"),
    ):
        how.add_argument(f"--{name}", metavar="N", type=number, default=default, help=f"{text} (default: {default})")
    blocks = f"blocks of a case in a round (default: 1; {_BLOCKS['stock']} with --vs)"
    how.add_argument("--blocks", metavar="N", type=number, help=blocks)
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
        bench = _read(args, problems)
        results = Results(bench.head(), [case for group in bench.groups for case in group])
        bench = _leave_out(bench, results, problems, force=args.force)
    except SpecError as error:
        return print_failure(dict.fromkeys([*problems, *error.problems]), as_json=args.json)
    if not args.json:
        print_problems(problems)
    number = bench.run(results)
    tree = results.to_json()
    fix = "The other cases are measured. Run this case again with other settings, or alone."
    failed = [
        Problem(code="FSDP-E786", message=f"{row['case']}: {row['reason'].rstrip('.')}.", fix=fix)
        for row in tree["cases"]
        if row["status"] == "failed"
    ]
    if args.json:
        print_json({**tree, "problems": [problem.to_json() for problem in (*problems, *failed)]})
    else:
        print_problems(failed)
        print(bench_text(tree))
    if number:
        print("hf-fsdp bench: stopped by a signal. The results are those until then.", file=sys.stderr)
        return 128 + number
    return OK if tree["ok"] else PROBLEMS


def _read(args: argparse.Namespace, problems: list[Problem]) -> Bench:
    """Return the benchmark that the arguments describe. Adds warnings and notes to the problems.

    Raises:
        SpecError: with all errors.
    """
    sources, assessment = _settings(args)
    model, model_problems = load_model(args.model)
    problems += [*assessment.problems, *model_problems]
    if model is None or has_errors(problems):
        raise SpecError(problems)
    found, spec = find_devices(), assessment.spec
    device, gpu_ids = _check_worlds(args.world_sizes, spec, found, problems)
    workload = BenchWorkload(
        micro_batch=args.micro_batch,
        seq_len=args.seq_len,
        steps=args.steps,
        warm_up=args.warm_up,
        blocks=args.blocks or _BLOCKS[args.vs],
        rounds=args.rounds,
    )
    _, too_long = sequence_length(workload, model)  # type: ignore[arg-type]
    problems += [too_long] if too_long is not None else []
    cases = list(all_cases(args.world_sizes, args.strategies, [int(version) for version in args.versions]))
    groups = _with_stock(cases, spec, device, problems) if args.vs else [(case,) for case in cases]
    if has_errors(problems):
        raise SpecError(problems)
    folder = Path(args.model).expanduser()
    threads = 1 if device == "cpu" else max(1, num_cores() // max(args.world_sizes))
    return Bench(
        groups=groups,
        workload=workload,
        spec=spec,
        sources=sources,
        model=model,
        model_name=str(folder.absolute()) if folder.exists() else args.model,
        device=device,
        gpu_ids=gpu_ids,
        found=found,
        threads=int(os.environ.get("OMP_NUM_THREADS") or threads),
    )


def _settings(args: argparse.Namespace) -> tuple[Sources, Assessment]:
    """Return the settings that all cases share."""
    sources = Sources(
        config=ConfigFile.at(args.config_file) if args.config_file is not None else None,
        command_line=args.command_line,
        overrides=["launch.distributed_type=FSDP", *args.overrides],
        environ=user_variables(os.environ),
    )
    assessment = assess(sources)
    if not assessment.ok:
        return sources, assessment
    added = [f"{name}={value}" for name, value in _DEFAULTS.items() if not assessment.spec.asked(name)]
    sources = replace(sources, overrides=[*added, *sources.overrides])
    return sources, assess(sources)


def _check_worlds(
    sizes: Sequence[int], spec: FsdpSpec, found: FoundDevices, problems: list[Problem]
) -> tuple[str, str]:
    """Return the device type and ``gpu_ids``. Reports worlds that this machine cannot run or has no cores for."""
    device, gpu_ids = "cpu", ""
    for size in sorted(set(sizes)):
        launch = replace(spec.launch, num_processes=size, num_machines=1, machine_rank=0)
        mesh = replace(spec.mesh, shard="auto", replicate="auto")
        try:
            world = resolve_world(replace(spec, launch=launch, mesh=mesh), found)
            device, gpu_ids = world.device, world.gpu_ids
        except SpecError as error:
            problems += error.problems
    crowded = sorted({size for size in sizes if size > num_cores()})
    if device == "cpu" and crowded:
        message = f"{' and '.join(map(str, crowded))} ranks share {num_cores()} cores: "
        message += "their throughput and efficiency show the machine's limit, not the scaling of the model."
        problems.append(Problem(code="FSDP-N783", message=message))
    return device, gpu_ids


def _with_stock(cases: Sequence[Case], spec: FsdpSpec, device: str, problems: list[Problem]) -> list[CaseGroup]:
    """Return each case with the same case of stock Accelerate. Warns why stock Accelerate cannot run some cases."""
    prefetches = spec.prefetch.forward or spec.prefetch.backward != "pre"
    reasons: dict[str, dict[str, None]] = {}
    groups: list[CaseGroup] = []
    for case in cases:
        if reason := why_not_in_stock(case, device, prefetches=prefetches):
            reasons.setdefault(reason, {})[case.label] = None
            groups.append((case,))
        else:
            groups.append((case, replace(case, system="stock")))
    for reason, labels in reasons.items():
        message = f"stock Accelerate is not compared in {'; '.join(labels)}: {reason}."
        problems.append(Problem(code="FSDP-W787", message=message))
    return groups


def _leave_out(bench: Bench, results: Results, problems: list[Problem], *, force: bool) -> Bench:
    """Return the benchmark without the cases that cannot run, which are marked and warned of.

    Every rank builds the whole model in CPU memory before it is sharded.

    Args:
        force: whether cases are run whose models do not fit into the memory of the machine.

    Raises:
        SpecError: no case is left (FSDP-E781).
    """
    free, num_params = available_bytes(), sum(parameter.numel() for parameter in bench.model.parameters())
    kept, reasons = [], []
    for group in bench.groups:
        case, reason = group[0], group[0].impossible
        needed = len(group) * case.world_size * (_LIBRARIES + 4 * num_params)
        if not reason and free and needed > free and not force:
            reason = f"the ranks need {format_memory(needed)} of CPU memory for the whole models, "
            reason += f"and this machine has {format_memory(free)} free"
        if reason:
            results.end(group, "left out", reason)
            reasons.append(f"{case.name}: {reason}")
        else:
            kept.append(group)
    if not kept:
        fix = "Choose a smaller model or other cases; --force runs cases that do not fit."
        raise SpecError([Problem(code="FSDP-E781", message=f"no case can run. {'; '.join(reasons)}.", fix=fix)])
    problems += [Problem(code="FSDP-W782", message=f"left out: {reason}.") for reason in reasons]
    return replace(bench, groups=kept)


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(word.strip().lower()) for word in text.split(",")]


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}.")
        return text

    return read
