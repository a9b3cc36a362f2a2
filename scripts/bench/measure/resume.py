"""Time, memory and bytes of loading a checkpoint into a sharded model and its AdamW: this plugin and the stock stack.

Each run is a set of new processes, which have a sharded model and an optimizer without state before the clock starts.
The ways alternate, and the files of a way are read into the page cache before it runs.

- ``Accelerator.load_state`` of a checkpoint in each state dict type, saved by the same stack; model, AdamW and random
  states
- ``best``: the model alone, as the Trainer loads it for ``load_best_model_at_end``
- ``on 4 ranks``: a checkpoint of two ranks, by four: each reads what it needs of the files of others
- ``export``: the model alone, from a folder for ``from_pretrained``
- ``stock``: the same with Accelerate's own FSDP2. Accelerate prepares FSDP on accelerators only; the distributed type
  of its state is set by hand.

Memory is the largest ``RssAnon`` of ``/proc/self/status`` above its value before the load, sampled every ten
milliseconds. *Held* is what the rank holds after the load and did not hold before: optimizer state. The bound is the
bytes of parameters and optimizer state times 1.1, plus one unit, less the parameters, which were there before. Bytes
read are ``rchar`` of ``/proc/self/io``. Each number is that of the rank with the most; medians of the rounds.

    python -m scripts.bench resume    (ten minutes on 2 cores, 10 GB of disk; writes docs/results/resume.json)
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

from scripts.bench.common import cpu_seconds, make_llama, make_parser
from scripts.bench.measure.load import Memory, prepare_stock, run_ranks
from scripts.bench.tables.update_results import write_result

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 11, "vocab_size": 8192}
NUM_RANKS = 2
WAYS = (
    "stock, sharded", "plugin, sharded", "plugin, sharded, not verified", "plugin, local", "plugin, full",
    "stock, sharded, on 4 ranks", "plugin, sharded, on 4 ranks", "plugin, sharded, FSDP1", "plugin, full, FSDP1",
    "stock, best", "plugin, best", "plugin, export",
)  # fmt: skip
"""Stack, state dict type or part, and what differs from FSDP2 and reads that are compared with the hashes."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "resume")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints, on a disk; default: a temporary one")
    return parser.parse_args()


def saved_as(way: str) -> str:
    """Return the name of the checkpoint that a way loads."""
    for part in (", not verified", ", on 4 ranks"):
        way = way.replace(part, "")
    return way.replace("best", "sharded").replace(" ", "").replace(",", "_")


def ranks_of(way: str) -> int:
    return 4 if "4 ranks" in way else NUM_RANKS


def make_accelerator(way: str) -> Any:
    stack, kind, *others = way.split(", ")
    kind = {"best": "sharded", "export": "full"}.get(kind, kind)
    if stack == "stock":
        prepare_stock(way)
        from accelerate import Accelerator

        accelerator = Accelerator()
        accelerator.state.fsdp_plugin.set_state_dict_type(f"{kind.upper()}_STATE_DICT")
        return accelerator
    import hf_fsdp_plugin as hfp

    fsdp_config = {
        "fsdp_version": 1 if "FSDP1" in others else 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": f"{kind.upper()}_STATE_DICT",
        "fsdp_verify_checkpoint": "not verified" not in others,
    }
    config = {"distributed_type": "FSDP", "use_cpu": True, "mixed_precision": "no", "fsdp_config": fsdp_config}
    return hfp.accelerator(hfp.load_spec(config))


def make_model() -> Any:
    return make_llama(num_attention_heads=16, num_key_value_heads=16, **SIZES)


def run_rank(way: str, folder: str, *, save: bool) -> dict[str, Any]:
    """Save a checkpoint, or load it. Returns CPU seconds, seconds, and bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    accelerator = make_accelerator(way)
    path = Path(folder) / saved_as(way)
    with torch.device("meta"):
        unit = sum(p.nbytes for p in make_model().model.layers[0].parameters())
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if save:
        ids = torch.arange(16).reshape(2, 8)
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        if way.endswith("export"):
            accelerator.save_model(model, path)
        else:
            accelerator.save_state(path)
        return {"checksum": checksum(model, optimizer)}
    return_free_memory()
    dist.barrier()
    read, memory = _read_bytes(), Memory()
    cpu, start = cpu_seconds(), time.perf_counter()
    if way.split(", ")[1] == "best":
        from accelerate.utils import load_fsdp_model

        load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(path))
    elif way.endswith("export"):
        from hf_fsdp_plugin.checkpoint.reading.resharding import load_model

        load_model(model, path)
    else:
        accelerator.load_state(path)
    seconds, used = time.perf_counter() - start, cpu_seconds() - cpu
    peak = memory.stop()
    weights = sum(_local(parameter).nbytes for parameter in model.parameters())
    state = sum(_local(t).nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "private_bytes": peak["RssAnon"],
        "held_bytes": state,
        "bound_bytes": int(1.1 * (weights + state)) - weights + unit,
        "read_bytes": _read_bytes() - read,
        "loaded_bytes": weights + state,
        "checksum": checksum(model, optimizer),
    }


def checksum(model: Any, optimizer: Any) -> float:
    """Return a sum over the weights and the state of the optimizer of all ranks."""
    import torch
    import torch.distributed as dist

    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    total = torch.stack([_local(t).detach().double().abs().sum() for t in tensors if isinstance(t, torch.Tensor)]).sum()
    dist.all_reduce(total)
    return float(total)


def _local(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def return_free_memory() -> None:
    """Return free memory to the system, so that a later allocation is counted."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _cache(folder: Path) -> None:
    """Read the files into the page cache."""
    block = bytearray(1 << 22)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        way, folder = sys.argv[2:4]
        print(json.dumps(run_rank(way.removeprefix("save "), folder, save=way.startswith("save "))), flush=True)
        os._exit(0)  # without the end of the process group, which is not measured
    args = parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="resume_") as temporary:
        folder = args.folder or Path(temporary)
        for way in args.ways:
            if not (folder / saved_as(way)).exists():
                print(f"save {way}: {run_ranks(f'save {way}', NUM_RANKS, folder, __file__)}", file=sys.stderr)
        for number in range(args.rounds):
            for way in args.ways if number % 2 == 0 else args.ways[::-1]:
                _cache(folder / saved_as(way))
                one = run_ranks(way, ranks_of(way), folder, __file__)
                found.setdefault(way, []).append(one)
                print(f"{way}: {one}", file=sys.stderr, flush=True)
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()
    }
    result = {"rounds": args.rounds, "ranks": NUM_RANKS, "model": "Llama of 0.2 B, fp32, AdamW", "ways": medians}
    write_result("resume", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
