"""``hf-fsdp bench``: measures steps of a model over numbers of ranks, strategies and FSDP versions."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.cli.bench.results import Results, bench_text
from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_failure, print_json, print_problems
from hf_fsdp_plugin.cli.plan.arguments import sequence_length
from hf_fsdp_plugin.cli.verbs import whole_number
from hf_fsdp_plugin.hangs.calls import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.integrations import bench
from hf_fsdp_plugin.integrations.bench import BenchWorkload, Case, Task
from hf_fsdp_plugin.launcher.flags import Parser, UsageError, add_override_flag, add_setting_flags
from hf_fsdp_plugin.launcher.world import FoundDevices, World, find_devices, num_cores, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.runs.exits import RunResult, summarize_exit
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources
from hf_fsdp_plugin.sources.launchers import LaunchHandover, user_variables
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
_RANK: Final = "hf_fsdp_plugin.integrations.bench.rank"
_MAX_ERROR: Final = 1000
CaseGroup = tuple[Case, ...]
"""A case of this package, and the same case of the systems with which it is compared."""


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
        type=_list_of(_one_of(*bench.TITLES)),
        default="ddp,shard_grad_op,full_shard",
        help=f"of {', '.join(bench.TITLES)}",
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
        benchmark = _read(args, problems)
        results = Results(benchmark.head, [case for group in benchmark.groups for case in group])
        benchmark = _leave_out(benchmark, results, problems, force=args.force)
    except SpecError as error:
        return print_failure(dict.fromkeys([*problems, *error.problems]), as_json=args.json)
    if not args.json:
        print_problems(problems)
    number = benchmark.run(results)
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


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark measures, and where.

    Attributes:
        groups: the cases.
        job: what the ranks measure, without the tasks.
        spec, sources: the settings that all cases share.
        num_params: parameters of the model.
        head: the description of the benchmark as JSON: the part of the result before the cases.
        gpu_ids: as in ``World``.
    """

    groups: Sequence[CaseGroup]
    job: bench.WorldJob
    spec: FsdpSpec
    sources: Sources
    num_params: int
    head: dict[str, Any]
    gpu_ids: str

    def run(self, results: Results) -> int:
        """Measure what is not over in the results, and return the number of the signal that stopped it, or 0.

        The settings of a world alternate from round to round. After a failure, new ranks run what is left.
        """
        for world_size in sorted({group[0].world_size for group in self.groups}):
            groups = [group for group in self.groups if group[0].world_size == world_size]
            rounds = range(self.job.workload.rounds)
            tasks = [Task(cases=group, round=number) for number in rounds for group in groups]
            while left := [task for task in tasks if not results.is_over(task)]:
                ended = self._run_world(world_size, left, results)
                if ended.signal_number:
                    return ended.signal_number
                running = next((task for task in left if not results.is_over(task)), None)
                if running is not None:
                    results.end(running.cases, "failed", _reason(ended))
        return 0

    def _run_world(self, world_size: int, tasks: Sequence[Task], results: Results) -> RunResult:
        """Run tasks until their end, or until a rank has failed, and take over what is measured."""
        from hf_fsdp_plugin.launcher.attempts import run_job  # imports torch

        world = World(
            device=self.job.device, num_machines=1, machine_rank=0, num_local=world_size, gpu_ids=self.gpu_ids
        )
        with tempfile.TemporaryDirectory(prefix="hf_fsdp_bench_", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            (folder / bench.JOB_FILE).write_bytes(pickle.dumps(replace(self.job, tasks=tasks)))
            left = list(enumerate(tasks))

            def follow() -> None:
                while left and (file := folder / f"{left[0][0]}.json").exists():
                    for measured in json.loads(file.read_text()):
                        results.add(measured)
                    del left[0]
                    show()

            def show() -> None:
                if left:
                    task = left[0][1]
                    text = f"hf-fsdp bench: round {task.round + 1}: {task.cases[0].name}"
                    print(text, file=sys.stderr, flush=True)

            show()
            env = {"OMP_NUM_THREADS": str(self.head["threads"]), "TMPDIR": scratch}
            env[HANG_LIMIT_VARIABLE] = "0"  # records of collectives would be a part of what is measured
            handover = LaunchHandover(sources=self.sources, quiet=True)
            ended = run_job(["-m", _RANK, scratch], self.spec, world, handover, env=env, should_stop=follow)
            follow()
            return ended


def _reason(ended: RunResult) -> str:
    """Return why the ranks have ended before a task was measured."""
    first = ended.first
    if first is None:
        return "the ranks ended without a result"
    is_refusal = first.failure is not None and first.failure["kind"] == "spec"
    text = first.failure["message"] if is_refusal and first.failure is not None else summarize_exit(first)
    return f"rank {first.rank}: {' '.join(text.split())}"[:_MAX_ERROR]


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
    cases = list(bench.all_cases(args.world_sizes, args.strategies, [int(version) for version in args.versions]))
    groups = _with_stock(cases, spec, device, problems) if args.vs else [(case,) for case in cases]
    if has_errors(problems):
        raise SpecError(problems)
    folder = Path(args.model).expanduser()
    name = str(folder.absolute()) if folder.exists() else args.model
    num_params = sum(parameter.numel() for parameter in model.parameters())
    threads = 1 if device == "cpu" else max(1, num_cores() // max(args.world_sizes))
    return Bench(
        groups=groups,
        job=bench.WorldJob(model=name, device=device, workload=workload, tasks=()),
        spec=spec,
        sources=sources,
        num_params=num_params,
        head={
            "model": {"name": name, "class": type(model).__name__, "num_params": num_params},
            "device": {"type": device, "name": found.name or None},
            "threads": int(os.environ.get("OMP_NUM_THREADS") or threads),
            "workload": asdict(workload),
            "settings": {setting: str(value) for setting, value, _ in spec.settings() if spec.asked(setting)},
        },
        gpu_ids=gpu_ids,
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
        if reason := bench.why_not_in_stock(case, device, prefetches=prefetches):
            reasons.setdefault(reason, {})[case.label] = None
            groups.append((case,))
        else:
            groups.append((case, replace(case, system="stock")))
    for reason, labels in reasons.items():
        message = f"stock Accelerate is not compared in {'; '.join(labels)}: {reason}."
        problems.append(Problem(code="FSDP-W787", message=message))
    return groups


def _leave_out(benchmark: Bench, results: Results, problems: list[Problem], *, force: bool) -> Bench:
    """Return the benchmark without the cases that cannot run, which are marked and warned of.

    Every rank builds the whole model in CPU memory before it is sharded.

    Args:
        force: whether cases are run whose models do not fit into the memory of the machine.

    Raises:
        SpecError: no case is left (FSDP-E781).
    """
    free = available_bytes()
    kept, reasons = [], []
    for group in benchmark.groups:
        case, reason = group[0], group[0].impossible
        needed = len(group) * case.world_size * (_LIBRARIES + 4 * benchmark.num_params)
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
    return replace(benchmark, groups=kept)


def available_bytes() -> int:
    """Return the memory of this machine that new processes can use; 0 if the system does not show it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(word.strip().lower()) for word in text.split(",")]


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}.")
        return text

    return read
