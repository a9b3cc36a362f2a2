"""The script that ``two_hosts.py`` launches: measures the bytes of a step over the link, or trains with checkpoints."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from scripts.bench.ranks.two_hosts_link import transferred

WIDTH, LAYERS, WARM_UP, STEPS, SAVE_STEPS = 512, 6, 2, 4, 3
PROBE_BYTES = 4_000_000


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_step(accelerator: Any, model: Any, optimizer: Any) -> Callable[[int], float]:
    def step(number: int) -> float:
        """Train with the same samples whatever the number of ranks, and return this rank's mean loss."""
        total = 0.0
        for part in range(accelerator.gradient_accumulation_steps):
            batch = part * accelerator.num_processes + accelerator.process_index
            generator = torch.Generator().manual_seed(100 * number + batch)
            with accelerator.accumulate(model):
                loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        return total / accelerator.gradient_accumulation_steps

    return step


def bytes_of(action: Callable[[], Any]) -> tuple[int, int, float]:
    """Return the bytes that this host has sent and received meanwhile, and the seconds."""
    dist.barrier()
    time.sleep(0.3)  # acknowledgements of the barrier
    dist.barrier()
    sent, received = transferred()
    began = time.monotonic()
    action()
    seconds = time.monotonic() - began
    dist.barrier()
    time.sleep(0.3)
    after = transferred()
    return after[0] - sent, after[1] - received, seconds


def probe() -> dict[str, float]:
    """Return the bytes that one host sends for each byte of a collective, for all four ranks and for two hosts."""
    pairs = [dist.new_group([local, local + 2]) for local in (0, 1)]
    pair = pairs[dist.get_rank() % 2]
    found = {}
    for name, group, size in (("world", None, 4), ("pair", pair, 2)):
        whole = torch.ones(PROBE_BYTES // 4)
        part = torch.ones(whole.numel() // size)
        for kind, call in {
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),  # noqa: B023
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),  # noqa: B023
            "all_reduce": lambda: dist.all_reduce(whole, group=group),  # noqa: B023
        }.items():
            call()
            sent, _, _ = bytes_of(call)
            found[f"{kind} {name}"] = round(sent / PROBE_BYTES, 3)
    return found


def measure(accelerator: Any, model: Any, optimizer: Any, out: Path) -> None:
    step = make_step(accelerator, model, optimizer)
    for number in range(WARM_UP):
        step(number)
    rows = [bytes_of(lambda number=number: step(WARM_UP + number)) for number in range(STEPS)]
    plan = plan_of(model)
    assert plan is not None
    calls = estimate_communication(plan, make_model(), Workload(micro_batch=4, seq_len=1, clip_norm=False))
    collectives = [
        {"kind": c.kind, "axis": c.axis, "group_size": c.group_size, "bytes": c.bytes, "calls": c.calls} for c in calls
    ]
    factors = probe()
    if accelerator.is_main_process:
        out.write_text(json.dumps({"steps": rows, "collectives": collectives, "factors": factors}))


def train(
    accelerator: Any, model: Any, optimizer: Any, out: Path, num_steps: int, pause: float, storage: str = ""
) -> None:
    step, number = make_step(accelerator, model, optimizer), 0
    if storage:
        out = out / socket.gethostname()  # the disk of this host
        out.mkdir(exist_ok=True)
    checkpoint = hfp.newest_checkpoint(storage or out, this_run=True)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        number = int(checkpoint.name.removeprefix("step_"))
    while number < num_steps:
        loss = accelerator.reduce(torch.tensor(step(number)), "mean").item()
        number += 1
        with (out / f"losses_{accelerator.process_index}").open("a") as file:
            file.write(f"{number} {loss!r} {os.getpid()} {accelerator.num_processes}\n")
        time.sleep(pause)
        if number % SAVE_STEPS == 0:
            accelerator.save_state(out / f"step_{number}")
    accelerator.end_training()


def main() -> None:
    mode, out, *rest = sys.argv[1:]
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if mode == "measure":
        measure(accelerator, model, optimizer, Path(out))
    else:
        train(accelerator, model, optimizer, Path(out), int(rest[0]), float(rest[1]), *rest[2:])


if __name__ == "__main__":
    main()
