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
from typing import Any

from scripts.bench.common import main_of_two_ranks, make_parser
from scripts.bench.measure.step_overhead import alternate, block, compared, parse_blocks, plugin_loop
from scripts.bench.tables.update_results import write_result

NUM_CALLS = 20_000
IDLE_SECONDS = 20.0


def parse_args() -> argparse.Namespace:
    return parse_blocks(make_parser(__doc__, "hang_overhead"), pairs=40)


def record_seconds(calls: Any) -> float:
    """Return the processor time that records add to one collective of a unit: three hooks and what they write."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.collective_hooks import record_collective, record_wait, unit_method

    class Unit:
        _module_fqn = "model.layers.0"

    def all_gather_single(group: Any, output: Any, tensor: Any) -> Any:
        return tensor

    group, unit, tensor = dist.group.WORLD, Unit(), torch.empty(8)
    start, end = record_collective(all_gather_single), record_wait(lambda work: None)
    method = unit_method(lambda unit: end(start(group, tensor, tensor)))

    def seconds(is_open: bool) -> float:
        calls.is_open = is_open
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

    def steps(is_open: bool) -> tuple[float, list[float]]:
        record().is_open = is_open
        return block(step, args.block)

    times, _ = alternate(args, rank, lambda: steps(True), lambda: steps(False))
    per_call = record_seconds(record())
    watched = idle_share()
    watch().close()
    watcher_share = watched - idle_share()  # without the threads of gloo
    if rank == 0:
        step_seconds = statistics.median(times[1])
        result = {
            **compared(args, *times),
            "step_seconds": round(step_seconds, 4),
            "calls_per_step": calls_per_step,
            "microseconds_per_call": round(1e6 * per_call, 3),
            "share": calls_per_step * per_call / step_seconds,
            "watcher_share": watcher_share,
        }
        write_result("hang_overhead", args.out, result)
    dist.barrier()
    dist.destroy_process_group()


def idle_share() -> float:
    """Return the part of a core that this process uses while only the thread of the watch runs."""
    begin = time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - begin) / IDLE_SECONDS


def main() -> int:
    args = parse_args()
    return main_of_two_ranks(__file__, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
