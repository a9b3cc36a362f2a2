"""The arguments of ``hf-fsdp plan``: which there are, which have an effect together, and what they ask to predict."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, get_args

from hf_fsdp_plugin.cli import check
from hf_fsdp_plugin.cli.model_plan import load_model, plan_of
from hf_fsdp_plugin.cli.verbs import check_needs
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.launcher.flags import UsageError
from hf_fsdp_plugin.problems import Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.launchers import default_config_file
from hf_fsdp_plugin.text import SIZE_SPELLINGS, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.machines import Machine
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

_PICTURES: Final = frozenset({"html", "png", "force"})
_CONFIG: Final = frozenset(
    {"model", "config_option", "config_file", "fsdp", "fsdp_config", "overrides", "distributed_config"}
)
_STEP: Final = frozenset(
    {
        "world_size", "micro_batch", "seq_len", "global_batch", "accumulation", "optimizer", "update_loop", "no_clip",
        "attention", "lora_rank", "qlora",
    }
)  # fmt: skip
_MODES: Final = {
    "calibrate": frozenset({"world_size", "device", "json"}),
    "zero_table": _CONFIG | _STEP | {"params", "sync_each_batch", "device", "json"},
    "advise": _CONFIG | _STEP | _PICTURES | {"gpu_memory", "machine", "json"},
    "": _CONFIG | _STEP | _PICTURES | {
        "sync_each_batch", "gpu_memory", "machine", "device", "scaling", "json",
    },
}  # fmt: skip
"""Flag that selects what the verb does -> other flags that have an effect then; "" for the prediction."""
_FORMULAS: Final = frozenset({"params", "world_size", "json"})
"""Flags of ``--zero-table`` without a model."""
_NEEDS: Final = {
    "force": ("html", "png"),
    "scaling": ("machine",),
}
"""Flag -> flags of which it needs one."""
_LARGEST: Final = {"world-size": 1 << 20, "micro-batch": 1 << 20, "accumulation": 1 << 20, "lora-rank": 1 << 16}
_DEFAULT_LENGTH: Final = 2048
_QLORA_RANK: Final = 16
_DEFAULTS: Final = ("full_shard auto_wrap", "precision.param=bf16")
"""FSDP words and a setting, if the user sets none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What the verb was asked to predict.

    Attributes:
        gpu_memory: bytes of one device, as given or of the machine; ``None`` if unknown.
        machine: the machine that was named.
    """

    plan: FsdpPlan
    model: nn.Module
    workload: Workload
    gpu_memory: int | None
    machine: Machine | None


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a rank trains in one step. Sizes are text: all invalid ones are reported together."""
    parser.add_argument("--world-size", metavar="N", help="number of ranks (default: num_processes)")
    parser.add_argument("--micro-batch", metavar="B", default="1", help="samples per rank and forward (default: 1)")
    parser.add_argument(
        "--seq-len", metavar="S", help=f"tokens per sample (default: {_DEFAULT_LENGTH}, or the model's maximum)"
    )
    parser.add_argument("--global-batch", metavar="G", help="samples per optimizer step; sets --accumulation")
    parser.add_argument("--accumulation", metavar="N", help="micro-batches per optimizer step (default: 1)")
    parser.add_argument(
        "--sync-each-batch", action="store_true", help="reduce gradients after every micro-batch, not only the last"
    )
    parser.add_argument("--optimizer", choices=get_args(Optimizer), default="adamw", help="default: adamw")
    loop = parser.add_mutually_exclusive_group()
    for name in get_args(UpdateLoop):
        flag = f"--{name.replace('_', '-')}"
        loop.add_argument(flag, action="store_const", const=name, dest="update_loop", help=f"{name} optimizer updates")
    parser.add_argument("--no-clip", action="store_true", help="gradients are not clipped")
    parser.add_argument("--attention", choices=get_args(Attention), default="sdpa", help="default: sdpa")
    parser.add_argument("--lora-rank", metavar="R", help="train LoRA adapters of this rank on all linear layers")
    parser.add_argument("--qlora", action="store_true", help="LoRA (rank 16 by default) on weights in 4 bits")
    parser.add_argument("--gpu-memory", metavar="SIZE", help='memory of a device: "80GB", "80GiB" or 80')


def add_time_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time")
    group.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="predict the time of a step on a100-40gb, a100-80gb, h100-sxm, h100-pcie, h100-96gb-500w, h200, "
        "b200, or with another network, as h100-sxm:efa-3200; `calibrated` for the present machine",
    )
    group.add_argument(
        "--calibrate", action="store_true", help="measure the present machine with --world-size ranks, and stop"
    )
    group.add_argument("--scaling", action="store_true", help="also print the time on 8 to 4,096 ranks of --machine")


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures")
    group.add_argument("--html", metavar="OUT", help="write an HTML page with pictures; it needs no network")
    group.add_argument("--png", metavar="OUT", help="write the pictures as a PNG; needs matplotlib")
    group.add_argument("--force", action="store_true", help="overwrite the files of --html and --png")


def check_targets(args: argparse.Namespace) -> list[Problem]:
    """Return a problem for each file that exists, unless it may be overwritten."""
    targets = [target for target in (args.html, args.png) if target is not None]
    return [
        Problem(code="FSDP-E833", message=f"{target} exists.", fix="Pass --force to overwrite it, or another name.")
        for target in targets
        if os.path.lexists(target) and not args.force
    ]


def check_flags(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse a combination of flags of which one would have no effect, so that none is ignored silently.

    Args:
        names: the configs that were named.

    Raises:
        UsageError: the combination is refused.
    """
    given: dict[str, str] = args.given
    mode = next((name for name in _MODES if name in given), "")
    applies = _MODES[mode]
    shown = given.get(mode, "")
    if mode == "zero_table":
        applies, shown = (applies - {"params"}, f"{shown} --model") if args.model else (_FORMULAS, f"{shown} alone")
    for name, flag in given.items():
        if name != mode and name not in applies:
            raise UsageError(f"{flag} has no effect with {shown}." if mode else f"{flag} is only for --zero-table.")
    check_needs(args, _NEEDS)
    if mode == "zero_table" and args.model is None and None in (args.params, args.world_size):
        raise UsageError("--zero-table needs --params and --world-size, or --model.")
    if mode not in ("zero_table", "calibrate") and (args.model is None or len(names) > 1):
        raise UsageError("give --model, and at most one config.")
    takes_settings = mode != "calibrate" and applies is not _FORMULAS
    rest = () if takes_settings else (*([args.configs] if args.configs else []), *args.command_line)
    if rest:
        raise UsageError(f"{rest[0]} has no effect with {shown}.")


def read_subject(
    args: argparse.Namespace, names: Sequence[str], problems: list[Problem]
) -> tuple[Planned | None, str | None]:
    """Return what to predict, or ``None`` after errors, and the name of the config. Collects all problems."""
    world_size = read_size(args, "world-size", problems)
    gpu_memory = read_gpu_memory(args, problems)
    machine = _machine(args, problems)
    if gpu_memory is None and args.gpu_memory is None and machine is not None:
        gpu_memory = int(machine.memory_bytes) or None
    lora_rank = read_lora_rank(args, problems)
    model, model_problems = load_model(args.model)
    model = _adapted(args, model, lora_rank, problems)
    args.model, args.world_size, args.device_of_plan = None, world_size, args.device
    config = check.config_named(names[0]) if names else None
    if config is None and not (args.fsdp or args.fsdp_config or args.distributed_config):
        config = default_config_file(os.environ)
        if config is None and not args.command_line and not args.overrides:
            args.fsdp, args.overrides = _DEFAULTS[0], [_DEFAULTS[1]]
    checked = check.check_config(args, config)
    world_size = world_size or check.smallest_world_size(checked.spec)
    workload = read_workload(args, world_size, problems)
    problems += [*model_problems, *checked.problems]
    shown = config.shown if config is not None else None
    if model is None or workload is None:
        return None, shown
    length, too_long = sequence_length(workload, model)
    problems += [too_long] if too_long is not None else []
    if has_errors(problems):
        return None, shown
    device_type = args.device or ("cpu" if checked.spec.launch.use_cpu else "cuda")
    plan, more = plan_of(checked.spec, model, world_size=world_size, device_type=device_type)
    problems += [problem for problem in more if problem not in problems]
    if plan is None or has_errors(problems):
        return None, shown
    workload = replace(workload, seq_len=length)
    return Planned(plan=plan, model=model, workload=workload, gpu_memory=gpu_memory, machine=machine), shown


def _adapted(
    args: argparse.Namespace, model: nn.Module | None, lora_rank: int | None, problems: list[Problem]
) -> nn.Module | None:
    """Return the model with LoRA adapters if they are asked for; ``None`` after errors."""
    if model is None or lora_rank is None:
        return model
    from hf_fsdp_plugin.integrations.peft import with_lora

    try:
        return with_lora(model, rank=lora_rank, quantized=args.qlora)
    except SpecError as error:
        problems += error.problems
        return None


def _machine(args: argparse.Namespace, problems: list[Problem]) -> Machine | None:
    """Return the machine of ``--machine``; ``None`` without one, or if it is unknown, which is reported."""
    if args.machine is None:
        return None
    from hf_fsdp_plugin.estimate.machines import machine_named

    try:
        return machine_named(args.machine)
    except SpecError as error:
        problems += error.problems
        return None


def read_size(args: argparse.Namespace, name: str, problems: list[Problem]) -> int | None:
    """Return a number of the command line; ``None`` if it is absent, or invalid, which is reported."""
    text = getattr(args, name.replace("-", "_"))
    if text is None:
        return None
    largest = _LARGEST.get(name, 1 << 24)
    with suppress(ValueError):
        if 1 <= int(text) <= largest:
            return int(text)
    problems.append(
        _problem("FSDP-E722", name, text, f"{text!r} is not a whole number between 1 and {largest:,}.", "Correct it.")
    )
    return None


def read_gpu_memory(args: argparse.Namespace, problems: list[Problem]) -> int | None:
    """Return the memory of a device in bytes; ``None`` if it is not given, or invalid, which is reported."""
    text: str | None = args.gpu_memory
    if text is None:
        return None
    size = parse_bytes(text)
    if size is None:
        message = f"{text!r} is not a size of memory."
        problems.append(_problem("FSDP-E723", "gpu-memory", text, message, f"Write {SIZE_SPELLINGS}."))
    return size


def read_workload(args: argparse.Namespace, world_size: int | None, problems: list[Problem]) -> Workload | None:
    """Return the workload, without the default sequence length; ``None`` if an argument is invalid."""
    before = len(problems)
    micro_batch = read_size(args, "micro-batch", problems)
    seq_len = read_size(args, "seq-len", problems)
    accumulation = read_size(args, "accumulation", problems)
    global_batch = read_size(args, "global-batch", problems)
    if len(problems) > before or micro_batch is None:
        return None
    if global_batch is not None and world_size is not None:
        accumulation = _accumulation(args, world_size, micro_batch, global_batch, accumulation, problems)
    return Workload(
        micro_batch=micro_batch,
        seq_len=seq_len or 0,
        accumulation=accumulation or 1,
        sync_each_batch=args.sync_each_batch,
        optimizer=args.optimizer,
        update_loop=args.update_loop,
        clip_norm=not args.no_clip,
        attention=args.attention,
    )


def _accumulation(
    args: argparse.Namespace,
    world_size: int,
    micro_batch: int,
    global_batch: int,
    accumulation: int | None,
    problems: list[Problem],
) -> int:
    """Return the micro-batches per step. Reports a global batch that these sizes cannot make."""
    per_pass = world_size * micro_batch
    found, rest = divmod(global_batch, per_pass)
    if rest or found < 1 or accumulation not in (None, found):
        smaller = global_batch - rest
        near = f"{smaller} or {smaller + per_pass}" if smaller else str(per_pass)
        message = f"a global batch of {global_batch} is not divisible by {per_pass}, which is {world_size} ranks × "
        message += f"micro-batch {micro_batch}."
        if not rest and found >= 1:
            message = f"a global batch of {global_batch} on {world_size} ranks with micro-batch {micro_batch} needs "
            message += f"{found} micro-batches per step, but --accumulation is {accumulation}."
            near = str(per_pass * (accumulation or 1))
        fix = f"Set --global-batch to {near}, or change --micro-batch."
        problems.append(_problem("FSDP-E725", "global-batch", args.global_batch, message, fix))
        return 1
    return found


def read_lora_rank(args: argparse.Namespace, problems: list[Problem]) -> int | None:
    """Return the rank of LoRA adapters; ``None`` without adapters, or if it is invalid, which is reported."""
    rank = read_size(args, "lora-rank", problems)
    return rank or (_QLORA_RANK if args.qlora and args.lora_rank is None else None)


def sequence_length(workload: Workload, model: nn.Module) -> tuple[int, Problem | None]:
    """Return the tokens per sample, and the problem of a sequence that the model does not support."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    maximum = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
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
