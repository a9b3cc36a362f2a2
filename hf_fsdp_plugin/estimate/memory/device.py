"""What a GPU holds besides tensors: workspaces of cuBLAS, buffers of NCCL, the CUDA context, cached memory.

The table of figures, with their sources, is the constants below. On device types other than ``cuda`` none is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.results import DeviceMemory
from hf_fsdp_plugin.estimate.workload import Workload, update_loop
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_memory, plural

_MIB: Final = 1 << 20
_WORKSPACES: Final = ((9.0, 32 * _MIB), (0.0, 8 * _MIB + 128 * 1024))
"""Lowest compute capability -> bytes of a workspace of cuBLAS, which torch allocates for each thread that has a handle,
and stream (``getChosenWorkspaceSize`` in ATen/cuda/CublasHandlePool.cpp). cuBLASLt shares it."""
_THREADS: Final = 2
"""Threads that multiply matrices: the one that runs forward, and autograd's of the device."""
_CONTEXT: Final = 616 * _MIB
"""The CUDA context with the kernels that are loaded. Published: 256 MiB (RTX 3090, torch 2.7, invoke-ai/InvokeAI issue
9413), 426 MiB (RTX 6000 Ada, torch 2.10, unslothai/unsloth-zoo pull request 1053), 616 MiB (a server with 8 GPUs,
LMCache/LMCache issue 4019). This is the largest."""
_CONNECTION: Final = 12 * _MIB
"""Bytes that NCCL allocates for one channel of a connection: buffers of 512 KiB (LL), 4.7 MiB (LL128) and 4 MiB (simple
protocol, ``NCCL_BUFFSIZE``) and two structures, in allocations of whole 2 MiB (``p2pSendSetup`` and ``p2pRecvSetup`` in
src/transport/p2p.cc, ``computeBuffSizes`` in src/init.cc; NVIDIA/nccl issue 1685 logs 10 and 2 MiB)."""
_CHANNELS: Final = {True: 24, False: 4}
"""Whether GPUs are linked by NVLink -> channels: 24 in logs of 8 A100 (NVIDIA/nccl-tests issue 100), fewer on other
machines (16 on 8 H800, NVIDIA/nccl issue 892); 4 without NVLink is an assumption."""
_PCIE_BANDWIDTH: Final = 64e9
"""Bytes/s of PCI Express 5.0 x16: faster links are NVLink."""
RESERVED_RATIO: Final = 1.3
NEEDED_RATIO: Final = 1.1
"""Ratios of reserved and of needed memory to the allocated peak: medians of simulated steps (docs/results.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The known properties of the GPUs of a run.

    Attributes:
        capability: compute capability, such as 9.0; ``None`` if unknown, for which that of newer GPUs is assumed.
        has_nvlink: ``None`` if unknown, for which NVLink is assumed, as it needs more memory.
    """

    capability: float | None = None
    has_nvlink: bool | None = None


UNKNOWN: Final = Gpu()


def gpu_of(machine: Machine | None) -> Gpu:
    """Return the known properties of the GPUs of a machine."""
    if machine is None or machine.capability is None:
        return UNKNOWN
    return Gpu(capability=machine.capability, has_nvlink=machine.intra.bandwidth > _PCIE_BANDWIDTH)


def workspace_bytes(device_type: str, gpu: Gpu = UNKNOWN) -> tuple[int, ...]:
    """Return the bytes of each workspace of cuBLAS: of the forward's thread, and of the backward's."""
    if device_type != "cuda":
        return (0,) * _THREADS
    capability = _WORKSPACES[0][0] if gpu.capability is None else gpu.capability
    size = next(size for least, size in _WORKSPACES if capability >= least)
    return (size,) * _THREADS


def framework_bytes(device_type: str, gpu: Gpu = UNKNOWN) -> int:
    """Return the bytes that torch allocates on a device for its libraries."""
    return sum(workspace_bytes(device_type, gpu))


def communicator_sizes(plan: FsdpPlan) -> tuple[int, ...]:
    """Return the number of ranks of each NCCL communicator of a rank: the world, and the axes of a 2-D mesh."""
    strategy = STRATEGIES[plan.strategy]
    is_flat = plan.mesh.replicate == 1 and strategy.is_sharded and not strategy.hybrid
    axes = () if is_flat else (plan.mesh.replicate, plan.mesh.shard)
    return tuple(size for size in (plan.world_size, *axes) if size > 1)


def nccl_bytes(plan: FsdpPlan, gpu: Gpu = UNKNOWN) -> int:
    """Return the bytes of the buffers of all communicators.

    Each channel has a ring, and for all-reduces a tree: with one neighbour if there are two ranks, else with one in
    half of the channels and two in the others. NVIDIA/nccl issue 964 measures 544 MB for 2 A100 and 688 MB for more;
    this function returns 576 and 720 MiB. NVLink SHARP, and buffers for the network, are not included.
    """
    channels = _CHANNELS[gpu.has_nvlink is not False]
    neighbours = sum(2.0 if size == 2 else 2.5 for size in communicator_sizes(plan))
    return int(channels * neighbours * _CONNECTION)


def device_memory(plan: FsdpPlan, gpu: Gpu, allocated: int) -> DeviceMemory | None:
    """Return the memory of a device with an allocated peak; ``None`` for device types whose allocator is not known."""
    if plan.device_type != "cuda":
        return None
    return DeviceMemory(
        allocated=allocated, reserved=int(allocated * RESERVED_RATIO), needed=int(allocated * NEEDED_RATIO),
        context=_CONTEXT, nccl=nccl_bytes(plan, gpu),
    )  # fmt: skip


def assumptions(plan: FsdpPlan, workload: Workload, gpu: Gpu = UNKNOWN) -> Iterator[str]:
    """Yield the assumptions of an estimate, one sentence each."""
    loop, device = update_loop(workload, plan.device_type), plan.device_type
    is_default = workload.update_loop is None and loop == "fused"
    default = ", the Trainer's default (adamw_torch_fused); --foreach or --for-loop for others" if is_default else ""
    yield "All samples have the full sequence length."
    yield f"The optimizer is {workload.optimizer} with {loop} updates{default}."
    if device == "cpu":
        yield "Memory that torch's allocator has reserved but not allocated (fragmentation) is not included."
        if plan.offload_params:
            yield "Parameter offload has no effect on CPU ranks."
    elif device != "cuda":
        yield (
            f"What the allocator of {device} devices reserves beyond the allocated memory, their context, "
            "and the buffers of their collectives are not known, and not included."
        )
    else:
        size = format_memory(workspace_bytes("cuda", gpu)[0])
        of = "GPUs from compute capability 9.0 on; name a --machine for others" if gpu.capability is None else "the GPU"
        yield (
            f"The allocator reserves {RESERVED_RATIO:g} times the allocated memory, and needs {NEEDED_RATIO:g} times: "
            "medians of simulated steps, which vary from 1.1 to 1.6 and from 1.03 to 1.23."
        )
        yield f"cuBLAS has two workspaces of {size}, for the threads of forward and backward, as on {of}."
        yield f"The CUDA context has {format_memory(_CONTEXT)}, the largest published figure."
        if groups := communicator_sizes(plan):
            count, channels = plural(len(groups), "communicator"), _CHANNELS[gpu.has_nvlink is not False]
            yield f"NCCL has {count} with {channels} channels each, without NVLink SHARP."
