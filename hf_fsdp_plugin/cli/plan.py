"""``hf-fsdp plan``: predicts memory, communication and time of a training step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli import check
from hf_fsdp_plugin.cli.exit_codes import OK, PROBLEMS, USAGE, exit_code
from hf_fsdp_plugin.cli.output import print_json
from hf_fsdp_plugin.cli.parser import make_parser
from hf_fsdp_plugin.cli.plan_arguments import (
    add_workload_arguments,
    read_size,
)
from hf_fsdp_plugin.cli.plan_modes import unused_flags
from hf_fsdp_plugin.cli.plan_output import Prediction, plan_json, plan_text
from hf_fsdp_plugin.cli.plan_pictures import FLAGS as PICTURE_FLAGS
from hf_fsdp_plugin.cli.plan_pictures import add_picture_arguments, check_targets, write_pictures
from hf_fsdp_plugin.cli.plan_subject import Planned, read_subject
from hf_fsdp_plugin.cli.plan_time import FLAGS, add_time_arguments, calibrate_verb, scaling_of, time_model
from hf_fsdp_plugin.cli.terminal import in_line_order, print_problems
from hf_fsdp_plugin.cli.zero_table import scheme_table_verb, zero_table_verb
from hf_fsdp_plugin.launcher.flags import UsageError, split_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.text import printable

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner_rows import AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate
    from hf_fsdp_plugin.estimate.time import TimeModel

HELP = "Predict memory, communication and time of a training step, for a model, a config and a number of ranks."
EXAMPLES = (
    "hf-fsdp plan --model meta-llama/Llama-3.1-8B --config fsdp.yaml --world-size 8 --gpu-memory 80GB",
    'hf-fsdp plan --model . --fsdp "full_shard auto_wrap" --mixed_precision bf16 --world-size 8 --seq-len 4096 --json',
)
_NO_MEMORY: Final = Problem(
    code="FSDP-E726",
    message="--advise needs the memory of a device.",
    fix="Pass --gpu-memory 80GB, or --machine with a known machine.",
    origin=Origin(source="command line", spelling="--advise", text=None),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--trace", action="store_true", help="trace a real step instead of the closed form; slower")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.epilog = "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --fsdp_version 2, --cpu, …"


OWN_FLAGS: Final = frozenset(
    {
        "model", "config", "config_file", "fsdp", "fsdp_config", "set", "distributed_config", "world_size",
        "micro_batch", "seq_len", "global_batch", "accumulation", "sync_each_batch", "optimizer", "for_loop", "foreach",
        "fused", "no_clip", "attention", "gpu_memory", "device", "trace", "json", "help", "zero_table", "params",
        "advise", "lora_rank", "qlora", *FLAGS, *PICTURE_FLAGS,
    }
)  # fmt: skip


def parse_argv(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after ``plan``, among them flags of launch. Raises ``SystemExit`` for wrong usage."""
    try:
        command_line, words = split_setting_flags(argv, OWN_FLAGS)
    except UsageError as error:
        print(f"hf-fsdp plan: {error}", file=sys.stderr)
        raise SystemExit(USAGE) from None
    args = make_parser("plan", sys.modules[__name__]).parse_args(words)
    args.command_line = tuple(command_line)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the prediction. Returns 0 if it fits or the memory is unknown, 1 if it does not fit or after errors."""
    if reason := unused_flags(args):
        print(f"hf-fsdp plan: {reason}", file=sys.stderr)
        return USAGE
    if args.zero_table and args.model is None:
        return zero_table_verb(args)
    if args.calibrate:
        return _calibrate(args)
    names = [name for name in (args.configs, args.config_option, args.config_file) if name is not None]
    if args.model is None or len(names) > 1:
        print("hf-fsdp plan: give --model, and at most one config.", file=sys.stderr)
        return USAGE
    problems = check_targets(args)
    if problems:
        return _fail(args, problems, None)
    planned, shown = read_subject(args, names, problems)
    if planned is None:
        return _fail(args, problems, shown)
    if args.advise:
        return _advise(args, planned, problems, shown)
    if args.zero_table:
        return scheme_table_verb(args, planned)
    times = time_model(planned, problems)
    try:
        prediction = _predict(args, planned, times)
        written = _write_pictures(args, planned, prediction, times)
    except SpecError as error:
        return _fail(args, [*problems, *error.problems], shown)
    if args.json:
        print_json(plan_json(prediction, problems))
    else:
        print_problems(problem for problem in problems if problem.severity != "note")
        print(plan_text(prediction))
        for name in written:
            print(printable(f"written: {name}"))
    return PROBLEMS if prediction.fits is False else OK


def _advise(args: argparse.Namespace, planned: Planned, problems: list[Problem], shown: str | None) -> int:
    """Print the planner's answer. Returns 1 if nothing fits."""
    from hf_fsdp_plugin.cli.plan_advise import advice_json, advice_text, launched_of, written_row
    from hf_fsdp_plugin.estimate.decision_tree import compare_with_tree
    from hf_fsdp_plugin.estimate.planner import advise

    plan, workload, spec = planned.plan, planned.workload, planned.plan.spec
    if planned.gpu_memory is None:
        return _fail(args, [*problems, _NO_MEMORY], shown)
    launched = launched_of(spec, plan.world_size, planned.machine)
    try:
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
    except SpecError as error:
        return _fail(args, [*problems, *error.problems], shown)
    tree = compare_with_tree(advice, plan.num_params)
    if args.json:
        print_json(advice_json(advice, spec, launched, tree))
    else:
        print_problems(dict.fromkeys(more))
        for name in written:
            print(printable(f"written: {name}"))
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
    times = time_model(planned, problems)
    prediction = _prediction(args, planned, times, row.memory)
    return _write_pictures(args, planned, prediction, times)


def _predict(args: argparse.Namespace, planned: Planned, times: TimeModel | None) -> Prediction:
    from hf_fsdp_plugin.estimate.memory import estimate_memory
    from hf_fsdp_plugin.estimate.memory.device import gpu_of
    from hf_fsdp_plugin.estimate.trace import trace_memory

    method = trace_memory if args.trace else estimate_memory
    memory = method(planned.plan, planned.model, planned.workload, gpu=gpu_of(planned.machine))
    return _prediction(args, planned, times, memory)


def _prediction(
    args: argparse.Namespace, planned: Planned, times: TimeModel | None, memory: MemoryEstimate
) -> Prediction:
    from hf_fsdp_plugin.estimate.communication import estimate_communication

    communication = estimate_communication(planned.plan, planned.model, planned.workload)
    machine = planned.machine
    timed = (times, machine) if times is not None and machine is not None else None
    return Prediction(
        time=timed[0].estimate(timed[1]) if timed is not None else None,
        scaling=tuple(scaling_of(*timed)) if timed is not None and args.scaling else (),
        machine=machine.label if machine is not None else None,
        plan=planned.plan,
        workload=planned.workload,
        memory=memory,
        communication=communication,
        gpu_memory=planned.gpu_memory,
    )


def _write_pictures(
    args: argparse.Namespace, planned: Planned, prediction: Prediction, times: TimeModel | None
) -> list[str]:
    """Write the files of ``--html`` and ``--png``, and return their names."""
    if args.html is None and args.png is None:
        return []
    from hf_fsdp_plugin.estimate.pictures.data import RANKS_PER_MACHINE, picture_data

    plan, model, workload, machine = planned.plan, planned.model, planned.workload, planned.machine
    spans, scaling, ranks_per_machine = [], list(prediction.scaling), RANKS_PER_MACHINE
    if machine is not None:
        ranks_per_machine = machine.ranks_per_machine
    if machine is not None and times is not None:
        spans = times.timeline(machine).spans
        scaling = scaling or scaling_of(times, machine)
    data = picture_data(
        plan, model, workload, prediction.memory, planned.gpu_memory, prediction.time, spans, scaling, ranks_per_machine
    )
    return write_pictures(args, data)


def _calibrate(args: argparse.Namespace) -> int:
    problems: list[Problem] = []
    num_ranks = read_size(args, "world-size", problems)
    return _fail(args, problems, None) if problems else calibrate_verb(args, num_ranks or 2)


def _fail(args: argparse.Namespace, problems: Sequence[Problem], shown: str | None) -> int:
    problems = in_line_order(dict.fromkeys(problems))
    if args.json:
        print_json({"ok": False, "problems": [problem.to_json() for problem in problems]})
    else:
        print_problems(problems)
    return exit_code(problems, shown) or PROBLEMS
