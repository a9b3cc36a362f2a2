"""``hf-fsdp plan``: predicts memory, communication and time of a training step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli import check
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, exit_code, in_line_order, print_json, print_problems
from hf_fsdp_plugin.cli.plan.arguments import (
    Planned,
    add_picture_arguments,
    add_time_arguments,
    add_workload_arguments,
    check_flags,
    check_targets,
    read_size,
    read_subject,
)
from hf_fsdp_plugin.cli.plan.output import Prediction, plan_json, plan_text, write_file
from hf_fsdp_plugin.cli.plan.zero_table import print_zero_table
from hf_fsdp_plugin.launcher.flags import Parser, add_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.text import plural, printable

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner.advice import AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate
    from hf_fsdp_plugin.estimate.time import TimeModel

HELP = "Predict memory, communication and time of a training step, for a model, a config and a number of ranks."
EXAMPLES = (
    "hf-fsdp plan --model meta-llama/Llama-3.1-8B --config fsdp.yaml --world-size 8 --gpu-memory 80GB",
    'hf-fsdp plan --model . --fsdp "full_shard auto_wrap" --mixed_precision bf16 --world-size 8 --seq-len 4096 --json',
)
_SCALING_WORLDS: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_NO_MEMORY: Final = Problem(
    code="FSDP-E726",
    message="--advise needs the memory of a device.",
    fix="Pass --gpu-memory 80GB, or --machine with a known machine.",
    origin=Origin(source="command line", spelling="--advise", text=None),
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--model", metavar="DIR|ID", help="folder with a config.json, or a model id")
    parser.add_argument("--config", metavar="CONFIG", dest="config_option", help="the same as CONFIG")
    check.add_config_arguments(parser, several=False)
    add_workload_arguments(parser)
    add_time_arguments(parser)
    add_picture_arguments(parser)
    parser.add_argument("--device", metavar="TYPE", help="type of the devices (default: cuda; cpu with --cpu)")
    parser.add_argument("--advise", action="store_true", help="compare all settings, and print the best config")
    parser.add_argument(
        "--zero-table",
        action="store_true",
        help="print the formulas of ZeRO for --params or --model",
    )
    parser.add_argument("--params", metavar="COUNT", help="with --zero-table: parameters, such as 7e9 or 7B")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    add_setting_flags(parser)
    parser.epilog = "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --fsdp_version 2, --cpu, …"


def run(args: argparse.Namespace) -> int:
    """Print the prediction. Returns 0 if it fits or the memory is unknown, 1 if it does not fit or after errors."""
    names = [name for name in (args.configs, args.config_option, args.config_file) if name is not None]
    check_flags(args, names)
    problems, shown = check_targets(args), None
    try:
        if args.zero_table and args.model is None:
            return print_zero_table(args)
        if args.calibrate:
            return _calibrate(args)
        planned, shown = (None, None) if problems else read_subject(args, names, problems)
        if planned is None:
            return _fail(args, problems, shown)
        if args.zero_table:
            return print_zero_table(args, planned)
        return _advise(args, planned, problems) if args.advise else _predict(args, planned, problems)
    except SpecError as error:
        return _fail(args, [*problems, *error.problems], shown)


def _predict(args: argparse.Namespace, planned: Planned, problems: list[Problem]) -> int:
    from hf_fsdp_plugin.estimate.memory import estimate_memory
    from hf_fsdp_plugin.estimate.memory.device import gpu_of

    times = _time_model(planned, problems)
    memory = estimate_memory(planned.plan, planned.model, planned.workload, gpu=gpu_of(planned.machine))
    prediction = _prediction(args, planned, times, memory)
    written = _write_pictures(args, prediction, times)
    if args.json:
        print_json(plan_json(prediction, problems))
    else:
        print_problems(problem for problem in problems if problem.severity != "note")
        print(plan_text(prediction))
        _print_written(written)
    return PROBLEMS if prediction.fits is False else OK


def _advise(args: argparse.Namespace, planned: Planned, problems: list[Problem]) -> int:
    """Print the planner's answer. Returns 1 if nothing fits."""
    from hf_fsdp_plugin.cli.plan.advise import advice_json, advice_text, launched_of, written_row
    from hf_fsdp_plugin.estimate.planner import advise
    from hf_fsdp_plugin.estimate.planner.advice import compare_with_tree

    plan, workload, spec = planned.plan, planned.workload, planned.plan.spec
    if planned.gpu_memory is None:
        raise SpecError([_NO_MEMORY])
    launched = launched_of(spec, plan.world_size, planned.machine)
    advice = advise(
        planned.model,
        seq_len=workload.seq_len,
        global_batch=workload.micro_batch * workload.accumulation * plan.world_size,
        gpu_memory=planned.gpu_memory,
        num_machines=launched.num_machines,
        gpus_per_machine=launched.ranks_per_machine,
        machine=planned.machine,
        version=plan.version,
        precision=spec.precision.param,
        wrap={name: value for name, value, _ in spec.settings() if name.startswith("wrap.") and spec.asked(name)},
        optimizer=workload.optimizer,
        update_loop=workload.update_loop,
        clip_norm=workload.clip_norm,
        attention=workload.attention,
    )
    more = list(advice.problems)
    written = _advised_pictures(args, planned, written_row(advice), more)
    tree = compare_with_tree(advice, plan.num_params)
    if args.json:
        print_json(advice_json(advice, spec, launched, tree))
    else:
        print_problems(dict.fromkeys(more))
        _print_written(written)
        print(advice_text(advice, spec, launched, tree))
    return OK if advice.best is not None else PROBLEMS


def _advised_pictures(
    args: argparse.Namespace, planned: Planned, row: AdviceRow | None, problems: list[Problem]
) -> list[str]:
    """Write the files of ``--html`` and ``--png`` for the row whose config is printed, and return their names."""
    if args.html is None and args.png is None:
        return []
    if row is None:
        message = "nothing fits, so there are no settings to draw, and no pictures are written."
        problems.append(Problem(code="FSDP-W792", message=message, fix="Follow one of the changes that are printed."))
        return []
    planned = replace(planned, plan=row.plan, workload=row.workload)
    times = _time_model(planned, problems)
    return _write_pictures(args, _prediction(args, planned, times, row.memory), times)


def _time_model(planned: Planned, problems: list[Problem]) -> TimeModel | None:
    """Return the counted operations; ``None`` without a machine, or if they cannot be counted, which is a warning."""
    if planned.machine is None:
        return None
    from hf_fsdp_plugin.estimate.time import TimeModel, no_time

    try:
        return TimeModel(planned.plan, planned.model, planned.workload)
    except SpecError as error:
        problems.append(no_time(error))
        return None


def _prediction(
    args: argparse.Namespace, planned: Planned, times: TimeModel | None, memory: MemoryEstimate
) -> Prediction:
    from hf_fsdp_plugin.estimate.communication import estimate_communication

    communication = estimate_communication(planned.plan, planned.model, planned.workload)
    prediction = Prediction(planned=planned, memory=memory, communication=communication)
    if times is None or planned.machine is None:
        return prediction
    scaling = times.scaling(planned.machine, _SCALING_WORLDS) if args.scaling else ()
    return replace(prediction, time=times.estimate(planned.machine), scaling=tuple(scaling))


def _write_pictures(args: argparse.Namespace, prediction: Prediction, times: TimeModel | None) -> list[str]:
    """Write the files of ``--html`` and ``--png``, and return their names.

    Raises:
        SpecError: matplotlib is missing (FSDP-E834), or a file cannot be written (FSDP-E835).
    """
    if args.html is None and args.png is None:
        return []
    from hf_fsdp_plugin.estimate.pictures import picture_data, plan_image, plan_page

    planned, machine = prediction.planned, prediction.planned.machine
    subject = (planned.plan, planned.model, planned.workload, prediction.memory, planned.gpu_memory)
    if times is None or machine is None:
        data = picture_data(*subject)
    else:
        spans, scaling = times.timeline(machine).spans, times.scaling(machine, _SCALING_WORLDS)
        data = picture_data(*subject, prediction.time, spans, scaling, machine.ranks_per_machine)
    targets = {args.html: lambda: plan_page(data).encode(), args.png: lambda: plan_image(data)}
    written = [name for name in targets if name is not None]
    for name in written:
        write_file(Path(name), targets[name]())
    return written


def _print_written(names: Sequence[str]) -> None:
    for name in names:
        print(printable(f"written: {name}"))


def _calibrate(args: argparse.Namespace) -> int:
    """Measure the present machine and store its figures."""
    from hf_fsdp_plugin.devices import accelerator_type
    from hf_fsdp_plugin.estimate.calibration import calibrate_ranks
    from hf_fsdp_plugin.estimate.machines import calibration_path

    problems: list[Problem] = []
    num_ranks = read_size(args, "world-size", problems) or 2
    if problems:
        raise SpecError(problems)
    path = calibration_path()
    machine = calibrate_ranks(num_ranks, args.device or accelerator_type() or "cpu", path)
    if args.json:
        print_json({"ok": True, "machine": machine.label, "file": str(path), "ranks": num_ranks})
    else:
        print(f"{machine.label}\nMeasured with {plural(num_ranks, 'rank')} at work. Use it with --machine calibrated.")
        _print_written([str(path)])
    return OK


def _fail(args: argparse.Namespace, problems: Sequence[Problem], shown: str | None) -> int:
    problems = in_line_order(dict.fromkeys(problems))
    if args.json:
        print_json({"ok": False, "problems": [problem.to_json() for problem in problems]})
    else:
        print_problems(problems)
    return exit_code(problems, shown) or PROBLEMS
