"""Time and memory of ``hfp.stream_parameters``, beside the same all-gathers alone.

Two CPU ranks shard a random Llama in fp32, and take all of its tensors without keeping any. The all-gathers alone are
those of the same shards, in the same order, into new tensors, one after the other. Both alternate. The peak is what
torch's CPU allocator holds above the shards, also as a multiple of the largest unit.

    python -m scripts.bench stream    (three minutes on 2 cores; writes docs/results/stream.json)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.allocator import AllocatorCounter, restart_with_counter
from scripts.bench.common import main_of_two_ranks, make_llama, make_parser
from scripts.bench.tables.update_results import write_result

LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 12_000}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "stream")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="a tiny model, whose figures mean nothing")
    return parser.parse_args()


def measure() -> None:
    args = parse_args()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {str(version): _measure(version, args) for version in (1, 2)}
    if dist.get_rank() == 0:
        head = {"ranks": 2, "rounds": args.rounds, "threads": torch.get_num_threads()}
        write_result("stream", args.out, {**head, "versions_of_fsdp": found})
    dist.barrier()
    dist.destroy_process_group()


def _measure(version: int, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from accelerate.state import AcceleratorState, GradientState

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.backends.sharding.shard import plan_of
    from hf_fsdp_plugin.torch_private.modules import local_tensor

    config = {
        "distributed_type": "FSDP", "num_processes": 2, "use_cpu": True,
        "fsdp_config": {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }  # fmt: skip
    accelerator = hfp.accelerator(hfp.load_spec(config, environ={}))
    model = make_llama(num_attention_heads=16, num_key_value_heads=16, **(SMALL if args.small else LARGE))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model = accelerator.prepare(model)
    plan = plan_of(model)
    assert plan is not None
    largest = max(unit.num_params for unit in plan.units) * 4
    flats = [flat for unit, flat in _flat_units(model)]
    shards = [local_tensor(parameter.detach()) for parameter in flats or model.parameters()]
    sent: dict[str, int] = {}
    ways: dict[str, Callable[[], None]] = {
        "all_gathers": lambda: _gather(shards),
        "stream": lambda: _consume(hfp.stream_parameters(model)),
        "stream_bf16": lambda: _consume(hfp.stream_parameters(model, dtype=torch.bfloat16)),
        "stream_unchanged": lambda: _consume(hfp.stream_parameters(model, changed_since=sent)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        for way, run in ways.items():
            accelerator.wait_for_everyone()
            start = time.perf_counter()
            run()
            accelerator.wait_for_everyone()
            if number:  # the first round touches new memory
                seconds[way].append(time.perf_counter() - start)
    ratios = [own / alone for own, alone in zip(seconds["stream"], seconds["all_gathers"], strict=True)]
    counter = AllocatorCounter()
    before = counter.current
    counter.reset_peak()
    ways["stream"]()
    peak = counter.peak - before
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    return {
        "weights_bytes": whole,
        "largest_unit_bytes": largest,
        "peak_bytes": peak,
        "peak_in_units": round(peak / largest, 2),
        "seconds": {way: round(statistics.median(values), 3) for way, values in seconds.items()},
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(value, 3) for value in statistics.quantiles(ratios, n=4)[::2]],
    }


def _flat_units(model: Any) -> list[tuple[Any, Any]]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from hf_fsdp_plugin.torch_private import fsdp1

    return fsdp1.flat_units(model) if isinstance(model, FullyShardedDataParallel) else []


def _gather(shards: list[Any]) -> None:
    import torch.distributed as dist

    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    for shard in shards:
        all_gather(shard.new_empty(shard.shape[0] * 2, *shard.shape[1:]), shard)


def _consume(stream: Any) -> None:
    for _name, _tensor in stream:
        del _tensor


def main() -> int:
    parse_args()  # --help, and unknown arguments, before the restart
    restart_with_counter()
    return main_of_two_ranks(__file__, measure)


if __name__ == "__main__":
    raise SystemExit(main())
