"""The arguments of ``hf-fsdp plan`` that are not settings of FSDP, and their problems."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, get_args

from hf_fsdp_plugin.estimate.sizes import SPELLINGS, parse_size
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.problems import Origin, Problem

if TYPE_CHECKING:
    from torch import nn

LARGEST: Final[Mapping[str, int]] = {
    "world-size": 1 << 20,
    "micro-batch": 1 << 20,
    "seq-len": 1 << 24,
    "accumulation": 1 << 20,
    "lora-rank": 1 << 16,
}
_DEFAULT_LENGTH: Final = 2048
_QLORA_RANK: Final = 16


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


def read_size(args: argparse.Namespace, name: str, problems: list[Problem]) -> int | None:
    """Return a number of the command line; ``None`` if it is absent, or invalid, which is reported."""
    text = getattr(args, name.replace("-", "_"))
    if text is None:
        return None
    largest = LARGEST.get(name, 1 << 24)
    try:
        size = int(text)
    except ValueError:
        size = 0
    if 1 <= size <= largest:
        return size
    problems.append(
        _problem("FSDP-E722", name, text, f"{text!r} is not a whole number between 1 and {largest:,}.", "Correct it.")
    )
    return None


def read_gpu_memory(args: argparse.Namespace, problems: list[Problem]) -> int | None:
    """Return the memory of a device in bytes; ``None`` if it is not given, or invalid, which is reported."""
    text: str | None = args.gpu_memory
    if text is None:
        return None
    size = parse_size(text)
    if size is None:
        message = f"{text!r} is not a size of memory."
        problems.append(_problem("FSDP-E723", "gpu-memory", text, message, f"Write {SPELLINGS}."))
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
