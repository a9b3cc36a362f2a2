"""What a run of many real ranks costs: start, preparation, steps, save, resume and report, from 4 to 64 ranks.

The ranks are gloo processes with one thread each, forked from one process that has imported everything. They train a
tiny Llama with FSDP2. They share few cores, so wall time grows with their number whatever they do. What must not grow
is the CPU time of each rank, except for collectives: a ring has as many steps as ranks.

    python -m scripts.bench many_ranks    (five minutes on 2 cores, 12 GB; writes docs/results/many_ranks.json)
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from scripts.bench.common import cpu_seconds, free_port, make_llama, make_parser
from scripts.bench.ranks.forked import World, preload
from scripts.bench.tables.update_results import write_result

WORLDS = (4, 8, 16, 32, 64)
PHASES = ("start", "prepare", "first step", "2 steps", "save", "resume", "report")
SIZES = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
_LIMIT = 900.0


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "many_ranks")
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    return parser.parse_args()


def run_rank(rank: int, report: Callable[..., None], model: Any, folder: Path) -> None:
    """Run all phases. Report wall time, CPU time, and the memory that only this process has, after each of them."""
    import torch

    import hf_fsdp_plugin as hfp

    marks = [(time.perf_counter(), cpu_seconds())]

    def done(phase: str) -> None:
        marks.append((time.perf_counter(), cpu_seconds()))
        (before, cpu_before), (now, cpu_now) = marks[-2:]
        report(phase, {"wall": now - before, "cpu": cpu_now - cpu_before, "private": _private_bytes()})

    fsdp_config = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    config = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": "no", "fsdp_config": fsdp_config}
    os.chdir(folder)  # the report is written there
    accelerator = hfp.accelerator(hfp.load_spec(config))
    done("start")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    done("prepare")
    batch = torch.randint(0, SIZES["vocab_size"], (1, 16), generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            done("first step" if step == 0 else "2 steps")
    accelerator.save_state(str(folder / "checkpoint"))
    done("save")
    accelerator.load_state(str(folder / "checkpoint"))
    done("resume")
    found = hfp.report(accelerator)
    done("report")
    statuses = {setting.status for setting in found.settings}
    report("verdict", {"differs": "differs" in statuses})
    accelerator.end_training()


def _private_bytes() -> int:
    fields = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return sum(int(field[1]) << 10 for field in fields if field[0] in ("Private_Dirty:", "Private_Clean:"))


def measure(world_size: int, model: Any) -> dict[str, Any]:
    """Run one world. Returns for each phase wall time of the slowest rank, and CPU time of a rank and of rank 0."""
    os.environ["MASTER_PORT"] = str(free_port())
    with tempfile.TemporaryDirectory(prefix="many_ranks_") as name:
        folder, start = Path(name), time.perf_counter()
        with closing(World.fork(run_rank, folder / "log", model, folder, world_size=world_size)) as world:
            ranks = range(world_size)
            world.until(lambda: all(world.last("verdict", rank) is not None for rank in ranks), _LIMIT)
            world.end(patience=60.0)
        checkpoint = [path.stat().st_size for path in (folder / "checkpoint").rglob("*") if path.is_file()]
        manifest = (folder / "checkpoint" / "fsdp_manifest.json").stat().st_size
    if any(world.ended.values()) or any(world.last("verdict", rank)["differs"] for rank in ranks):
        raise SystemExit(f"{world_size} ranks: exit codes {world.ended}, or the report says that a setting differs")
    phases = {}
    for phase in PHASES:
        found = [world.last(phase, rank) for rank in ranks]
        cpu = [one["cpu"] for one in found]
        phases[phase] = {
            "wall": max(one["wall"] for one in found),
            "cpu_of_a_rank": statistics.median(cpu),
            "cpu_of_rank_0": cpu[0],
        }
    return {
        "seconds": time.perf_counter() - start,
        "phases": phases,
        "private_bytes": statistics.median(world.last("report", rank)["private"] for rank in ranks),
        "checkpoint_files": len(checkpoint),
        "checkpoint_bytes": sum(checkpoint),
        "manifest_bytes": manifest,
    }


def main() -> int:
    args = parse_args()
    preload()
    import transformers  # noqa: F401

    model = make_llama(**SIZES)
    worlds = {}
    for world_size in args.worlds:
        worlds[str(world_size)] = measure(world_size, model)
        print(world_size, worlds[str(world_size)], flush=True)
    write_result("many_ranks", args.out, {"model": f"Llama, {model.num_parameters():,} parameters", "worlds": worlds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
