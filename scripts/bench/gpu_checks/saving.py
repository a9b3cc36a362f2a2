"""Saves: pinned memory, the stall of training, whole state dicts, and contexts on the devices of other ranks."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Run,
    Size,
    Skipped,
    check,
    device_module,
    device_of,
    expect,
    is_rank_0,
    on_accelerator,
    on_all,
    reset_process,
    shared_folder,
    size_for,
    torch_device,
)

_BYTES_PER_PARAM = 12
"""Of a checkpoint: fp32 weights and two moments of AdamW."""


@check(seconds=50, limit=200)
def save_stall(case: Case) -> Case:
    """Time asynchronous sharded saves of 4 GB and more: the pause of training, the steps meanwhile, and the write.

    The second save uses the pinned memory of the first. The step after a save waits for the copies. Stock Accelerate
    saves the same model with `save_state`.
    """
    size = size_for(case, 24, largest="0.4 B")
    num_bytes = _BYTES_PER_PARAM * size.num_params
    with shared_folder(3 * num_bytes) as folder:
        found = _own_saves(case, size, folder)
        reset_process()
        _remove(folder / "first", folder / "second", folder / "now")
        stock = Run(case, size, stock=True)
        plugin = stock.accelerator.state.fsdp_plugin
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # Accelerate keeps those of another type
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        stock.step()  # makes the state of the optimizer
        found["stock_seconds"] = _timed(case, lambda: stock.accelerator.save_state(str(folder / "stock")))
    found = {name: None if value is None else round(max(on_all(value)), 4) for name, value in found.items()}
    stall, whole = found["second_stall_seconds"], found["second_write_seconds"]
    expect(
        stall < found["stock_seconds"] or size is TINY, f"training pauses longer than with stock Accelerate: {found}"
    )
    text = (
        f"{num_bytes / 1e9:.1f} GB: training pauses {found['first_stall_seconds']:.2f} s, then {stall:.2f} s; "
        f"the next step takes {found['second_next_step_seconds']:.2f} s (usually {found['step_seconds']:.2f} s); "
        f"written after {whole:.1f} s ({num_bytes / whole / 1e9:.2f} GB/s); synchronous "
        f"{found['synchronous_seconds']:.1f} s, stock Accelerate {found['stock_seconds']:.1f} s"
    )
    return {"text": text, "checkpoint_bytes": num_bytes, **found}


def _own_saves(case: Case, size: Size, folder: Path) -> dict[str, Any]:
    """Save twice in the background and once in the foreground, and return the times in seconds."""
    from hf_fsdp_plugin.integrations.saving import manager
    from hf_fsdp_plugin.tools.verify.verification import verify

    run, found = Run(case, size), {}
    run.step()
    found["step_seconds"] = min(_timed(case, run.step) for _ in range(3))
    for name in ("first", "second"):
        path, start = str(folder / name), time.perf_counter()
        found[f"{name}_stall_seconds"] = _timed(case, lambda path=path: run.accelerator.save_state(path))
        steps = [_timed(case, run.step)]  # waits for the copies; the first time also until their memory is pinned
        found[f"{name}_next_step_seconds"] = steps[0]
        # All ranks leave the loop together: a step of one alone would wait for the others.
        while not max(on_all(manager().save_in_flight is None or time.perf_counter() - start > 60)):
            steps.append(_timed(case, run.step))
        manager().wait()
        found[f"{name}_write_seconds"] = time.perf_counter() - start
        found[f"{name}_step_seconds_meanwhile"] = max(steps, default=None)
    problems = verify(folder / "second").problems
    expect(not problems, f"the checkpoint is damaged: {problems[:1]}")
    run.accelerator.state.fsdp_plugin.async_save = False
    _remove(folder / "first")
    found["synchronous_seconds"] = _timed(case, lambda: run.accelerator.save_state(str(folder / "now")))
    manager().close()
    return found


def _timed(case: Case, run: Callable[[], Any]) -> float:
    """Return the seconds of a call, without the device's work before it, and with what it has started.

    Without the work of other streams: beside the next step, an asynchronous save copies on a stream of its own.
    """
    device_of(case).synchronize()
    start = time.perf_counter()
    run()
    if on_accelerator(case):
        device_module(case).current_stream().synchronize()
    return time.perf_counter() - start


def _remove(*folders: Path) -> None:
    """Make room on the disk."""
    import torch.distributed as dist

    dist.barrier()
    if is_rank_0():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


@check(seconds=25, limit=120)
def pinning(case: Case) -> Case:
    """Pin 8 GB in a thread, as saves do, while this thread launches kernels; then time copies in both directions.

    The driver holds a lock while it pins. ``longest_launch_seconds`` shows how long a launch waited for it.
    """
    import torch

    from hf_fsdp_plugin.checkpoint.writing.staging_buffers import allocate_aligned, unpin

    if not on_accelerator(case):
        raise Skipped("CPU ranks pin no memory")
    size = min(8 << 30, _available_host_memory() // (4 * case["ranks"]))
    if size_for(case, 24) is TINY:
        size = 1 << 26
    device, index, made = torch_device(case), device_of(case).current_index(), []
    counter = torch.zeros(1, device=device)

    def work() -> None:
        device_of(case).set_current(index)
        start = time.perf_counter()
        made.append(allocate_aligned(size, pinned=True))
        made.append(time.perf_counter() - start)

    _longest_launch(counter, 0.1, None)  # the first launch loads the kernel
    launch = _longest_launch(counter, 0.2, None)
    thread = threading.Thread(target=work)
    thread.start()
    launch_meanwhile = _longest_launch(counter, 0.0, thread)
    thread.join()
    expect(len(made) == 2, "the thread that pins has failed")
    memory, pin_seconds = made
    expect(memory.is_pinned(), "the memory is not pinned")
    on_device = torch.empty(min(size, 1 << 30), dtype=torch.uint8, device=device)
    rates = {}
    for name, target, origin in (("to_host", memory, on_device), ("to_device", on_device, memory)):
        part, whole = target[: on_device.numel()], origin[: on_device.numel()]
        part.copy_(whole, non_blocking=True)
        device_of(case).synchronize()
        elapsed, start = 0.0, time.perf_counter()
        for _ in range(3):
            part.copy_(whole, non_blocking=True)
        device_of(case).synchronize()
        elapsed = (time.perf_counter() - start) / 3
        rates[name] = round(on_device.numel() / elapsed / 1e9, 2)
    unpin(memory)
    pin_rate = round(size / pin_seconds / 1e9, 2)
    text = (
        f"{size / 1e9:.1f} GB pinned in {pin_seconds:.2f} s ({pin_rate} GB/s), a launch waits at most "
        f"{launch_meanwhile:.3f} s meanwhile ({launch:.4f} s before); copies {rates} GB/s"
    )
    return {
        "text": text,
        "pinned_bytes": size,
        "pin_seconds": round(pin_seconds, 3),
        "longest_launch_seconds": round(launch_meanwhile, 5),
        "usual_launch_seconds": round(launch, 5),
        "gb_per_second": {"pinning": pin_rate, **rates},
    }


def _longest_launch(counter: Any, least: float, thread: threading.Thread | None) -> float:
    """Launch kernels for a time and until a thread has ended. Returns the longest seconds of a launch."""
    longest, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < least or (thread is not None and thread.is_alive()):
        start = time.perf_counter()
        counter.add_(1)
        longest = max(longest, time.perf_counter() - start)
        time.sleep(0.0002)  # a queue that is full makes launches wait too
    return longest


def _available_host_memory() -> int:
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable"))


@check(seconds=5)
def contexts(case: Case) -> Case:
    """Save in the background, and look for contexts on the GPUs of other ranks, which take 0.5 GB each."""
    import torch

    from hf_fsdp_plugin.integrations.saving import manager

    if case["device"] != "cuda":
        raise Skipped("only CUDA has contexts")
    count, own = torch.cuda.device_count(), torch.cuda.current_device()
    if count == 1:
        raise Skipped("not seen: this process has one GPU, so it cannot have a context on another")
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        raise Skipped("not seen: this torch has no torch._C._cuda_hasPrimaryContext")
    run = Run(case)
    run.train(2)
    with shared_folder() as folder:
        run.accelerator.save_state(str(folder / "saved"))
        run.step()
        manager().wait()
        found = [index for index in range(count) if has_context(index)]
    expect(found == [own], f"a rank on GPU {own} has contexts on GPUs {found}")
    return {"text": f"{count} GPUs, a context on its own only", "contexts": found}


@check(seconds=5)
def pinned_saves(case: Case) -> Case:
    """Save in the background twice, with memory that is pinned in a thread, and leave no error for the next kernel."""
    from hf_fsdp_plugin.integrations.saving import manager

    run = Run(case)
    run.train()
    seconds = {}
    with shared_folder() as folder:
        for name in ("first", "second"):
            begin = time.perf_counter()
            run.accelerator.save_state(str(folder / name))
            seconds[f"{name}_stall_s"] = round(time.perf_counter() - begin, 3)
            run.step()  # a kernel raises an error that the runtime has kept
            manager().wait()
            seconds[f"{name}_total_s"] = round(time.perf_counter() - begin, 3)
        run.accelerator.state.fsdp_plugin.async_save = False
        begin = time.perf_counter()
        manager().save_model(run.model, folder / "now", "sharded")
        seconds["foreground_s"] = round(time.perf_counter() - begin, 3)
    return seconds


@check(seconds=3)
def state_dict(case: Case) -> Case:
    """Gather the whole state dict: only rank 0 has it, in CPU memory, and no GPU holds the model (C4)."""
    run = Run(case)
    run.train(2)
    whole_bytes = 4 * sum(parameter.numel() for parameter in TINY.model().parameters())
    growth = 0
    if on_accelerator(case):
        device_module(case).synchronize()
        device_module(case).reset_peak_memory_stats()
        before = device_module(case).memory_allocated()
    state = run.accelerator.get_state_dict(run.model)
    if on_accelerator(case):
        growth = device_module(case).max_memory_allocated() - before
        # FSDP1 with offload gathers nothing; otherwise rank 0's part is copied from the device piece by piece.
        expect(growth < whole_bytes / 2, f"the GPU held {growth} of {whole_bytes} bytes")
    if is_rank_0():
        expect({t.device.type for t in state.values()} == {"cpu"}, "a tensor is not in CPU memory")
        expect(sum(t.numel() for t in state.values()) * 4 == whole_bytes, "the state dict is not whole")
    else:
        expect(not state, "a rank other than 0 has tensors")
    return {"whole_bytes": whole_bytes, "gpu_growth_bytes": growth}
