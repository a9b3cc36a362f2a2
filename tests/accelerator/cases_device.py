"""Cases that a rank on the simulated accelerator runs: correct and wrong uses of streams, memory and copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

SIZE = 1000


def _kinds() -> list[str]:
    import torch_npu

    return sorted({finding.kind for finding in torch_npu.take_findings()})


def two_streams(order: str) -> list[str]:
    """Write on a new stream and read on the current one. Returns the kinds of what the device has found."""
    current, other = torch.npu.current_stream(), torch.npu.Stream()
    tensor = torch.zeros(SIZE, device="npu")
    other.wait_stream(current)
    with torch.npu.stream(other):
        tensor.add_(1)
        event = torch.npu.Event()
        event.record()
    if order == "event":
        current.wait_event(event)
    elif order == "event.synchronize":
        event.synchronize()
    elif order == "wait_stream":
        current.wait_stream(other)
    elif order == "synchronize":
        torch.npu.synchronize()
    elif order == "wrong stream":
        current.wait_stream(torch.npu.Stream())
    tensor.sum()
    kinds = _kinds()
    torch.npu.synchronize()
    return kinds


def two_reads() -> list[str]:
    """Read on two streams in no order, which is correct."""
    tensor = torch.ones(SIZE, device="npu")
    other = torch.npu.Stream()
    other.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(other):
        tensor.sum()
    tensor.sum()
    torch.npu.synchronize()
    return _kinds()


def two_parts() -> list[str]:
    """Write two parts of one storage on two streams, which is correct."""
    tensor = torch.zeros(SIZE, device="npu")
    other = torch.npu.Stream()
    other.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(other):
        tensor[: SIZE // 2].fill_(1)
    tensor[SIZE // 2 :].fill_(2)
    torch.npu.synchronize()
    return _kinds()


def race_text() -> tuple[str, str]:
    """Text and stack of a race."""
    import torch_npu

    tensor = torch.zeros(SIZE, device="npu")
    with torch.npu.stream(torch.npu.Stream()):
        tensor.add_(1)
    torch.npu.synchronize()
    finding = torch_npu.take_findings()[0]
    return finding.text, finding.stack


def collective(wait: str) -> list[str]:
    """Reduce a tensor asynchronously and read it."""
    tensor = torch.ones(SIZE, device="npu")
    work = dist.all_reduce(tensor, async_op=True)
    if wait == "work":
        work.wait()
    elif wait == "future":
        work.get_future().wait()
    tensor.sum()
    kinds = _kinds()
    work.wait()
    return kinds


def free(how: str) -> list[str]:
    """Use a tensor on another stream, free it, and write a new tensor of the same size."""
    tensor = torch.ones(SIZE, device="npu")
    current, other = torch.npu.current_stream(), torch.npu.Stream()
    other.wait_stream(current)
    with torch.npu.stream(other):
        tensor.sum()
    if how == "record_stream":
        tensor.record_stream(other)
    elif how == "wait before free":
        current.wait_stream(other)
    del tensor
    if how == "wait before reuse":
        current.wait_stream(other)
    torch.ones(SIZE, device="npu")
    kinds = _kinds()
    torch.npu.synchronize()
    return kinds


def copy_to_host(wait: str) -> tuple[bool, bool]:
    """Copy without blocking and read. Returns whether the host sees NaN, and whether it sees the value."""
    import torch_npu

    source = torch.ones(SIZE, device="npu")
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(source, non_blocking=True)
    source.zero_()  # the copy comes first
    if wait == "synchronize":
        torch.npu.synchronize()
    elif wait == "event":
        event = torch.npu.Event()
        event.record()
        event.synchronize()
    elif wait == "other stream":
        torch.npu.Stream().synchronize()
    result = bool(host.isnan().all()), bool((host == 1).all())
    torch.npu.synchronize()
    assert torch_npu.num_late_copies() == 0
    return result


def host_memory_changes(when: str) -> list[str]:
    """Copy pinned memory to the device and change it."""
    host = torch.ones(SIZE, pin_memory=True)
    host.to("npu", non_blocking=True)
    if when == "after":
        torch.npu.synchronize()
    host.zero_()
    torch.npu.synchronize()
    return _kinds()


def parameter_moves() -> list[str]:
    """Move a pinned parameter as FSDP1 does: it has the memory of the device before the copy is complete."""
    parameter = torch.nn.Parameter(torch.ones(SIZE, pin_memory=True))
    parameter.data = parameter.to("npu", non_blocking=True)
    with torch.no_grad():
        parameter.zero_()
    torch.npu.synchronize()
    return _kinds()


def copy_there_and_back() -> float:
    """Copy to pinned memory and back to the device on one stream, without a wait of the host."""
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(torch.ones(SIZE, device="npu"), non_blocking=True)
    return host.to("npu", non_blocking=True).sum().item()


def pinned_memory() -> dict[str, Any]:
    """Page-lock existing memory, also twice and while a copy is not complete."""
    import torch_npu

    memory = torch.zeros(SIZE)
    result: dict[str, Any] = {"before": memory.is_pinned(), "pin": torch_npu.pin(memory), "pinned": memory.is_pinned()}
    result["again"] = torch_npu.pin(memory[10:20])
    memory.copy_(torch.ones(SIZE, device="npu"), non_blocking=True)
    torch_npu.unpin(memory)
    result["kinds"] = _kinds()
    result["after"] = memory.is_pinned()
    try:
        torch_npu.unpin(memory)
    except RuntimeError as error:
        result["error"] = str(error)
    torch.npu.synchronize()
    return result


def host_waits() -> tuple[dict[str, int], int, str]:
    """Counts of host waits, bytes of the first one, and its stack."""
    import torch_npu

    device = torch.ones(SIZE, device="npu")
    host = torch.zeros(SIZE)
    with torch_npu.HostWaits() as waits:
        host.copy_(device)
        host.copy_(device, non_blocking=True)
        device.copy_(host)
        device.copy_(host, non_blocking=True)
        device.sum().item()
        device.nonzero()
        torch.npu.synchronize()
        torch.npu.current_stream().synchronize()
        event = torch.npu.Event()
        event.record()
        event.synchronize()
        dist.barrier(device_ids=[0])
    return waits.counts(), waits.events[0].num_bytes, waits.events[0].stack


def no_host_waits() -> dict[str, int]:
    """What the host does not wait for."""
    import torch_npu

    device = torch.ones(SIZE, device="npu")
    host = torch.zeros(SIZE, pin_memory=True)
    with torch_npu.HostWaits() as waits:
        host.copy_(device, non_blocking=True)
        torch.npu.Stream().wait_stream(torch.npu.current_stream())
        (device * 2).sum()
        device.repeat_interleave(torch.ones(SIZE, dtype=torch.long, device="npu"), output_size=SIZE)
        dist.all_reduce(device)
    torch.npu.synchronize()
    return waits.counts()


def memory_counters() -> dict[str, int]:
    """Bytes in use after allocations and frees, relative to the start."""
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    one = torch.empty(1, dtype=torch.uint8, device="npu")
    result = {"one byte": torch.npu.memory_allocated() - before}
    large = torch.empty(513, dtype=torch.uint8, device="npu")
    result["two tensors"] = torch.npu.memory_allocated() - before
    view = large[:10]
    del large
    result["with a view"] = torch.npu.memory_allocated() - before
    del view, one
    result["freed"] = torch.npu.memory_allocated() - before
    result["peak"] = torch.npu.max_memory_allocated() - before
    return result


def memory_limit() -> dict[str, Any]:
    """Allocate up to the limit and above it, by a factory and by an operator."""
    import torch_npu

    before = torch.npu.memory_allocated()
    num_ooms = torch.npu.memory_stats()["num_ooms"]
    limit = torch.npu.mem_get_info()[1]
    torch_npu.set_memory_limit(before + 8192)
    try:
        half = torch.zeros(1024, device="npu")
        result: dict[str, Any] = {"free": torch.npu.mem_get_info()[0], "messages": []}
        for allocate in (lambda: torch.empty(1025, device="npu"), lambda: torch.cat([half, half])):
            try:
                allocate()
            except torch.OutOfMemoryError as error:
                result["messages"].append(str(error).split(" has a total")[0])
        result["fits"] = (half + 1).numel()
    finally:
        torch_npu.set_memory_limit(limit)
    result["num_ooms"] = torch.npu.memory_stats()["num_ooms"] - num_ooms
    return result


def random_numbers() -> dict[str, bool]:
    """Draw on the device and compare."""
    ones = torch.ones(SIZE, device="npu")

    def draw() -> torch.Tensor:
        native, _ = torch.native_dropout(ones, 0.5, True)
        return torch.cat([torch.nn.functional.dropout(ones), native, torch.rand(SIZE, device="npu")])

    torch.manual_seed(1)
    first, state, cpu = draw(), torch.npu.get_rng_state(), torch.get_rng_state()
    second = draw()
    result = {
        "draws differ": not torch.equal(first, second),
        "cpu state is kept": torch.equal(cpu, torch.get_rng_state()),
    }
    torch.npu.set_rng_state(state)
    result["state restored"] = torch.equal(draw(), second)
    torch.npu.manual_seed(1)
    result["seed restored"] = torch.equal(draw(), first)
    dropped = []

    def dropping(tensor: torch.Tensor) -> torch.Tensor:
        dropped.append(torch.nn.functional.dropout(tensor))
        return dropped[-1].square()  # recomputation ends when what this saves is there

    checkpoint(dropping, ones.clone().requires_grad_(), use_reentrant=False).sum().backward()
    result["repeated in a checkpoint"] = torch.equal(*dropped)
    own = torch.Generator(device="npu").manual_seed(1)
    before = torch.npu.get_rng_state()
    torch.rand(SIZE, device="npu", generator=own)
    result["own generator is separate"] = torch.equal(before, torch.npu.get_rng_state())
    return result


def autocast_dtypes() -> list[str]:
    """Dtypes of a matrix product and of a softmax, with autocast and without."""
    matrix = torch.ones(4, 4, device="npu")
    with torch.autocast("npu", torch.bfloat16):
        inside = [(matrix @ matrix).dtype, (matrix @ matrix).softmax(0).dtype]
    return [str(dtype) for dtype in [*inside, (matrix @ matrix).dtype]]


def error_of(case: str) -> str:
    """The message of the error that a wrong use raises; empty if it raises none."""
    device, cpu = torch.ones(4, device="npu"), torch.ones(4)
    uses = {
        "two devices": lambda: device + cpu,
        "two devices in a matrix product": lambda: device.view(2, 2) @ cpu.view(2, 2),
        "number on the cpu": lambda: device + torch.tensor(1.0),
        "index on the cpu": lambda: device[torch.tensor([1])],
        "ordinal": lambda: torch.ones(1, device="npu:5"),
        "set_device": lambda: torch.npu.set_device(5),
        "collective on the cpu": lambda: dist.group.WORLD._get_backend(torch.device("npu")).allreduce([cpu]),
    }
    try:
        uses[case]()
    except RuntimeError as error:
        return str(error)
    return ""


def complex_numbers() -> list[float]:
    """Rotate with complex numbers, as rotary embeddings do, with gradients and the lazy conjugate."""
    pairs = torch.ones(3, 2, device="npu", requires_grad=True)
    angles = torch.polar(torch.ones(3, device="npu"), torch.zeros(3, device="npu"))
    rotated = torch.view_as_real(torch.view_as_complex(pairs) * angles.conj())
    rotated.sum().backward()
    assert pairs.grad is not None
    return [*rotated.flatten().tolist(), *pairs.grad.flatten().tolist()]
