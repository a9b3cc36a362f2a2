"""Measures the present machine: throughput, start of operations and collectives, while all ranks are busy.

    python -m scripts.bench.calibration machine.json --ranks 4      one to two minutes

`hf-fsdp plan --machine machine.json` predicts the time of a step on it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional

from hf_fsdp_plugin.devices import accelerator_type, get_device
from hf_fsdp_plugin.tools.plan.estimate.machines import Curve, Link, Machine, MeasuredCollective, read_machine
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind
from hf_fsdp_plugin.torch_private.functions import TorchDispatchMode

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MATMUL_SIZES: Final = (32, 64, 128, 256, 512, 1024)
_LARGE_MATMUL_SIZES: Final = (512, 1024, 2048, 4096, 8192)
_BYTES: Final = tuple(1 << power for power in range(14, 27, 2))
_ATTENTION: Final = ((1, 64), (4, 128), (4, 256), (4, 512))
_COLD_BYTES: Final = 64 << 20
_COLLECTIVES: Final[tuple[CollectiveKind, ...]] = ("all_gather", "reduce_scatter", "all_reduce")
TimedCall = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """How each figure is measured: the mean of ``repeats`` blocks of at least ``block_seconds`` on the slowest rank.

    It is a mean because other load on the machine, which delays some blocks, also delays some parts of a step. It is
    the slowest rank of each block because ranks wait for each other in every collective of a step: of ranks that share
    a core, one that ends a block early would have to wait for the others.
    ``clock`` may be ``time.process_time``, which does not count the time of other processes.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    repeats: int = 5
    block_seconds: float = 0.02

    def seconds(self, call: TimedCall) -> float:
        """Return the mean time of a call on the slowest rank. Collective: all ranks measure at the same time."""
        call()
        once = self._block_seconds(call, 1)
        number = max(_of_ranks(max(1, int(self.block_seconds / max(1e-7, once)))))
        times = []
        for _ in range(self.repeats):
            dist.barrier()
            times.append(self._block_seconds(call, number) / number)
        return statistics.mean(map(max, zip(*_of_ranks(times), strict=True)))

    def _block_seconds(self, call: TimedCall, number: int) -> float:
        synchronize = get_device(self.device.type).synchronize
        synchronize()
        start = self.clock()
        for _ in range(number):
            call()
        synchronize()
        return self.clock() - start

    def curve(self, calls: Iterable[tuple[float, float, TimedCall]]) -> Curve:
        """Return the throughput at several sizes. `calls` has the size, the work and the call of each point."""
        return tuple((size, work / self.seconds(call)) for size, work, call in calls)


def _of_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def calibrate_ranks(num_ranks: int, device_type: str, path: Path) -> Machine:
    """Measure the present machine with this number of ranks, write the result to ``path``, and return it.

    CPU ranks have one thread each, as the launcher sets. Takes one to two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="hf_fsdp_calibrate_") as folder:
        multiprocessing.spawn(_rank, args=(num_ranks, device_type, folder, path), nprocs=num_ranks)
    return read_machine(path)


def write_machine(machine: Machine, path: Path) -> None:
    """Write a file for ``hf-fsdp plan --machine``, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(path.name + ".tmp")
    staging.write_text(json.dumps(asdict(machine), indent=1), encoding="utf-8")
    staging.replace(path)


def _rank(rank: int, num_ranks: int, device_type: str, folder: str, path: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives; 2.11 has only the old names
    torch.set_num_threads(1)
    device = get_device(device_type)
    device.set_current(rank)
    dist.init_process_group(
        device.process_group_backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    machine = calibrate(Measuring(device=torch.device("cpu" if device_type == "cpu" else f"{device_type}:{rank}")))
    if rank == 0:
        write_machine(machine, path)
    dist.barrier()
    dist.destroy_process_group()


def calibrate(measuring: Measuring) -> Machine:
    """Return the present machine, with figures of the ranks of the default process group. Collective.

    All ranks measure at the same time, so that ranks that share cores or memory are measured as they train.
    """
    device = measuring.device
    on_cpu = device.type == "cpu"
    curves: dict[str, Curve] = {}
    for dtype in _DTYPES:
        curves[f"matmul.{dtype}"] = measuring.curve(_matmuls(device, dtype))
        curves[f"memory.{dtype}"] = measuring.curve(_elementwise(device, dtype, torch.add, 3))
        silu = _elementwise(device, dtype, lambda x, _: functional.silu(x), 2)
        curves[f"function.{dtype}"] = measuring.curve(silu)
        curves[f"attention.{dtype}"] = measuring.curve(_attention(device, dtype))
    large = curves["memory.fp32"][-1][1]
    link = Link(bandwidth=large, latency=0.0)
    return Machine(
        name="calibrated",
        device=platform.processor() or platform.machine() if on_cpu else torch.cuda.get_device_name(device),
        ranks_per_machine=dist.get_world_size(),
        peak={dtype: max(value for _, value in curves[f"matmul.{dtype}"]) for dtype in _DTYPES},
        memory_bandwidth=large,
        memory_bytes=float(get_device(device.type).total_memory() or 0),
        intra=link,
        inter=link,
        host_bandwidth=large,
        host_memory_bytes=float(psutil.virtual_memory().total),
        op_seconds=_op_seconds(measuring),
        update_op_seconds=_update_op_seconds(measuring),
        unit_seconds={version: _unit_seconds(measuring, version) for version in ("fsdp1", "fsdp2")},
        overlaps=not on_cpu,
        curves=curves,
        collectives=tuple(_collectives(measuring)),
    )


def _matmuls(device: torch.device, dtype: str) -> Iterator[tuple[float, float, TimedCall]]:
    for size in _MATMUL_SIZES if device.type == "cpu" else _LARGE_MATMUL_SIZES:
        yield 2.0 * size**3, 2.0 * size**3, _over_cold_memory(device, (size, size), dtype, torch.matmul)


def _elementwise(
    device: torch.device, dtype: str, function: Callable[..., Any], sides: int
) -> Iterator[tuple[float, float, TimedCall]]:
    """Yield operations by bytes read and written, with the allocation of the result as in training."""
    for size in _BYTES:
        numel = size // _DTYPES[dtype].itemsize // sides
        yield float(size), float(size), _over_cold_memory(device, (numel,), dtype, function)


def _over_cold_memory(
    device: torch.device, shape: tuple[int, ...], dtype: str, function: Callable[..., Any]
) -> TimedCall:
    """Return a call that uses other operands each time, as in training, so that they are not in a cache.

    The last results are kept, so that each result gets other memory.
    """
    num_bytes = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
    number = max(2, min(256, _COLD_BYTES // num_bytes))
    operands = [torch.randn(shape, device=device).to(_DTYPES[dtype]) for _ in range(number)]
    results: deque[Any] = deque(maxlen=number // 2)
    order = cycle(range(number))

    def call() -> None:
        at = next(order)
        results.append(function(operands[at], operands[at - 1]))

    return call


def _attention(device: torch.device, dtype: str) -> Iterator[tuple[float, float, TimedCall]]:
    """Yield causal attention, forward and backward together (3.5 times the FLOPs of the forward)."""
    for batch, length in _ATTENTION:
        inputs: Any = [
            torch.randn(batch, 4, length, 64, device=device, dtype=_DTYPES[dtype], requires_grad=True) for _ in range(3)
        ]

        def step(inputs: Any = inputs) -> None:
            query, key, value = inputs
            functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

        flops = 2.0 * inputs[0].numel() * length
        yield flops, 3.5 * flops, step


class _CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _op_seconds(measuring: Measuring) -> float:
    """Return the time to start one operation of forward and backward, with the overhead of modules and autograd.

    Measured with a Transformers model that is so small that only this time matters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, use_cache=False
    )
    model: Any = LlamaForCausalLM(config)
    model.to(measuring.device)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=measuring.device)

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    with _CountedOps() as counted:
        step()
    return measuring.seconds(step) / counted.number


def _update_op_seconds(measuring: Measuring, num_tensors: int = 20) -> float:
    tensors = [nn.Parameter(torch.randn(8, device=measuring.device)) for _ in range(num_tensors)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer = torch.optim.AdamW(tensors, foreach=False)
    return measuring.seconds(optimizer.step) / num_tensors / 12


class _Block(nn.Module):
    """A block of operations that are so small that only the time to start them matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(functional.silu(self.first(self.norm(x))))


def _unit_seconds(measuring: Measuring, backend: str, num_units: int = 8) -> float:
    """Return the time of torch's hooks and copies per unit and pass, measured with tiny units, without collectives."""
    device = measuring.device

    def sharded(module: nn.Module) -> nn.Module:
        if backend == "fsdp2":
            fully_shard(module)
            return module
        return FullyShardedDataParallel(module, device_id=device, use_orig_params=True)

    x = torch.randn(4, 8, device=device)
    blocks = [[_Block().to(device) for _ in range(num_units)] for _ in range(2)]
    models = nn.Sequential(*blocks[0]), sharded(nn.Sequential(*map(sharded, blocks[1])))

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    calls = [_collective(kind, 1024, dist.get_world_size(), None, device) for kind in _COLLECTIVES[:2]]
    gather, reduce = (measuring.seconds(call) for call in calls)
    plain, units = (measuring.seconds(partial(step, model)) for model in models)
    return max(0.0, (units - plain) / num_units - 2 * gather - reduce) / 2


def _collectives(measuring: Measuring) -> Iterator[MeasuredCollective]:
    world = dist.get_world_size()
    for size in [size for size in range(2, world + 1) if world % size == 0]:
        groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
        group = groups[dist.get_rank() // size]
        for kind in _COLLECTIVES:
            points = tuple(
                (float(num_bytes), measuring.seconds(_collective(kind, num_bytes, size, group, measuring.device)))
                for num_bytes in _BYTES[:-1]
            )
            yield MeasuredCollective(kind=kind, group_size=size, seconds=points)
        dist.destroy_process_group(group)


def _collective(kind: CollectiveKind, num_bytes: int, size: int, group: Any, device: torch.device) -> TimedCall:
    whole = torch.ones(num_bytes // 4 // size * size, device=device)
    part = torch.ones(whole.numel() // size, device=device)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    return lambda: dist.all_reduce(whole, group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(calibrate_ranks(args.ranks, accelerator_type(), args.path).label)


if __name__ == "__main__":
    main()
