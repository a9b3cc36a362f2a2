"""Compare ways to read one rank's half of every tensor of a safetensors model into new CPU tensors.

- ``mapped``: a copy of a part of the mapped tensor, as this plugin does
- ``mapped, by one replica``: one of two ranks that need the same half copies it, and broadcasts it to the other
- ``get_slice``: the slices of the safetensors library
- ``DCP``: ``torch.distributed.checkpoint`` with ``HuggingFaceStorageReader``, into DTensors, on two ranks
- ``runai-model-streamer`` and ``fastsafetensors``, which read whole tensors; skipped if they are not installed

Each run is a new process; the ways alternate, and the files are in the page cache. On virtual machines the time of new
memory varies, so the CPU time is listed too.

    python -m scripts.bench readers    (three minutes; writes docs/results/readers.json)
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.measure.load import SIZES, save_model
from scripts.bench.tables.update_results import write_result

SIZE = "0.5 B, fp32"


def _tensors(files: list[str]) -> Iterator[tuple[str, Any, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened, opened.get_slice(name).get_shape()


def mapped(files: list[str]) -> Any:
    import torch

    halves = {}
    for name, opened, _ in _tensors(files):
        half = opened.get_tensor(name).chunk(2)[0]
        halves[name] = torch.empty_like(half).copy_(half)
    return halves


def by_one_replica(files: list[str]) -> Any:
    import torch
    import torch.distributed as dist

    halves = {}
    for name, opened, shape in _tensors(files):
        if dist.get_rank() == 0:
            half = opened.get_tensor(name).chunk(2)[0]
            halves[name] = torch.empty_like(half).copy_(half)
        else:
            halves[name] = torch.empty((shape[0] + 1) // 2, *shape[1:])
        dist.broadcast(halves[name], src=0)
    return halves


def get_slice(files: list[str]) -> Any:
    return {name: opened.get_slice(name)[: (shape[0] + 1) // 2].clone() for name, opened, shape in _tensors(files)}


def dcp(files: list[str]) -> Any:
    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for name, _, shape in _tensors(files):
        local = torch.empty((shape[0] + 1) // 2, *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(Path(files[0]).parent)))
    return state


def runai(files: list[str]) -> Any:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        return {name: tensor.chunk(2)[0].clone() for name, tensor in streamer.get_tensors()}


def fastsafetensors(files: list[str]) -> Any:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name).chunk(2)[0].clone() for name in buffer.key_to_rank_lidx}


WAYS: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "mapped": (mapped, "safetensors"),
    "mapped, by one replica": (by_one_replica, "safetensors"),
    "get_slice": (get_slice, "safetensors"),
    "DCP": (dcp, "torch"),
    "runai-model-streamer": (runai, "runai_model_streamer"),
    "fastsafetensors": (fastsafetensors, "fastsafetensors"),
}


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def run_rank(way: str, files: list[str]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    before, start, start_cpu = peak_bytes(), time.perf_counter(), time.process_time()
    read = WAYS[way][0](files)
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    assert read
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_growth_bytes": peak_bytes() - before}


def run_once(way: str, files: list[str]) -> dict[str, float]:
    environs = [dict(os.environ)]
    if way in ("DCP", "mapped, by one replica"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        environs = [{**os.environ, **group, "RANK": str(rank)} for rank in range(2)]
    command = [sys.executable, __file__, "--rank", way, *files]
    ranks = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for environ in environs]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{way} failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {key: max(result[key] for result in results) for key in results[0]}


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(run_rank(sys.argv[2], sys.argv[3:])), flush=True)
        os._exit(0)
    parser = make_parser(__doc__, "readers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder for the model; default: a temporary one")
    args = parser.parse_args()
    ways = [way for way, (_, package) in WAYS.items() if importlib.util.find_spec(package)]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="readers_") as temporary:
        model = (args.folder or Path(temporary)) / SIZE.replace(" ", "_").replace(",", "")
        save_model(SIZES[SIZE], model)
        files = sorted(map(str, model.glob("*.safetensors")))
        for number in range(args.rounds):
            for way in ways if number % 2 == 0 else ways[::-1]:
                found[way].append(run_once(way, files))
    result = {
        "rounds": args.rounds,
        "model": SIZE,
        "ways": {
            way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()
        },
    }
    write_result("readers", args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
