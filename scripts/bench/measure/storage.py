"""Measure what the upload of a checkpoint to a storage costs the steps during it.

Gloo ranks train a Llama through the plugin with ``fsdp_checkpoint_storage``, a store of S3 on the loopback: one rank,
which leaves the other core of the machine free as a machine with GPUs does, and two ranks, which leave none. Blocks
of steps without an upload and saves alternate in one run. The ranks write each checkpoint to disk synchronously, so
that only the upload is in the background; the steps that begin and end before the commit are compared with those of the
blocks before and after the save. The store runs on the same cores, at the lowest priority, because it would be on other
machines. What it takes is a part of the ratio of the step times, but not of the CPU time of the upload processes and of
the ranks, which is measured besides.

    python -m scripts.bench --only storage        (three minutes on 2 cores; writes docs/results/storage.json)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import cpu_seconds, make_parser, run_two_ranks
from scripts.bench.measure.step_overhead import CONFIG, Step, make_model, make_step, median_interval, parse_blocks
from scripts.bench.tables.update_results import write_result
from tests.support.object_store import BUCKET, object_store

URL = f"s3://{BUCKET}/run"
_SERVER: Final = "HF_FSDP_BENCH_SERVER"
"""Variable with the process id of the store."""
_PART: Final = "HF_FSDP_BENCH_PART"
"""Variable with the path of the result of one number of ranks."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "storage")
    parser.add_argument("--saves", type=int, default=8)
    return parse_blocks(parser, pairs=0)


def make_loop(args: argparse.Namespace, rank: int, folder: str) -> tuple[Step, Any]:
    """Return the step of the training, and its Accelerator."""
    import torch
    from accelerate.utils import ProjectConfiguration

    import hf_fsdp_plugin as hfp

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    settings = {**CONFIG, "fsdp_config": {**CONFIG["fsdp_config"], "fsdp_checkpoint_storage": URL}}  # type: ignore[dict-item]
    accelerator = hfp.accelerator(hfp.load_spec(settings), project_config=project)
    model = make_model(args)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return make_step(args, rank, model, optimizer, accelerator.backward, accelerator.clip_grad_norm_), accelerator


class Steps:
    """Runs steps, and has the wall time and the CPU time of this rank of each one, in seconds."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def run(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self._step()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def run_block(args: argparse.Namespace, step: Step) -> Steps:
    """Run steps without an upload."""
    import torch.distributed as dist

    steps = Steps(step)
    dist.barrier()
    for _ in range(args.block):
        steps.run()
    return steps


def save(step: Step, accelerator: Any) -> tuple[Steps, dict[str, float]]:
    """Save, and train until the commit. Returns the steps during the upload, and seconds of this save."""
    import psutil
    import torch.distributed as dist

    from hf_fsdp_plugin.integrations.saving import manager

    server = psutil.Process(int(os.environ[_SERVER]))

    def used() -> tuple[float, float]:
        return cpu_seconds(resource.RUSAGE_CHILDREN), sum(server.cpu_times()[:2])

    steps = Steps(step)
    dist.barrier()
    begin, (upload, store) = time.perf_counter(), used()
    accelerator.save_state()
    saved = time.perf_counter()
    while manager().save_in_flight is not None:
        steps.run()
    seconds = {"stall_seconds": saved - begin, "commit_seconds": time.perf_counter() - saved}
    after = used()
    del steps.wall[-1], steps.cpu[-1]  # it ends after the commit
    return steps, {**seconds, "upload_cpu_seconds": after[0] - upload, "store_cpu_seconds": after[1] - store}


def measure(args: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 prints and writes the result."""
    import torch
    import torch.distributed as dist

    from hf_fsdp_plugin.checkpoint.storage import Storage

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as folder:
        step, accelerator = make_loop(args, rank, folder)
        for _ in range(args.warmup):
            step()
        save(step, accelerator)  # it opens the storage, too
        blocks, saves = [run_block(args, step)], []
        for number in range(args.saves):
            saves.append(save(step, accelerator))
            blocks.append(run_block(args, step))
            if rank == 0:
                one, other = statistics.median(saves[-1][0].wall), statistics.median(blocks[-1].wall)
                text = f"{len(saves[-1][0].wall)} steps, {one:.3f} and {other:.3f} s"
                print(f"[{number + 1}/{args.saves}] {text}", flush=True)
    world_size = dist.get_world_size()
    ranks: list[Any] = [None] * world_size
    mine = [(found.cpu, seconds["upload_cpu_seconds"]) for found, seconds in saves]
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        uploads = [sum(each[number][1] for each in ranks) for number in range(args.saves)]
        [name] = Storage(URL).checkpoints()
        ratios = [
            statistics.median(found.wall) / statistics.median(before.wall + after.wall)
            for (found, _), before, after in zip(saves, blocks, blocks[1:], strict=False)
        ]
        median = {key: statistics.median(seconds[key] for _, seconds in saves) for key in saves[0][1]}
        num_steps = statistics.median(len(found.wall) + 1 for found, _ in saves)
        usual = statistics.median(cpu for found in blocks for cpu in found.cpu)
        during = statistics.median(cpu for found, _ in saves for cpu in found.cpu)
        ours = statistics.median(uploads) / num_steps + world_size * (during - usual)
        result = {
            "checkpoint_bytes": sum(Storage(URL).sizes(name).values()),
            "steps_during_upload": num_steps,
            "step_seconds": round(statistics.median(wall for found in blocks for wall in found.wall), 4),
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_median_95": [round(each, 4) for each in median_interval(ratios)],
            **{key: round(seconds, 3) for key, seconds in median.items()},
            "upload_cpu_seconds": round(statistics.median(uploads), 3),
            "rank_cpu_seconds": {"usual": round(usual, 4), "during_upload": round(during, 4)},
            "share": ours / (world_size * usual),
        }
        Path(os.environ[_PART]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def serve(connection: Connection) -> None:
    """Run the store until the other end of the connection is closed. Body of a process."""
    os.setsid()
    os.nice(19)
    with suppress(OSError):  # Linux may compare the priorities of processes within a session only, and of sessions
        Path("/proc/self/autogroup").write_text("19")
    with object_store() as variables, suppress(EOFError):
        connection.send(variables)
        connection.recv()


def main() -> int:
    args = parse_args()
    if "RANK" in os.environ:
        measure(args)
        return 0
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    server = spawn.Process(target=serve, args=(its,), daemon=True)
    server.start()
    runs: dict[str, Any] = {}
    with ours, tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        environ = {**os.environ, **ours.recv(), _SERVER: str(server.pid), _PART: str(part)}
        for num_ranks in (1, 2):
            if code := run_two_ranks(__file__, sys.argv[1:], environ, num_ranks=num_ranks):
                return code
            runs[str(num_ranks)] = json.loads(part.read_text())
    server.join()
    num_params = sum(parameter.numel() for parameter in make_model(args).parameters())
    model = f"Llama, {args.layers} layers, hidden {args.hidden}, {num_params / 1e6:.1f} M parameters, fp32"
    write_result("storage", args.out, {"model": model, "saves": args.saves, "runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
