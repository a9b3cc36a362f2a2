"""``hf-fsdp bench``: measures steps of a model over numbers of ranks, strategies, prefetch and FSDP versions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hf_fsdp_plugin.cli.bench.arguments import Request, not_compared, read_request
from hf_fsdp_plugin.cli.bench.arguments import add_arguments as add_arguments
from hf_fsdp_plugin.cli.bench.output import bench_text, write_pictures
from hf_fsdp_plugin.cli.bench.prediction import available_memory, fit_problems, machine_of, predict, too_large
from hf_fsdp_plugin.cli.bench.worlds import Bench, failure_problems
from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_json, print_problems
from hf_fsdp_plugin.cli.plan.arguments import sequence_length
from hf_fsdp_plugin.integrations.bench.cases import CaseSetting
from hf_fsdp_plugin.integrations.bench.results import Results, read_results
from hf_fsdp_plugin.launcher.device_search import FoundDevices, find_devices
from hf_fsdp_plugin.launcher.flags import UsageError
from hf_fsdp_plugin.launcher.world import num_cores, resolve_world
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources
from hf_fsdp_plugin.sources.launchers import user_variables
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess
from hf_fsdp_plugin.text import printable

HELP = (
    "Measure throughput, memory and scaling of a model over numbers of ranks, strategies, prefetch and FSDP versions."
)
EXAMPLES = (
    "hf-fsdp bench --model meta-llama/Llama-3.1-8B --world-sizes 1,2,4,8 --mixed_precision bf16 -o bench.json",
    "hf-fsdp bench --model . --strategies full_shard --versions 1,2 --vs stock,raw --rounds 10 --html bench.html",
)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. Returns 0 if every case that fits was measured, else 1; 130 after Ctrl-C."""
    if args.model is None:
        raise UsageError("give --model.")
    problems: list[Problem] = []
    try:
        bench = _read(args, problems)
        if bench is None:
            return _fail(args, problems)
        results = _results(args, bench)
        settings = _runnable(args, bench, results, problems)
        _show(args, problems)
        if has_errors(problems):
            return _fail(args, problems)
        results.write()
        number = bench.run(settings, results)
        return _finish(args, results, problems, number)
    except SpecError as error:
        return _fail(args, [*problems, *error.problems])


def _read(args: argparse.Namespace, problems: list[Problem]) -> Bench | None:
    """Return what to measure; ``None`` after errors, which are all reported."""
    request = read_request(args, problems)
    problems += _existing(args)
    sources = Sources(
        config=ConfigFile.at(args.config_file) if args.config_file is not None else None,
        command_line=args.command_line,
        overrides=["launch.distributed_type=FSDP", *args.overrides],
        environ=user_variables(os.environ),
    )
    assessment = assess(sources)
    if assessment.ok and not assessment.spec.asked("wrap.policy"):
        sources = replace(sources, overrides=["wrap.policy=transformer", *sources.overrides])
        assessment = assess(sources)
    problems += assessment.problems
    model, model_problems = load_model(args.model)
    problems += model_problems
    if request is None or model is None or has_errors(problems):
        return None
    found = find_devices()
    device, gpu_ids = _check_worlds(request, assessment.spec, found, problems)
    length, too_long = sequence_length(request.workload, model)  # type: ignore[arg-type]
    problems += [too_long] if too_long is not None and length else []
    request = replace(request, device=device)
    problems += not_compared(request)
    if has_errors(problems):
        return None
    folder = Path(args.model).expanduser()
    threads = 1 if device == "cpu" else max(1, num_cores() // max(s.world_size for s in request.settings))
    return Bench(
        request=request, spec=assessment.spec, sources=sources, model=model, device=device, gpu_ids=gpu_ids,
        found=found,
        model_name=str(folder.absolute()) if folder.exists() else args.model,
        threads=int(os.environ.get("OMP_NUM_THREADS") or threads),
    )  # fmt: skip


def _check_worlds(request: Request, spec: FsdpSpec, found: FoundDevices, problems: list[Problem]) -> tuple[str, str]:
    """Return the device type and ``gpu_ids``. Reports worlds that this machine cannot run or has no cores for."""
    device, gpu_ids = "cpu", ""
    sizes = sorted({setting.world_size for setting in request.settings})
    for size in sizes:
        launch = replace(spec.launch, num_processes=size, num_machines=1, machine_rank=0)
        mesh = replace(spec.mesh, shard="auto", replicate="auto")
        try:
            world = resolve_world(replace(spec, launch=launch, mesh=mesh), found)
            device, gpu_ids = world.device, world.gpu_ids
        except SpecError as error:
            problems += error.problems
    crowded = [size for size in sizes if size > num_cores()]
    if device == "cpu" and crowded:
        message = f"{' and '.join(map(str, crowded))} ranks share {num_cores()} cores: "
        message += "their throughput and efficiency show the machine's limit, not the scaling of the model."
        problems.append(Problem(code="FSDP-N783", message=message))
    return device, gpu_ids


def _existing(args: argparse.Namespace) -> list[Problem]:
    """Return a problem for each file that exists, unless it is replaced or continued."""
    if args.resume and args.output is None:
        fix = "Pass the file with -o OUT."
        return [Problem(code="FSDP-E784", message="--resume continues a file, but none is given.", fix=fix)]
    replaced = [] if args.resume else [args.output]
    fix = "Pass --force to replace it, --resume to continue a JSON file, or another name."
    return [
        Problem(code="FSDP-E784", message=f"{target} exists.", fix=fix)
        for target in (*replaced, args.html, args.png)
        if target is not None and os.path.lexists(target) and not args.force
    ]


def _results(args: argparse.Namespace, bench: Bench) -> Results:
    path = Path(args.output) if args.output is not None else None
    results = Results(path, bench.head(), bench.cases())
    if args.resume and path is not None and path.exists():
        results.resume(read_results(path))
    return results


def _runnable(args: argparse.Namespace, bench: Bench, results: Results, problems: list[Problem]) -> list[CaseSetting]:
    """Return the settings to run. Marks the others with their reason, and predicts memory and FLOPs."""
    machine = machine_of(args.machine, bench.found, bench.device)
    free = available_memory(bench.found, bench.device)
    runnable, large = [], {}
    for setting in bench.request.settings:
        cases = bench.request.cases(setting)
        reason, prediction = setting.impossible, None
        if not reason:
            try:
                spec = bench.spec_of(setting)
                prediction = predict(setting, spec, bench.model, bench.request.workload, bench.device, machine)
            except SpecError as error:
                reason = " ".join(f"{p.code}: {p.message}" for p in error.problems if p.severity == "error")
        if reason:
            for case in cases:
                results.end(case.name, "impossible", reason)
            problems.append(Problem(code="FSDP-W782", message=f"left out: {setting.name}: {reason}."))
            continue
        assert prediction is not None
        for case in cases:
            results.predict(
                case.name,
                num_bytes=prediction.peak_bytes,
                flops=prediction.flops,
                peak_flops=prediction.peak_flops,
            )
        if reason := too_large(prediction, free, len(cases)):
            large[setting] = reason
            if not args.force:
                for case in cases:
                    results.end(case.name, "does not fit", reason)
                continue
        runnable.append(setting)
    problems += fit_problems(large, len(bench.request.settings), force=args.force)
    if not runnable and not has_errors(problems):
        message = "none of the settings can run, for the reasons above."
        problems.append(Problem(code="FSDP-E781", message=message, fix="Choose others."))
    return runnable


def _finish(args: argparse.Namespace, results: Results, problems: list[Problem], number: int) -> int:
    """Print the tables and write the pictures. Returns the exit code."""
    tree = results.to_json()
    failed = failure_problems(tree)
    tree |= {"ok": tree["ok"] and not number, "problems": [problem.to_json() for problem in (*problems, *failed)]}
    if number:
        left = f" {results.path} has what was measured; --resume continues." if results.path is not None else ""
        print(f"hf-fsdp bench: stopped by a signal.{left}", file=sys.stderr)
        return 128 + number
    written = [str(results.path)] if results.path is not None else []
    if args.html is not None or args.png is not None:
        written += write_pictures(tree, args.html, args.png)
    if args.json:
        print_json(tree)
    else:
        print_problems(failed)
        print(bench_text(tree))
        for name in written:
            print(printable(f"written: {name}"))
    return OK if tree["ok"] else PROBLEMS


def _show(args: argparse.Namespace, problems: Sequence[Problem]) -> None:
    if not args.json:
        print_problems(problem for problem in problems if problem.severity != "error")


def _fail(args: argparse.Namespace, problems: Sequence[Problem]) -> int:
    errors = [problem for problem in dict.fromkeys(problems) if problem.severity == "error"]
    if args.json:
        print_json({"ok": False, "problems": [problem.to_json() for problem in dict.fromkeys(problems)]})
    else:
        print_problems(errors)
    return PROBLEMS
