"""Measure what the records of collectives, from which hangs are diagnosed, cost in a step.

Two gloo ranks train a Llama through the plugin. Blocks of steps with and without records alternate in one run, and the
order is reversed from pair to pair. The processor time of the record of one collective (with its wait and its unit) is
also measured alone, and multiplied by the number of collectives in a step, because a share below a percent disappears
in the noise of a machine with other load. So is the thread that watches the ranks, on the rank that watches both.

    python -m scripts.bench hang_overhead              (six minutes on 2 cores; writes docs/results/hang_overhead.json)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.common import main_of_two_ranks, make_parser
from scripts.bench.measure.step_overhead import block, make_model, median_interval, parse_blocks, plugin_loop
from scripts.bench.tables.update_results import write_result

NUM_CALLS = 20_000
IDLE_SECONDS = 20.0


def parse_args() -> argparse.Namespace:
    return parse_blocks(make_parser(__doc__, "hang_overhead"), pairs=40)


def record_seconds(record: Any) -> float:
    """Return the processor time that records add to one collective of a unit: three hooks and what they write."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.call_hooks import record_collective, record_wait, unit_method

    class Unit:
        _module_fqn = "model.layers.0"

    def all_gather_single(group: Any, output: Any, tensor: Any) -> Any:
        return tensor

    group, unit, tensor = dist.group.WORLD, Unit(), torch.empty(8)
    start, end = record_collective(all_gather_single), record_wait(lambda work: None)
    method = unit_method(lambda unit: end(start(group, tensor, tensor)))

    def seconds(is_open: bool) -> float:
        record().is_open = is_open
        begin = time.process_time()
        for _ in range(NUM_CALLS):
            method(unit)
        return (time.process_time() - begin) / NUM_CALLS

    seconds(True)
    return statistics.median(seconds(True) - seconds(False) for _ in range(5))


def measure(args: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.hangs.calls import read_header, record
    from hf_fsdp_plugin.integrations.failure_watch import watch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    watch().arm()
    assert watch().armed is not None
    calls = watch().armed.files.calls
    step, _ = plugin_loop(args, rank)
    block(step, args.warmup)
    before = read_header(calls)
    block(step, args.block)
    after = read_header(calls)
    assert before is not None and after is not None
    calls_per_step = (after.count - before.count - 2) / args.block  # without the two barriers of a block
    times = alternate(args, step, lambda is_open: setattr(record(), "is_open", is_open), rank)
    per_call = record_seconds(record())
    watched = idle_share()
    watch().close()
    watcher_share = watched - idle_share()  # without the threads of gloo
    if rank == 0:
        write(args, times, calls_per_step, per_call, watcher_share)
    dist.barrier()
    dist.destroy_process_group()


def idle_share() -> float:
    """Return the part of a core that this process uses while only the thread of the watch runs."""
    begin = time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - begin) / IDLE_SECONDS


def alternate(
    args: argparse.Namespace, step: Callable[[], float], set_open: Callable[[bool], None], rank: int
) -> dict[bool, list[float]]:
    """Return the seconds per step of each block, with and without records."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(args.pairs):
        for is_open in (True, False) if pair % 2 == 0 else (False, True):
            set_open(is_open)
            times[is_open].append(block(step, args.block)[0])
        if rank == 0:
            ratio = times[True][-1] / times[False][-1]
            print(f"[{pair + 1:2}/{args.pairs}] {times[True][-1]:.3f} s with records, ratio {ratio:.4f}", flush=True)
    return times


def write(
    args: argparse.Namespace,
    times: dict[bool, list[float]],
    calls_per_step: float,
    per_call: float,
    watcher_share: float,
) -> None:
    ratios = [armed / unarmed for armed, unarmed in zip(times[True], times[False], strict=True)]
    low, high = median_interval(ratios)
    step_seconds = statistics.median(times[False])
    num_params = sum(parameter.numel() for parameter in make_model(args).parameters())
    result = {
        "model": f"Llama, {args.layers} layers, hidden {args.hidden}, {num_params / 1e6:.1f} M parameters, fp32",
        "ranks": 2,
        "pairs": args.pairs,
        "step_seconds": round(step_seconds, 4),
        "calls_per_step": calls_per_step,
        "microseconds_per_call": round(1e6 * per_call, 3),
        "share": calls_per_step * per_call / step_seconds,
        "watcher_share": watcher_share,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_median_95": [round(low, 4), round(high, 4)],
    }
    write_result("hang_overhead", args.out, result)


def main() -> int:
    args = parse_args()
    return main_of_two_ranks(__file__, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
