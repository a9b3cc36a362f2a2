"""``hf-fsdp plan``: Predict memory, communication and time of a training step, for a model, a config and a number of
ranks.

Examples::

    hf-fsdp plan --model meta-llama/Llama-3.1-8B --config fsdp.yaml --world-size 8 --gpu-memory 80GB
    hf-fsdp plan --model . --fsdp "full_shard auto_wrap" --mixed_precision bf16 --world-size 8 --seq-len 4096 --json
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from hf_fsdp_plugin.cli.output import exit_code, in_line_order, print_failure
from hf_fsdp_plugin.launcher.flags import FLAG_TABLES, Parser, add_setting_flags
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, UsageError, has_errors
from hf_fsdp_plugin.sources.config_location import default_config_file
from hf_fsdp_plugin.tools.check import verb as check
from hf_fsdp_plugin.tools.check.output import load_meta_model, plan_with_problems
from hf_fsdp_plugin.tools.common import SIZE_SPELLINGS, check_needs, nearest_multiples, parse_bytes, whole_number
from hf_fsdp_plugin.tools.convert.conversion import print_conversion
from hf_fsdp_plugin.tools.pages import refuse_present, write_page
from hf_fsdp_plugin.tools.plan.estimate.types import Attention, Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.tools.plan.output import Planned, predict, print_prediction

if TYPE_CHECKING:
    from torch import nn

_DEFAULT_LENGTH: Final = 2048
_QLORA_RANK: Final = 16
_DEFAULTS: Final = ("full_shard auto_wrap", "precision.param=bf16")
"""Options of ``fsdp``, and a setting, that are used if the user sets none."""
_NOT_ADVISED: Final = frozenset({"sync_each_batch", "device"})
"""Flags that have no effect with ``--advise``, and are refused, so that no flag is ignored silently."""
_LARGEST: Final = 1 << 24


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--model", metavar="DIR|ID", help="folder with a config.json, or a model id")
    parser.add_argument("--config", metavar="CONFIG", dest="config_option", help="the same as CONFIG")
    check.add_config_arguments(parser, several=False)
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw", help="default: adamw")
    loops = parser.add_mutually_exclusive_group()
    for name in get_args(UpdateLoop):
        flag = f"--{name.replace('_', '-')}"
        loops.add_argument(flag, action="store_const", const=name, dest="update_loop", help=f"{name} optimizer updates")
    parser.add_argument("--attention", choices=get_args(Attention), default="sdpa", help="default: sdpa")
    size = whole_number(1, _LARGEST)
    for name, (value, about) in FLAG_TABLES["plan"].items():
        kind: dict[str, Any] = {"metavar": value} if value else {"action": "store_true"}
        kind |= {"type": _memory} if value == "SIZE" else {"type": size} if len(value) == 1 else {}
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **kind)
    add_setting_flags(parser)
    parser.epilog = "also all setting flags of `hf-fsdp launch`: --mixed_precision bf16, --fsdp_version 2, --cpu, …"


def run(args: argparse.Namespace) -> int:
    """Print the prediction. Returns 0 if it fits or the memory is unknown, 1 if it does not fit or after errors."""
    names = [name for name in (args.configs, args.config_option, args.config_file) if name is not None]
    for name, flag in args.given.items():
        if args.advise and name in _NOT_ADVISED:
            raise UsageError(f"{flag} has no effect with --advise.")
    check_needs(args, {"force": ["html"]})
    if args.model is None or len(names) > 1:
        raise UsageError("give --model, and at most one config.")
    problems, shown = refuse_present(args), None
    try:
        planned, shown = (None, None) if problems else _read_subject(args, names, problems)
        if planned is not None and args.advise:
            from hf_fsdp_plugin.tools.plan.advise import print_advice

            return print_advice(args, planned)
        if planned is not None:
            prediction, written = predict(planned), []
            if args.html is not None:
                from hf_fsdp_plugin.tools.plan.page import plan_page

                written = write_page(Path(args.html), plan_page(prediction))
            return print_prediction(args, prediction, problems, written)
    except SpecError as error:
        problems += error.problems
    problems = in_line_order(dict.fromkeys(problems))
    failed = print_failure(problems, as_json=args.json)
    return exit_code(problems, shown) or failed


def _read_subject(
    args: argparse.Namespace, names: Sequence[str], problems: list[Problem]
) -> tuple[Planned | None, str | None]:
    """Return the subject of the prediction (``None`` after errors) and the config's name. Collects all problems."""
    from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named

    machine, gpu_memory = None, args.gpu_memory
    with _collected(problems):
        machine = machine_named(args.machine) if args.machine is not None else None
    if gpu_memory is None and machine is not None:
        gpu_memory = int(machine.memory_bytes) or None
    lora_rank = args.lora_rank or (_QLORA_RANK if args.qlora else None)
    model, of_model = None, list[Problem]()
    with _collected(of_model):
        model = load_meta_model(args.model)
        if lora_rank is not None:
            from hf_fsdp_plugin.tools.plan.adapters import with_lora

            model = with_lora(model, rank=lora_rank, quantized=args.qlora)
    args.model = None
    config = check.config_named(names[0]) if names else None
    if config is None and not (args.fsdp or args.fsdp_config or args.distributed_config):
        config = default_config_file(os.environ)
        if config is None and not args.command_line and not args.overrides:
            args.fsdp, args.overrides = _DEFAULTS[0], [_DEFAULTS[1]]
    checked = check.check_config(args, config)
    if not has_errors(checked.problems):
        print_conversion(checked.converted)
    world_size = args.world_size or check.smallest_world_size(checked.spec)
    workload = _read_workload(args, world_size, problems)
    problems += [*of_model, *checked.problems]
    shown = config.shown if config is not None else None
    if model is None:
        return None, shown
    length, too_long = sequence_length(workload, model)
    problems += [too_long] if too_long is not None else []
    if has_errors(problems):
        return None, shown
    device_type = args.device or ("cpu" if checked.spec.launch.use_cpu else "cuda")
    plan, more = plan_with_problems(checked.spec, model, world_size=world_size, device_type=device_type)
    problems += [problem for problem in more if problem not in problems]
    if plan is None or has_errors(problems):
        return None, shown
    workload = replace(workload, seq_len=length)
    return Planned(plan=plan, model=model, workload=workload, gpu_memory=gpu_memory, machine=machine), shown


@contextmanager
def _collected(problems: list[Problem]) -> Iterator[None]:
    """Collect the problems of a ``SpecError`` instead of raising it."""
    try:
        yield
    except SpecError as error:
        problems += error.problems


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of memory. Write {SIZE_SPELLINGS}.")
    return size


def _read_workload(args: argparse.Namespace, world_size: int, problems: list[Problem]) -> Workload:
    """Return the workload, without the default sequence length."""
    micro_batch, accumulation, global_batch = args.micro_batch or 1, args.accumulation, args.global_batch
    if global_batch is not None:
        factors, per_pass = f"{world_size} ranks × micro-batch {micro_batch}", world_size * micro_batch
        if accumulation is not None:
            factors, per_pass = f"{factors} × accumulation {accumulation}", per_pass * accumulation
        if global_batch % per_pass or (accumulation is not None and global_batch != per_pass):
            near = nearest_multiples(global_batch, per_pass) if accumulation is None else per_pass
            of = "divisible by " if accumulation is None else ""
            message = f"a global batch of {global_batch} is not {of}{per_pass}, which is {factors}."
            fix = f"Set --global-batch to {near}, or change --micro-batch."
            problems.append(_problem("FSDP-E725", "global-batch", str(global_batch), message, fix))
        accumulation = accumulation or max(1, global_batch // per_pass)
    return Workload(
        micro_batch=micro_batch,
        seq_len=args.seq_len or 0,
        accumulation=accumulation or 1,
        sync_each_batch=args.sync_each_batch,
        optimizer=args.optimizer,
        update_loop=args.update_loop,
        clip_norm=not args.no_clip,
        attention=args.attention,
    )


def sequence_length(workload: Workload, model: nn.Module) -> tuple[int, Problem | None]:
    """Return the tokens per sample, and the problem of a sequence that the model does not support."""
    from hf_fsdp_plugin.tools.meta_model import max_positions

    maximum = max_positions(model)
    length = workload.seq_len or min(_DEFAULT_LENGTH, maximum or _DEFAULT_LENGTH)
    if not maximum or length <= maximum:
        return length, None
    message = f"a sequence of {length:,} tokens is longer than the model's maximum of {maximum:,} "
    message += "(max_position_embeddings)."
    fix = f"Set --seq-len to at most {maximum:,}, or raise max_position_embeddings in the config."
    return length, _problem("FSDP-E724", "seq-len", str(length), message, fix)


def _problem(code: str, flag: str, text: str, message: str, fix: str) -> Problem:
    origin = Origin(source="command line", spelling=f"--{flag}", text=text)
    return Problem(code=code, message=f"--{flag}: {message}", fix=fix, origin=origin)
