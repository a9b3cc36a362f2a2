"""The time and the memory from ``from_pretrained`` to a sharded model: this plugin, the stock stack, and Transformers.

Each run is a set of new processes, which have imported everything before the clock starts. The ways alternate, and the
checkpoint is in the page cache for all of them.

- ``plugin``: ``from_pretrained`` and ``accelerator.prepare`` with RAM-efficient loading, FSDP2 or FSDP1
- ``stock``: the same with Accelerate's own FSDP2 preparation; every rank loads the model
- ``stock, RAM-efficient``: the same with ``cpu_ram_efficient_loading``
- ``Transformers``: ``from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))``, with stock Transformers

Accelerate prepares FSDP on accelerators only. The stock runs set the distributed type of its state to FSDP by hand.

A second time includes an update of every shard in place, as the first step of an optimizer makes it. Transformers
leaves the shards in the mapped file, and the system copies them when they are first changed. The plugin copies them
before ``prepare`` returns, so that its first time is longer.

Memory is sampled every ten milliseconds until after the update: private memory is ``RssAnon`` of ``/proc/self/status``,
mapped files are ``RssFile``, both above their size before the clock starts. A time is that of the slowest rank, memory
that of the rank with the most; medians of the rounds.

    python -m scripts.bench load    (fifteen minutes on 2 cores, 8 GB of disk; writes docs/results/load.json)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from scripts.bench.common import child_environment, free_port, make_llama, make_parser
from scripts.bench.tables.update_results import write_result

WAYS = ("plugin", "plugin, FSDP1", "stock", "stock, RAM-efficient", "Transformers")
SIZES: dict[str, dict[str, Any]] = {
    "0.5 B, fp32": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 18, "dtype": "float32"},
    "1.5 B, bf16": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20, "dtype": "bfloat16"},
}
WORLDS = (1, 2, 4)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", type=Path, help="folder for the models, on a disk; default: a temporary one")
    return parser.parse_args()


def save_model(size: dict[str, Any], folder: Path) -> None:
    """Save a Llama of this size, unless the folder has one."""
    if (folder / "config.json").exists():
        return
    import torch

    sizes = {key: value for key, value in size.items() if key != "dtype"}
    torch.set_default_dtype(getattr(torch, size["dtype"]))
    model = make_llama(vocab_size=32000, num_attention_heads=16, num_key_value_heads=16, **sizes)
    model.save_pretrained(folder, max_shard_size="1GB")


class Memory:
    """The largest growth of this process's memory in bytes, by kind; ``Rss`` is all of it."""

    def __init__(self) -> None:
        self._start = self._read()
        self.peak = dict.fromkeys(self._start, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @staticmethod
    def _read() -> dict[str, int]:
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        sizes = {name[0].rstrip(":"): int(name[1]) << 10 for name in fields if name and name[0].startswith("Rss")}
        return {**sizes, "Rss": sum(sizes.values())}

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self._add()

    def _add(self) -> None:
        for name, size in self._read().items():
            self.peak[name] = max(self.peak[name], size - self._start[name])

    def stop(self) -> dict[str, int]:
        self._ended.set()
        self._thread.join()
        self._add()
        return self.peak


def run_rank(way: str, folder: str) -> dict[str, Any]:
    """Load and shard on this rank. Returns its times in seconds, its memory, and the bytes of its shards."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    prepare, arguments = prepare_stock(way) if way.startswith("stock") else prepare_ours(way)
    if way == "Transformers":
        from transformers.distributed.configuration_utils import DistributedConfig

        arguments = {"distributed_config": DistributedConfig(fsdp_size=world)}
    if world > 1:
        dist.barrier()
    memory = Memory()
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder, **arguments)
    loaded = time.perf_counter() - start
    if way != "Transformers":  # Accelerate prepares an FSDP2 model together with its optimizer only
        model, _ = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    prepared = time.perf_counter() - start
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    with torch.no_grad():
        for tensor in local:
            tensor.add_(0.0)
    updated, peak = time.perf_counter() - start, memory.stop()
    result = {
        "seconds": prepared,
        "updated": updated,
        "from_pretrained": loaded,
        "shard_bytes": sum(tensor.nbytes for tensor in local),
        **{name: peak[name] for name in ("RssAnon", "RssFile", "RssShmem")},
    }
    checksums = torch.stack([tensor.detach().double().sum() for tensor in local]).sum()
    if world > 1:
        dist.all_reduce(checksums)
    result["sum"] = float(checksums)
    return result


def prepare_ours(way: str) -> tuple[Any, dict[str, Any]]:
    if way == "Transformers":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return None, {}
    import hf_fsdp_plugin as hfp

    fsdp_config = {
        "fsdp_version": 1 if way.endswith("FSDP1") else 2,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    config = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": "no", "fsdp_config": fsdp_config}
    accelerator = hfp.accelerator(hfp.load_spec(config))
    return accelerator.prepare, {}


def prepare_stock(way: str) -> tuple[Any, dict[str, Any]]:
    efficient = way.endswith("RAM-efficient")
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_CPU_RAM_EFFICIENT_LOADING=str(efficient))
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=efficient
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator.prepare, {}


def run_ranks(way: str, world: int, folder: Path, script: str = __file__) -> dict[str, Any]:
    """Run ``script --rank way folder`` on new ranks. Returns, for each key, the largest value of a rank.

    Raises:
        SystemExit: a rank failed.
    """
    environ = {
        **child_environment(), "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world),
        "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true",
        "TQDM_DISABLE": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "--rank", way, str(folder)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate() for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{way} on {world} ranks failed:\n{outputs[0][1][-3000:]}")
    results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return {key: max(result[key] for result in results) for key in results[0]}


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(run_rank(*sys.argv[2:4])), flush=True)
        os._exit(0)  # without the end of the process group, which is not measured
    args = parse_args()
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    with tempfile.TemporaryDirectory(prefix="load_") as temporary:
        folder = args.folder or Path(temporary)
        for size in args.sizes:
            model = folder / size.replace(" ", "_").replace(",", "")
            save_model(SIZES[size], model)
            for number in range(args.rounds):
                for world in args.worlds:
                    ways = args.ways if number % 2 == 0 else args.ways[::-1]
                    for way in ways:
                        if world == 1 and way != "plugin":
                            continue
                        one = run_ranks(way, world, model)
                        found.setdefault(size, {}).setdefault(str(world), {}).setdefault(way, []).append(one)
                        print(f"{size}, {world} ranks, {way}: {one}", file=sys.stderr, flush=True)
    medians = {
        size: {
            world: {
                way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in ways.items()
            }
            for world, ways in worlds.items()
        }
        for size, worlds in found.items()
    }
    result = {"rounds": args.rounds, "sizes": medians}
    write_result("load", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
