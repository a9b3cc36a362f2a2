"""What resuming and committing cost in large worlds, counted on made-up checkpoints of 8 billion parameters.

A checkpoint has the metadata of a Llama of 8 billion parameters with AdamW in fp32, as the ranks of FSDP2 or FSDP1
write it: every chunk of every tensor, with the hashes of its bytes. The data files are sparse. The package's own code
commits the checkpoint as rank 0, and plans the reads of one rank: manifest, metadata, scalars and headers. The time of
the reads themselves is that of the disk, and grows with the bytes that a rank holds.

Each world is measured in a process of its own. While rank 0 commits, another thread counts in a loop: the time for
which it waits for the GIL is the time by which the commit can delay training.

    python -m scripts.bench large_world    (two minutes on 2 cores; writes docs/results/large_world.json)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result
from tests.support.made_up_runs import HIDDEN, LAYERS, Counts, MadeUpRun, llama_shapes, plan_resume, sparse_data

WORLDS = (16, 64, 256)
FSDP1_WORLDS = (256,)
FEW_RANKS = 32
"""Maximum number of ranks whose files have all headers: the headers of few archives are all read."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "large_world")
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--fsdp1-worlds", type=int, nargs="*", default=FSDP1_WORLDS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints; default: the system's")
    return parser.parse_args()


def resume(checkpoint: Path, run: MadeUpRun, rank: int) -> dict[str, Any]:
    """Plan the reads of one rank."""
    shards = run.shards(rank)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with Counts(checkpoint) as counts, sparse_data(run.world):
        work, held = plan_resume(checkpoint, shards, rank, run.world)
    used = cpu_seconds(before, resource.getrusage(resource.RUSAGE_SELF))
    return {
        "cpu_seconds": round(used, 2),
        "opened_files": len(counts.opens),
        "reads": counts.reads,
        "data_reads": len(work),
        "held_bytes": held,
    }


def cpu_seconds(before: Any, after: Any) -> float:
    return float(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def waited() -> float:
    """Return the seconds for which this thread has neither run nor been ready to run: it waited for the GIL."""
    running, ready, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.perf_counter() - (running + ready) / 1e9


def commit(staging: Any, run: MadeUpRun) -> dict[str, Any]:
    """Commit as rank 0 in a thread, while this thread counts."""
    done, used, failures = threading.Event(), [0.0], []

    def work() -> None:
        try:
            begin = time.thread_time()
            staging.commit(staging.read_records(run.world), run.manifest())
            used[0] = time.thread_time() - begin
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work)
    begin, before = time.perf_counter(), waited()
    thread.start()
    longest = 0.0
    while not done.is_set():
        start = waited()
        for _ in range(2000):
            pass
        longest = max(longest, waited() - start)
    blocked, seconds = waited() - before, time.perf_counter() - begin
    thread.join()
    if failures:
        raise failures[0]
    return {
        "cpu_seconds": round(used[0], 2),
        "seconds": round(seconds, 2),
        "gil_seconds": round(blocked, 2),
        "longest_gil_seconds": round(longest, 3),
    }


def measure(world: int, version: int, layers: int, work: Path) -> dict[str, Any]:
    from hf_fsdp_plugin.checkpoint.names import DCP_METADATA
    from hf_fsdp_plugin.checkpoint.writing.staging_folder import StagingFolder

    run = MadeUpRun(world, llama_shapes(layers), version)
    staging = StagingFolder(work / "checkpoint-20")
    staging._create()
    rank = world // 2
    record = run.write(staging, headers_of=None if world <= FEW_RANKS else {rank})
    committed = commit(staging, run)
    return {
        "record_cpu_seconds": round(record, 2),
        "commit": committed,
        "manifest_bytes": sum(path.stat().st_size for path in staging.final.glob("fsdp_manifest*")),
        "metadata_bytes": sum(path.stat().st_size for path in staging.final.rglob(DCP_METADATA)),
        "resume": resume(staging.final, run, rank),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run_world(world: int, version: int, layers: int, folder: Path | None, results: Any) -> None:
    work = Path(tempfile.mkdtemp(dir=folder))
    try:
        results.put(measure(world, version, layers, work))
    finally:
        shutil.rmtree(work)


def main() -> int:
    args = parse_args()
    found = []
    context = multiprocessing.get_context("spawn")
    for version, world in [*((2, world) for world in args.worlds), *((1, world) for world in args.fsdp1_worlds)]:
        results = context.SimpleQueue()
        process = context.Process(target=run_world, args=(world, version, args.layers, args.folder, results))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"the measurement of {world} ranks failed")
        found.append({"ranks": world, "version": version, "kind": "sharded", **results.get()})
        print(json.dumps(found[-1]), file=sys.stderr)
    result = {"model": f"Llama, {args.layers} layers, hidden {HIDDEN}, fp32, AdamW", "worlds": found}
    write_result("large_world", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
