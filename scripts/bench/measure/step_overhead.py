"""Compare the step time through the plugin with a hand-written fully_shard loop with the same units.

Both models are on the same two gloo ranks and have the same initial weights and batches. The loops run alternately in
short blocks, and the order is reversed from pair to pair, so that other load on the machine affects both equally. The
result is the median of the ratios of all pairs, with quartiles and a bootstrap interval of the median.

    python -m scripts.bench step_overhead              (four minutes on 2 cores; writes docs/results/step_overhead.json)
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from scripts.bench.common import main_of_two_ranks, make_llama, make_parser
from scripts.bench.tables.update_results import write_result

CONFIG = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "use_cpu": True,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
MAX_GRAD_NORM = 1.0

Step = Callable[[], float]


def parse_args() -> argparse.Namespace:
    return parse_blocks(make_parser(__doc__, "step_overhead"), pairs=20)


def parse_blocks(parser: argparse.ArgumentParser, *, pairs: int) -> argparse.Namespace:
    """Return the arguments of a measurement that compares blocks of steps in turn."""
    parser.add_argument("--pairs", type=int, default=pairs, help="pairs of blocks")
    parser.add_argument("--block", type=int, default=2, help="steps in a block")
    parser.add_argument("--warmup", type=int, default=3, help="steps before measuring")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    return parser.parse_args()


def make_model(args: argparse.Namespace) -> Any:
    return make_llama(
        vocab_size=8192,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


def batches(args: argparse.Namespace, rank: int) -> Iterator[Any]:
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    while True:
        yield torch.randint(0, 8192, (args.batch, args.length), generator=generator)


def make_step(args: argparse.Namespace, rank: int, model: Any, optimizer: Any, backward: Any, clip: Any) -> Step:
    """Return a function that runs one training step and returns the loss."""
    data = batches(args, rank)

    def step() -> float:
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        clip(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def plugin_loop(args: argparse.Namespace, rank: int) -> tuple[Step, list[str]]:
    """Return the step through the plugin's Accelerator, and the names of the units."""
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.backends.sharding.shard import plan_of

    accelerator = hfp.accelerator(hfp.load_spec(CONFIG))
    model = make_model(args)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    step = make_step(args, rank, model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)
    plan = plan_of(model)
    assert plan is not None
    return step, sorted(unit.name for unit in plan.units if unit.name)


def hand_written_loop(args: argparse.Namespace, rank: int) -> tuple[Step, list[str]]:
    """Return the step of a loop that uses torch only, and the names of the units."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(args)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = make_step(args, rank, model, optimizer, torch.Tensor.backward, torch.nn.utils.clip_grad_norm_)
    layers = [f"model.layers.{index}" for index in range(args.layers)]
    return step, sorted([*layers, "model.embed_tokens", "model.norm + lm_head"])


def block(step: Step, num_steps: int) -> tuple[float, list[float]]:
    """Run a block of steps on both ranks. Returns the seconds per step and the losses."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    losses = [step() for _ in range(num_steps)]
    dist.barrier()
    return (time.perf_counter() - start) / num_steps, losses


def median_interval(ratios: list[float], *, draws: int = 10_000) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def measure(args: argparse.Namespace) -> None:
    """Measure both loops. Runs on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    plugin, plugin_units = plugin_loop(args, rank)
    by_hand, units = hand_written_loop(args, rank)
    if plugin_units != units:
        raise SystemExit(
            f"the units differ, so the times cannot be compared:\n  plugin {plugin_units}\n  hand   {units}"
        )

    first = [block(step, args.warmup)[1] for step in (plugin, by_hand)]
    times, losses = alternate(args, rank, lambda: block(plugin, args.block), lambda: block(by_hand, args.block))
    if rank == 0:
        ours, theirs = (a + b for a, b in zip(first, losses, strict=True))
        result = {
            **compared(args, *times),
            "per_rank_batch": [args.batch, args.length],
            "steps_per_block": args.block,
            "plugin_step_seconds": round(statistics.median(times[0]), 4),
            "hand_step_seconds": round(statistics.median(times[1]), 4),
            "largest_relative_loss_difference": max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)),
        }
        write_result("step_overhead", args.out, result)
    dist.barrier()
    dist.destroy_process_group()


Block = Callable[[], tuple[float, list[float]]]


def alternate(
    args: argparse.Namespace, rank: int, ours: Block, theirs: Block
) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Run blocks of two loops in turn. Returns the seconds per step of each block and the losses, of both loops."""
    times: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    for pair in range(args.pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds, seen = (ours, theirs)[which]()
            times[which].append(seconds)
            losses[which].extend(seen)
        if rank == 0:
            (*_, one), (*_, other) = times
            print(f"[{pair + 1:2}/{args.pairs}] {one:.3f} and {other:.3f} s, ratio {one / other:.4f}", flush=True)
    return times, losses


def compared(args: argparse.Namespace, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return what was compared, and the median of the ratios of pairs of blocks with its interval."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    first, _, third = statistics.quantiles(ratios, n=4)
    num_params = sum(parameter.numel() for parameter in make_model(args).parameters())
    return {
        "model": f"Llama, {args.layers} layers, hidden {args.hidden}, {num_params / 1e6:.1f} M parameters, fp32",
        "ranks": 2,
        "pairs": args.pairs,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(first, 4), round(third, 4)],
        "ratio_median_95": [round(low, 4), round(high, 4)],
    }


def main() -> int:
    args = parse_args()
    return main_of_two_ranks(__file__, lambda: measure(args))


if __name__ == "__main__":
    raise SystemExit(main())
