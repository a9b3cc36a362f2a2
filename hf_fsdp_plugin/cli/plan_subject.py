"""What ``hf-fsdp plan`` is asked to predict: model, plan, workload and machine, with all problems at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.cli import check
from hf_fsdp_plugin.cli.model_plan import load_model, plan_of
from hf_fsdp_plugin.cli.plan_arguments import (
    read_gpu_memory,
    read_lora_rank,
    read_size,
    read_workload,
    sequence_length,
)
from hf_fsdp_plugin.problems import Problem, SpecError, has_errors
from hf_fsdp_plugin.sources.accelerate_launch import default_config_file

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.machines import Machine
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.model import FsdpPlan

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
    from hf_fsdp_plugin.integrations.peft.planned_adapters import with_lora

    try:
        return with_lora(model, rank=lora_rank, quantized=args.qlora)
    except SpecError as error:
        problems += error.problems
        return None


def _machine(args: argparse.Namespace, problems: list[Problem]) -> Machine | None:
    """Return the machine of ``--machine``; ``None`` without one, or if it is unknown, which is reported."""
    if args.machine is None:
        return None
    from hf_fsdp_plugin.estimate.machine_file import machine_named

    try:
        return machine_named(args.machine)
    except SpecError as error:
        problems += error.problems
        return None
