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

    num_params = sum(parameter.numel() for parameter in make_model(args).parameters())
    losses: dict[str, list[float]] = {"plugin": [], "hand": []}
    times: dict[str, list[float]] = {"plugin": [], "hand": []}
    loops = {"plugin": plugin, "hand": by_hand}
    for name, step in loops.items():
        losses[name] += block(step, args.warmup)[1]
    for pair in range(args.pairs):
        for name in ("plugin", "hand") if pair % 2 == 0 else ("hand", "plugin"):
            seconds, seen = block(loops[name], args.block)
            times[name].append(seconds)
            losses[name] += seen
        if rank == 0:
            now = f"plugin {times['plugin'][-1]:.3f} s, by hand {times['hand'][-1]:.3f} s"
            print(f"[{pair + 1:2}/{args.pairs}] {now}, ratio {times['plugin'][-1] / times['hand'][-1]:.4f}", flush=True)
    if rank == 0:
        write(args, times, losses, num_params)
    dist.barrier()
    dist.destroy_process_group()


def write(
    args: argparse.Namespace, times: dict[str, list[float]], losses: dict[str, list[float]], num_params: int
) -> None:
    ratios = [ours / theirs for ours, theirs in zip(times["plugin"], times["hand"], strict=True)]
    low, high = median_interval(ratios)
    quartiles = statistics.quantiles(ratios, n=4)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["plugin"], losses["hand"], strict=True))
    result = {
        "model": f"Llama, {args.layers} layers, hidden {args.hidden}, {num_params / 1e6:.1f} M parameters, fp32",
        "per_rank_batch": [args.batch, args.length],
        "ranks": 2,
        "pairs": args.pairs,
        "steps_per_block": args.block,
        "plugin_step_seconds": round(statistics.median(times["plugin"]), 4),
        "hand_step_seconds": round(statistics.median(times["hand"]), 4),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "ratio_median_95": [round(low, 4), round(high, 4)],
        "largest_relative_loss_difference": apart,
    }
    write_result("step_overhead", args.out, result)


def main() -> int:
    args = parse_args()
    return main_of_two_ranks(__file__, lambda: measure(args))


if __name__ == "__main__":
    raise SystemExit(main())
