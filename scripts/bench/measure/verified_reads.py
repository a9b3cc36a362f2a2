"""What it costs to compare all read bytes with the manifest, in a resume and in a merge, for several sizes of ranges.

Two gloo ranks save a Llama with AdamW (sharded, fp32), for each size of the ranges that have a hash. Then they load
model and optimizer alternately with and without the comparison, in the layout that was saved (FSDP2) and in another one
(FSDP1), which reads parts of ranges. The files are in the page cache, so that the disk hides nothing. ``hf-fsdp merge``
is timed in the same way, as a complete process. A time is that of the slowest rank; ratios are medians of alternating
pairs.

The table also gives the number of bytes that the ranks read for one byte that they need, if tensors of 64 MiB per rank
were saved by 8 ranks and are read by more: larger ranges have fewer hashes, but more of them is read for a part.

    python -m scripts.bench verified_reads    (five minutes on 2 cores; writes docs/results/verified_reads.json)
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.common import make_llama, make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

SIZES = {"256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 1 << 22, "16 MiB": 1 << 24}
CHOSEN = "1 MiB"
LAYOUTS = {"same": 2, "other": 1}
"""Layout -> version of FSDP that loads what FSDP2 has saved."""
SHARD = 64 << 20
READERS = (16, 64, 1024)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "verified_reads")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="folder for temporary checkpoints; default: the system's")
    return parser.parse_args()


def prepared(args: argparse.Namespace, version: int) -> tuple[Any, Any, Any]:
    """Return an Accelerator, a model and an optimizer that has its state."""
    import torch

    import hf_fsdp_plugin as hfp

    config = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "use_cpu": True,
        "fsdp_config": {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }
    accelerator = hfp.accelerator(hfp.load_spec(config))
    model = make_llama(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.zeros(1, 8, dtype=torch.long)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def load(model: Any, optimizer: Any, folder: Path, verify: bool) -> None:
    from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
    from hf_fsdp_plugin.checkpoint.reading.resharding import load_model

    load_model(model, folder, verify=verify)
    load_optimizer(model, optimizer.optimizer, folder, verify=verify)


def run_ranks(args: argparse.Namespace, work: Path) -> None:
    """Save and load on this rank. Rank 0 writes the times to ``work/times.json``."""
    import torch
    import torch.distributed as dist

    parts: Any = importlib.import_module("hf_fsdp_plugin.checkpoint.writing.file_parts")  # varies its constant

    def timed(function: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        function()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    times: dict[str, Any] = {"saves": {}, "loads": {}}
    accelerator, model, optimizer = prepared(args, 2)
    times["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    for name, size in SIZES.items():
        parts.MAX_RANGE = size
        folder = work / name.replace(" ", "_")
        times["saves"][name] = timed(functools.partial(accelerator.save_state, str(folder)))
    for layout, version in LAYOUTS.items():
        if version != 2:
            del accelerator, model, optimizer
            accelerator, model, optimizer = prepared(args, version)
        found: dict[str, list[list[float]]] = {name: [] for name in SIZES}
        for pair in range(args.pairs + 1):  # the first pair fills the page cache
            for name in SIZES:
                folder = work / name.replace(" ", "_")

                order = (True, False) if pair % 2 == 0 else (False, True)
                loads = {verify: functools.partial(load, model, optimizer, folder, verify) for verify in order}
                seconds = {verify: timed(function) for verify, function in loads.items()}
                if pair:
                    found[name].append([seconds[True], seconds[False]])
        times["loads"][layout] = found
    if dist.get_rank() == 0:
        (work / "times.json").write_text(json.dumps(times))
    accelerator.end_training()


def merge_pairs(args: argparse.Namespace, folder: Path) -> list[list[float]]:
    pairs = []
    for pair in range(args.pairs + 1):
        seconds = {}
        for flags in ([], ["--no-verify"]) if pair % 2 == 0 else (["--no-verify"], []):
            out = folder.with_name("merged")
            command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "merge", str(folder), str(out), *flags]
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[not flags] = time.perf_counter() - start
            shutil.rmtree(out)
        if pair:
            pairs.append([seconds[True], seconds[False]])
    return pairs


def bytes_read_per_byte(size: int, readers: int) -> float:
    """Return the bytes that all of ``readers`` ranks read of 8 shards of ``SHARD`` bytes, per byte of the shards."""
    part = 8 * SHARD // readers
    read = sum(
        min(-(-(start + part) // size) * size, (start // SHARD + 1) * SHARD) - start // size * size
        for start in range(0, 8 * SHARD, part)
    )
    return round(read / (8 * SHARD), 2)


def summary(pairs: list[list[float]]) -> dict[str, float]:
    ratios = [verified / plain for verified, plain in pairs]
    return {
        "seconds": round(statistics.median(verified for verified, _ in pairs), 3),
        "seconds_without": round(statistics.median(plain for _, plain in pairs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


def main() -> int:
    args = parse_args()
    if "BENCH_VERIFIED_READS" in os.environ:
        run_ranks(args, Path(os.environ["BENCH_VERIFIED_READS"]))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        environ = {"HF_HUB_OFFLINE": "1", **os.environ, "BENCH_VERIFIED_READS": work}
        if run_two_ranks(__file__, sys.argv[1:], environ) != 0:
            raise SystemExit("the ranks failed")
        times = json.loads((Path(work) / "times.json").read_text())
        chosen = Path(work) / CHOSEN.replace(" ", "_")
        num_bytes = sum(path.stat().st_size for path in chosen.rglob("*.distcp"))
        merges = merge_pairs(args, chosen)
    result = {
        "model": f"Llama, {args.layers} layers, hidden {args.hidden}, fp32, AdamW, sharded by 2 ranks",
        "checkpoint_bytes": num_bytes,
        "pairs": args.pairs,
        "range": CHOSEN,
        "save_seconds": {name: round(seconds, 2) for name, seconds in times["saves"].items()},
        "resume": {
            layout: {name: summary(pairs) for name, pairs in found.items()} for layout, found in times["loads"].items()
        },
        "merge": summary(merges),
        "bytes_read_per_byte": {
            name: {f"8 to {readers} ranks": bytes_read_per_byte(size, readers) for readers in READERS}
            for name, size in SIZES.items()
        },
    }
    write_result("verified_reads", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
