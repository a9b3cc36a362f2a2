"""What the start of gloo costs with a connection between all ranks, and with connections when they are needed.

The ranks are forked from one process. They start a process group over a store on rank 0 and a hybrid mesh of 8 ranks
per shard group, then run each kind of collective once in each group. Bytes are those of the connections to the store.
The plugin sets TORCH_GLOO_LAZY_INIT from the largest world of the result on.

    python -m scripts.bench gloo_connections    (two minutes on 2 cores; writes docs/results/gloo_connections.json)
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import time
import traceback
from contextlib import suppress
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result

WORLDS = (16, 32, 64, 128)
SHARD = 8
_BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``; ``tcpi_bytes_received`` follows."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "gloo_connections")
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    return parser.parse_args()


def run_rank(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Start the groups, use them, and return what it took."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    began = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size // SHARD, SHARD), mesh_dim_names=("replicate", "shard"))
    dist.barrier()
    found = {"seconds": time.perf_counter() - began, "start_sockets": num_sockets()}
    for group in (None, mesh["replicate"].get_group(), mesh["shard"].get_group()):
        size = dist.get_world_size(group)
        dist.all_reduce(torch.ones(1000), group=group)
        parts = [torch.empty(10) for _ in range(size)]
        dist.all_gather(parts, torch.ones(10), group=group)
        dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10 * size), group=group)
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, rank)
    if objects != list(range(world_size)):
        raise RuntimeError(f"rank {rank} received {objects}")
    dist.broadcast(torch.ones(5), 0)
    dist.barrier()
    found |= {"used_sockets": num_sockets(), "store_bytes": store_bytes(port)}
    dist.barrier()
    dist.destroy_process_group()
    return found


def num_sockets() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def store_bytes(port: int) -> int:
    """Return the bytes that this process has sent to the store and received from it."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            if own.getpeername()[1] == port:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += sum(struct.unpack_from("QQ", info, _BYTES_ACKED))
    return total


def measure(world_size: int, *, lazy: bool) -> dict[str, float]:
    """Return the slowest start, the median of the sockets of a rank, and the bytes of all ranks."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read_end, write_end = os.pipe()
    processes = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.write(write_end, json.dumps(run_rank(rank, world_size, port)).encode() + b"\n")
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        processes.append(process)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        ranks = [json.loads(line) for line in pipe]
    codes = {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes}
    if codes != {0} or len(ranks) != world_size:
        raise SystemExit(f"{world_size} ranks, lazy={lazy}: exit codes {codes}")
    return {
        "seconds": max(rank["seconds"] for rank in ranks),
        **{name: statistics.median(rank[name] for rank in ranks) for name in ("start_sockets", "used_sockets")},
        "store_bytes": sum(rank["store_bytes"] for rank in ranks),
    }


def main() -> int:
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed.device_mesh

    torch.set_num_threads(1)
    worlds = {}
    for world_size in args.worlds:
        worlds[str(world_size)] = {
            name: measure(world_size, lazy=name == "when needed") for name in ("all pairs", "when needed")
        }
        print(world_size, worlds[str(world_size)], flush=True)
    write_result("gloo_connections", args.out, {"worlds": worlds})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
