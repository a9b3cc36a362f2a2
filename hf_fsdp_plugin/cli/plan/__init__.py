"""``hf-fsdp plan``: predicts memory, communication and time of a training step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.cli.output import OK, PROBLEMS, exit_code, in_line_order, print_failure, print_json, print_problems
from hf_fsdp_plugin.cli.plan import arguments
from hf_fsdp_plugin.cli.plan.arguments import Planned, add_arguments
from hf_fsdp_plugin.cli.plan.output import plan_json, plan_text, predict, write_page
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.text import plural

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

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
_NO_PICTURES: Final = Problem(
    code="FSDP-W792",
    message="nothing fits, so there are no settings to draw, and no pictures are written.",
    fix="Follow one of the changes that are printed.",
)


def run(args: argparse.Namespace) -> int:
    """Print the prediction. Returns 0 if it fits or the memory is unknown, 1 if it does not fit or after errors."""
    names = [name for name in (args.configs, args.config_option, args.config_file) if name is not None]
    arguments.check_flags(args, names)
    problems, shown = arguments.check_targets(args), None
    try:
        if args.calibrate:
            return _calibrate(args)
        planned, shown = (None, None) if problems else arguments.read_subject(args, names, problems)
        if planned is not None:
            return _advise(args, planned) if args.advise else _predict(args, planned, problems)
    except SpecError as error:
        problems += error.problems
    problems = in_line_order(dict.fromkeys(problems))
    failed = print_failure(problems, as_json=args.json)
    return exit_code(problems, shown) or failed


def _predict(args: argparse.Namespace, planned: Planned, problems: list[Problem]) -> int:
    prediction = predict(planned)
    written = write_page(args, prediction)
    if args.json:
        print_json(plan_json(prediction, problems))
    else:
        print_problems(problem for problem in problems if problem.severity != "note")
        print("\n".join([plan_text(prediction), *written]))
    return PROBLEMS if prediction.fits is False else OK


def _calibrate(args: argparse.Namespace) -> int:
    """Measure the present machine, and store its figures for ``--machine calibrated``."""
    from hf_fsdp_plugin.devices import accelerator_type
    from hf_fsdp_plugin.estimate.calibration import calibrate_ranks
    from hf_fsdp_plugin.estimate.machines import calibration_path

    problems: list[Problem] = []
    num_ranks = arguments.read_size(args, "world-size", problems) or 2
    if problems:
        raise SpecError(problems)
    path = calibration_path()
    machine = calibrate_ranks(num_ranks, args.device or accelerator_type() or "cpu", path)
    if args.json:
        print_json({"ok": True, "machine": machine.label, "file": str(path), "ranks": num_ranks})
    else:
        print(f"{machine.label}\nMeasured with {plural(num_ranks, 'rank')} at work, and written to {path}.")
    return OK


def _advise(args: argparse.Namespace, planned: Planned) -> int:
    """Print the planner's answer. Returns 1 if nothing fits."""
    from hf_fsdp_plugin.cli.plan.advise import advice_json, advice_text, num_machines_of, written_row
    from hf_fsdp_plugin.estimate.planner.advice import compare_with_tree
    from hf_fsdp_plugin.estimate.planner.search import advise

    plan, workload, spec = planned.plan, planned.workload, planned.plan.spec
    if planned.gpu_memory is None:
        raise SpecError([_NO_MEMORY])
    num_machines = num_machines_of(spec, plan.world_size, planned.machine)
    advice = advise(
        planned.model,
        workload,
        global_batch=workload.micro_batch * workload.accumulation * plan.world_size,
        gpu_memory=planned.gpu_memory,
        num_machines=num_machines,
        gpus_per_machine=plan.world_size // num_machines,
        machine=planned.machine,
        version=plan.version,
        precision=spec.precision.param,
        wrap={name: value for name, value, _ in spec.settings() if name.startswith("wrap.") and spec.asked(name)},
    )
    chosen, written = written_row(advice), []
    if args.html is not None and chosen is not None:
        drawn = predict(replace(planned, plan=chosen.plan, workload=chosen.workload))
        written = write_page(args, replace(drawn, memory=chosen.memory))
    tree = compare_with_tree(advice, plan.num_params)
    if args.json:
        print_json(advice_json(advice, chosen, spec, tree))
    else:
        print_problems([_NO_PICTURES] if args.html is not None and chosen is None else [])
        print("\n".join([*written, advice_text(advice, chosen, spec, tree)]))
    return OK if advice.best is not None else PROBLEMS
