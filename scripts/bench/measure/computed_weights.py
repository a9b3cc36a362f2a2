"""Time and private memory of loading and sharding weights that differ from their file: cast, fused or dequantized.

Two ranks load and prepare a model, with RAM-efficient loading (rank 0 computes the weights, and sends each unit when it
is sharded) and without it (every rank computes all weights). Each run is a set of new processes, which have loaded the
same model once before the clock starts.

Memory is the largest ``RssAnon`` above its value before the load, sampled every ten milliseconds, added over the ranks.
CPU time and time are those of the rank with the most. Medians of the rounds.

    python -m scripts.bench computed_weights    (five minutes on 2 cores, 3 GB of disk; needs gguf;
                                                 writes docs/results/computed_weights.json)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.torch_private.modules import local_tensor
from scripts.bench.common import make_llama, make_parser
from scripts.bench.measure.load import Memory, run_ranks
from scripts.bench.measure.resume import return_free_memory
from scripts.bench.tables.update_results import write_result

NUM_RANKS = 2
KINDS: dict[str, dict[str, Any]] = {
    "fp32 to bf16": {"dtype": "bfloat16"},
    "fused experts": {"dtype": "float32"},
    "GGUF": {"dtype": "float32", "gguf_file": "model.gguf"},
}
"""What is computed -> arguments of ``from_pretrained``."""
WAYS = ("rank 0", "every rank")


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "computed_weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    return parser.parse_args()


def save_model(kind: str, folder: Path) -> None:
    """Save a model of 0.8 GB: a Llama, or a Mixtral with eight experts."""
    if kind == "fused experts":
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 10, "num_local_experts": 8}
        heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
        MixtralForCausalLM(MixtralConfig(vocab_size=4096, **sizes, **heads)).save_pretrained(folder)
        return
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 11, "vocab_size": 8192}
    model = make_llama(num_attention_heads=16, num_key_value_heads=16, **sizes)
    if kind == "GGUF":
        from tests.support.loading_runs import write_gguf

        folder.mkdir()
        write_gguf(model, str(folder / "model.gguf"), "llama")
    else:
        model.save_pretrained(folder)


def run_rank(way: str, folder: str) -> dict[str, Any]:
    """Load the model on this rank. Returns its seconds and bytes."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import hf_fsdp_plugin as hfp

    torch.set_num_threads(1)
    fsdp_config = {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": way == "rank 0"}
    config = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": "no", "fsdp_config": fsdp_config}
    accelerator = hfp.accelerator(hfp.load_spec(config))
    arguments = KINDS[Path(folder).name]
    model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    model = accelerator.prepare(model)
    expected = checksum(model)
    del model
    accelerator.free_memory()
    return_free_memory()
    dist.barrier()
    memory, cpu, start = Memory(), time.process_time(), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    model = accelerator.prepare(model)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = torch.tensor(memory.stop()["RssAnon"])
    dist.all_reduce(peak)
    assert checksum(model) == expected and accelerator.num_processes == NUM_RANKS
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "private_bytes": peak.item(),
        "model_bytes": num_bytes,
        "largest_bytes": largest,
    }


def checksum(model: Any) -> float:
    return sum(float(local_tensor(parameter).detach().double().sum()) for parameter in model.parameters())


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(run_rank(*sys.argv[2:4])), flush=True)
        os._exit(0)  # without the end of the process group, which is not measured
    args = parse_args()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="computed_weights_") as temporary:
        for kind in args.kinds:
            save_model(kind, Path(temporary) / kind)
        for number in range(args.rounds):
            for kind in args.kinds:
                for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                    one = run_ranks(way, NUM_RANKS, Path(temporary) / kind, __file__)
                    found.setdefault(kind, {}).setdefault(way, []).append(one)
                    print(f"{kind}, {way}: {one}", file=sys.stderr, flush=True)
    medians = {
        kind: {way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in ways.items()}
        for kind, ways in found.items()
    }
    write_result("computed_weights", args.out, {"rounds": args.rounds, "ranks": NUM_RANKS, "kinds": medians})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
