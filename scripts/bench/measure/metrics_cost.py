"""Measure what the figures of a run and the search for slow ranks cost in a step.

Two gloo ranks train a Llama through the plugin. Blocks of steps with and without the clock alternate in one run, and
the order is reversed from pair to pair. The processor time of the clock in one step is also measured alone, with as
many phases, waits and rows as a step has, because a share below a percent disappears in the noise of a machine with
other load; so is a log with figures.

    python -m scripts.bench metrics_cost               (six minutes on 2 cores; writes docs/results/metrics_cost.json)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.common import main_of_two_ranks, make_parser
from scripts.bench.measure.step_overhead import alternate, block, compared, make_model, parse_blocks, plugin_loop
from scripts.bench.tables.update_results import write_result

NUM_STEPS = 2000
PROFILED = 8
"""Steps whose exposed communication is compared with the profile of the same steps."""


def parse_args() -> argparse.Namespace:
    return parse_blocks(make_parser(__doc__, "metrics_cost"), pairs=40)


def processor_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the processor time of a call: the median of five measurements."""

    def measured() -> float:
        begin = time.process_time()
        for _ in range(repeats):
            function()
        return (time.process_time() - begin) / repeats

    measured()
    return statistics.median(measured() for _ in range(5))


def clock_seconds(metrics: Any, optimizer: Any, ids: Any, waits_per_step: float) -> float:
    """Return the processor time that the clock adds to a step: its hooks alone, with and without the clock."""
    import torch

    from hf_fsdp_plugin.hangs.calls import record
    from hf_fsdp_plugin.observers import observers

    model, calls = torch.nn.Identity(), record()

    def step() -> None:
        with observers().phase("data"):
            pass
        metrics.begin_forward(model, (), {"input_ids": ids})
        with observers().phase("backward"):
            pass
        with observers().phase("clipping"):
            pass
        for _ in range(round(waits_per_step)):
            calls.waits(0)
            calls.waited()
        metrics.step_ended(optimizer)

    return processor_seconds(step, NUM_STEPS)


def exposed_shares(step: Callable[[], float], rows: Any) -> tuple[float, float]:
    """Return the share of exposed communication in the same steps by the clock, and by ``hf-fsdp profile``."""
    import torch.distributed as dist

    from hf_fsdp_plugin.metrics.figures import figures_of
    from hf_fsdp_plugin.tools.profile.run import Profiling
    from hf_fsdp_plugin.tools.profile.run_profile import ProfileOptions, read_ranks

    rank, before = dist.get_rank(), rows.count
    with tempfile.TemporaryDirectory() as folder:
        options = ProfileOptions(folder=folder, wait=1, warmup=1, active=PROFILED, after=0, stops=False)
        Profiling(options)
        for _ in range(options.last):
            step()
        [profile] = [each for each in read_ranks(Path(folder)) if each.rank == rank]
    begin, end = (rows[before + number - 1] for number in (options.last - PROFILED, options.last))
    share = figures_of({rank: begin}, {rank: end}, world_size=1)["communication_exposed"]
    return share, profile.total.exposed / profile.total.seconds


def flops_by_hand(args: argparse.Namespace, model: Any) -> float:
    """Return the FLOPs of a training step per token: those of the matrix products and of the attention."""
    import torch

    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    return 3.0 * (2 * weights + 4 * args.length * args.hidden * args.layers)


def measure(args: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.hangs.calls import record
    from hf_fsdp_plugin.integrations.run_metrics import run_metrics

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    step, _ = plugin_loop(args, rank)
    metrics, calls, waits = run_metrics(), record(), 0
    waited = calls.waited

    def count() -> None:
        nonlocal waits
        waits += 1
        waited()

    block(step, args.warmup)
    calls.waited = count  # type: ignore[method-assign]
    block(step, args.block)
    del calls.waited
    clock = metrics.clock

    def steps(is_on: bool) -> tuple[float, list[float]]:
        metrics.clock, calls.times_waits = clock if is_on else None, is_on
        return block(step, args.block)

    times, _ = alternate(args, rank, lambda: steps(True), lambda: steps(False))
    metrics.clock, calls.times_waits = clock, True
    per_step = clock_seconds(metrics, metrics.optimizer(), torch.zeros(args.batch, args.length), waits / args.block)
    per_log = processor_seconds(lambda: metrics.figures({"loss": 1.0}), 200)
    exposed = exposed_shares(step, metrics.rows[rank])
    by_hand = flops_by_hand(args, make_model(args))
    if rank == 0:
        step_seconds = statistics.median(times[1])
        result = {
            **compared(args, *times),
            "step_seconds": round(step_seconds, 4),
            "waits_per_step": waits / args.block,
            "microseconds_per_step": round(1e6 * per_step, 1),
            "microseconds_per_log": round(1e6 * per_log, 1),
            "share": per_step / step_seconds,
            "exposed_share": {"clock": exposed[0], "profile": exposed[1]},
            "flops_per_token": {"counted": metrics.flops, "by hand": by_hand},
        }
        write_result("metrics_cost", args.out, result)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    args = parse_args()
    return main_of_two_ranks(__file__, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
