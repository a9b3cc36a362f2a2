"""Measure a step of torch's Muon that the ranks divide: CPU time of each rank, and bytes sent to other ranks.

The model has equal layers of one square matrix. The same step on one rank is what the CPU time is compared with: N
ranks should each need 1/N of it. The bytes are compared with those of one all-gather and one reduce-scatter of the
momenta in fp32, in each of which a rank sends (N - 1) shards. ``undivided`` is a class with its own ``step``, which
runs on DTensors as before: every rank computes all matrices.

    python -m scripts.bench muon_step                (three minutes on 2 cores; writes docs/results/muon_step.json)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

WORLDS = (1, 2, 4)


def main() -> int:
    parser = make_parser(__doc__, "muon_step")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--measure", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.layers, args.hidden, args.steps, args.measure)
        return 0
    worlds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="muon_step_") as folder:
        for num_ranks in WORLDS:
            found = Path(folder) / f"{num_ranks}.json"
            if run_two_ranks(__file__, [*sys.argv[1:], "--measure", str(found)], num_ranks=num_ranks) != 0:
                return 1
            worlds[str(num_ranks)] = json.loads(found.read_text())
    alone = worlds["1"]["cpu_seconds"]
    for number, world in worlds.items():
        world["equal_parts"] = round(world["cpu_seconds"] * int(number) / alone, 3)
    result = {"layers": args.layers, "hidden": args.hidden, "steps": args.steps, "worlds": worlds}
    write_result("muon_step", args.out.resolve(), result)
    return 0


def measure(layers: int, hidden: int, steps: int, out: Path) -> None:
    """Write the figures of the rank with the most CPU time, for divided and for undivided steps."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import hf_fsdp_plugin as hfp

    class Undivided(torch.optim.Muon):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.set_num_threads(1)
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": hidden}
    num_ranks = int(os.environ["WORLD_SIZE"])
    config = {"distributed_type": "FSDP", "num_processes": num_ranks, "use_cpu": True, "fsdp_config": fsdp}
    accelerator = hfp.accelerator(hfp.load_spec(config))
    result: dict[str, Any] = {}
    for name, kind in (("divided", torch.optim.Muon), ("undivided", Undivided)):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
        model, optimizer = accelerator.prepare(model, kind(model.parameters()))
        sent = _count_sent()
        seconds = []
        for _ in range(1 + steps):
            accelerator.backward(model(torch.randn(4, hidden)).square().mean())
            dist.barrier()
            sent["bytes"] = 0
            before = time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - before)
            optimizer.zero_grad()
        every: list[Any] = [None] * num_ranks
        dist.all_gather_object(every, [statistics.median(seconds[1:]), sent["bytes"]])
        cpu, number = max(each[0] for each in every), max(each[1] for each in every)
        result |= (
            {"cpu_seconds": round(cpu, 4), "bytes": number} if name == "divided" else {f"{name}_cpu": round(cpu, 4)}
        )
    result["bytes_of_collectives"] = 2 * layers * hidden * hidden * 4 * (num_ranks - 1) // num_ranks
    if accelerator.is_main_process:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _count_sent() -> dict[str, int]:
    """Count the bytes that the exchanges of the shard group send to other ranks."""
    import torch.distributed

    dist: Any = torch.distributed
    found, original = {"bytes": 0}, dist.all_to_all_single

    def counted(output: Any, given: Any, output_sizes: Any, input_sizes: Any, *args: Any, **kwargs: Any) -> Any:
        found["bytes"] += (given.numel() - input_sizes[dist.get_rank()]) * given.element_size()
        return original(output, given, output_sizes, input_sizes, *args, **kwargs)

    dist.all_to_all_single = counted
    return found


if __name__ == "__main__":
    raise SystemExit(main())
