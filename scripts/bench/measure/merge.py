"""``hf-fsdp merge`` against the stock ``accelerate merge-weights`` on the same sharded checkpoint, and against ``cp``.

Two gloo ranks write the shards of a Llama (fp32, 0.52 B parameters) as the stock stack does. Then complete processes
are timed alternately; the order is reversed from pair to pair. Before each process, the checkpoint is read once, the
disk is synced and the previous output is removed, so that the page cache is the same for all. Memory is the largest
peak resident set of a process. ``ours`` merges a checkpoint of the plugin, with config and manifest, and compares the
result with the manifest. ``ours_and_model`` merges a checkpoint of the stock stack, which has no manifest; beside the
copying, it compares names and shapes with the model of the config. CPU time is that of a process and its children.

    python -m scripts.bench merge              (six minutes on 2 cores, 15 GB of disk; writes docs/results/merge.json)
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

LAYERS = {"1 GB": 5, "2 GB": 15, "4 GB": 32}
MODEL = "pytorch_model_fsdp_0"
OURS, OURS_AND_MODEL, STOCK, CP = "ours", "ours_and_model", "stock", "cp"
TARGETS = {"times_as_fast": 4.0, "memory_of_stock": 0.35, "memory_4_of_1_gb": 1.1}


@dataclass(frozen=True)
class Run:
    """Duration and CPU time of a process in seconds, and the largest peak resident set of it and its children in MB."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "merge")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder for temporary checkpoints; default: the system's")
    return parser.parse_args()


def config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
    )


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write the shards of a model. Runs on each rank; no rank ever has the full model."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().uniform_(-0.1, 0.1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / MODEL)
    if dist.get_rank() == 0:
        config(layers).save_pretrained(folder.with_name("config"))
        (folder.with_name("stock") / MODEL).mkdir(parents=True)
        for path in (folder / MODEL).iterdir():
            os.link(path, folder.with_name("stock") / MODEL / path.name)
        config(layers).save_pretrained(folder)
        parameters = {
            name: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in model.named_parameters()
        }
        write_manifest(folder, parameters)
    dist.destroy_process_group()


def write_manifest(folder: Path, parameters: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    from hf_fsdp_plugin.checkpoint.formats import manifest as manifests

    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    manifest = manifests.Manifest(
        kind="sharded",
        backend="fsdp2",
        world_size=2,
        mesh={"replicate": 1, "shard": 2},
        strategy="full_shard",
        step=None,
        asynchronous=False,
        created="2026-01-01T00:00:00+00:00",
        versions={},
        settings={},
        parameters=parameters,
        ties=(),
        files=tuple(manifests.record_file(folder, path) for path in files),
        batch={},
    )
    manifests.write_manifest(folder, manifest)


def build(folder: Path, layers: int) -> None:
    """Write a checkpoint in child processes. This process must not import torch: a child inherits its parent's peak."""
    if run_two_ranks(__file__, [], {**environ(), "BENCH_MERGE": f"{layers} {folder}"}) != 0:
        raise SystemExit("the checkpoint could not be written")


def environ() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "merge"]
    stock = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    return {
        OURS: [*ours, str(folder), str(out)],
        OURS_AND_MODEL: [*ours, str(folder.with_name("stock")), str(out), "--config", str(folder.with_name("config"))],
        STOCK: [*stock, str(folder / MODEL), str(out)],
        CP: ["cp", "-r", str(folder / MODEL), str(out)],
    }


def measure(command: list[str], folder: Path, out: Path) -> Run:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    for path in (folder / MODEL).iterdir():
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environ(), stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}:\n{output.read().decode()}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def check_equal(ours: Path, stock: Path) -> None:
    """Check that both programs write the same tensors. Otherwise their times cannot be compared."""
    from hf_fsdp_plugin.checkpoint.file_io import InputFiles
    from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
    from hf_fsdp_plugin.tools.merge.copying import same_elements

    mine, theirs = read_stored_model(ours).tensors, read_stored_model(stock).tensors
    described = [{(name, t.dtype, t.shape) for name, t in tensors.items()} for tensors in (mine, theirs)]
    if described[0] != described[1]:
        raise SystemExit(f"names, dtypes or shapes differ: {sorted(described[0] ^ described[1])[:5]}")
    with InputFiles(ours) as files, InputFiles(stock) as others:
        wrong = [name for name in mine if not same_elements(files, mine[name], others, theirs[name])]
    if wrong:
        raise SystemExit(f"the tensors differ: {wrong[:5]}")


def compare(folder: Path, pairs: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {OURS: [], OURS_AND_MODEL: [], STOCK: [], CP: []}
    for pair in range(pairs):
        for name in runs if pair % 2 == 0 else reversed(runs):
            out = folder.with_name(f"out_{name}")
            runs[name].append(measure(commands(folder, out)[name], folder, out))
            if name in (OURS_AND_MODEL, CP):
                shutil.rmtree(out)
        if pair == 0:
            check_equal(folder.with_name(f"out_{OURS}"), folder.with_name(f"out_{STOCK}"))
        times = ", ".join(f"{name} {found[-1].seconds:.2f} s" for name, found in runs.items())
        print(f"[{pair + 1}/{pairs}] {times}", flush=True)
    return runs


def bench(args: argparse.Namespace) -> None:
    runs: dict[str, list[Run]] = {}
    peaks: dict[str, dict[str, float]] = {OURS: {}, OURS_AND_MODEL: {}, STOCK: {}}
    num_bytes: dict[str, int] = {}
    for size, layers in LAYERS.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as work:
            folder = Path(work) / "checkpoint"
            folder.mkdir()
            build(folder, layers)
            num_bytes[size] = sum(path.stat().st_size for path in (folder / MODEL).glob("*.distcp"))
            if size == "2 GB":
                runs = compare(folder, args.pairs)
            for name, found in peaks.items():
                if size == "2 GB":
                    found[size] = max(run.peak_mb for run in runs[name])
                else:
                    out = Path(work) / "out"
                    found[size] = measure(commands(folder, out)[name], folder, out).peak_mb
    write(args, runs, peaks, num_bytes)


def write(
    args: argparse.Namespace, runs: dict[str, list[Run]], peaks: dict[str, dict[str, float]], num_bytes: dict[str, int]
) -> None:
    faster = {
        name: [other.seconds / run.seconds for run, other in zip(runs[name], runs[STOCK], strict=True)]
        for name in (OURS, OURS_AND_MODEL, CP)
    }
    result = {
        "model": f"Llama, {LAYERS['2 GB']} layers, hidden 1536, fp32, sharded by 2 ranks",
        "checkpoint_bytes": num_bytes,
        "pairs": args.pairs,
        "seconds": {name: [round(run.seconds, 2) for run in found] for name, found in runs.items()},
        "cpu_seconds": {name: [round(run.cpu_seconds, 2) for run in found] for name, found in runs.items()},
        "times_as_fast_as_stock": {name: round(statistics.median(found), 2) for name, found in faster.items()},
        "times_as_fast_as_stock_range": {name: [round(min(f), 2), round(max(f), 2)] for name, f in faster.items()},
        "peak_mb": {name: {size: round(peak) for size, peak in found.items()} for name, found in peaks.items()},
        "peak_of_stock_at_2_gb": {
            name: round(peaks[name]["2 GB"] / peaks[STOCK]["2 GB"], 3) for name in (OURS, OURS_AND_MODEL)
        },
        "peak_at_4_gb_of_1_gb": {
            name: round(peaks[name]["4 GB"] / peaks[name]["1 GB"], 3) for name in (OURS, OURS_AND_MODEL, STOCK)
        },
        "targets": TARGETS,
    }
    write_result("merge", args.out, result)


def main() -> int:
    if "BENCH_MERGE" in os.environ:
        layers, folder = os.environ["BENCH_MERGE"].split(maxsplit=1)
        write_checkpoint(Path(folder), int(layers))
        return 0
    bench(parse_args())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
