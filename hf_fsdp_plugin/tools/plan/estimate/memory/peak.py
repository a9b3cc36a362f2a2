"""Memory of a step in closed form: shards and buffers from the plan, and activations counted on meta tensors.

On a GPU, there is more than tensors: workspaces of cuBLAS, buffers of NCCL (one set per communicator, channel and
neighbour), the CUDA context, cached memory. The figures are the constants below, with their sources. On device types
other than ``cuda`` none is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Final

from torch import nn

from hf_fsdp_plugin.backends.optimizers.offloaded_steps import windows_of
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.text import format_memory, plural
from hf_fsdp_plugin.tools.plan.estimate.divided import as_loaded
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.memory.engines import Fsdp1Engine, Fsdp2Engine
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import profile_step
from hf_fsdp_plugin.tools.plan.estimate.memory.step import Ledger, StepProfile, pinned_bytes
from hf_fsdp_plugin.tools.plan.estimate.muon import describe, muon_step
from hf_fsdp_plugin.tools.plan.estimate.types import DeviceMemory, MemoryEstimate, Optimizer, Workload, update_loop
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import ParameterShard, UnitBytes, ignored_bytes, unit_bytes

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
"""Ratios of reserved and of needed memory to the allocated peak: medians of simulated steps (docs/planning.md)."""


_STEP: Final = 4
"""Bytes of the step count, an fp32 tensor per parameter (``_init_group`` in ``torch/optim/adam.py``)."""
_MIN_8BIT: Final = 4096
"""Smallest number of elements whose state bitsandbytes keeps in 8 bits (``min_8bit_size`` of ``Optimizer2State``)."""
_BLOCK: Final = 256
"""Elements of a block that share a scale in bitsandbytes' 8-bit state."""
_CODE_BOOKS: Final = 2 * 256 * 4
"""Bytes of the two tables from 8-bit codes to fp32 values."""


def estimate_memory(
    plan: FsdpPlan, model: nn.Module, workload: Workload, machine: Machine | None = None
) -> MemoryEstimate:
    """Return the memory of the rank that needs most, in the steady state, with every moment of a step.

    Shards, buffers and optimizer state are computed from the plan, as torch's FSDP allocates them. Activations are
    counted by running the model on the meta device; equal layers run once. Takes well under a second for a 70 B model.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        machine: the figures of the GPUs of a plan for CUDA; ``None`` if they are unknown.

    Raises:
        SpecError: the model has other inputs than a batch of text or images (FSDP-E811), or cannot run on the meta
            device (FSDP-E810).
    """
    plan = as_loaded(plan, model)
    profile = profile_step(plan, model, workload)
    return follow_step(plan, unit_bytes(plan, model), ignored_bytes(plan, model), workload, profile, machine)


def follow_step(
    plan: FsdpPlan,
    sizes: Sequence[UnitBytes],
    ignored: Mapping[str, int],
    workload: Workload,
    profile: StepProfile,
    machine: Machine | None = None,
) -> MemoryEstimate:
    """Return the estimate from sizes and a profile that are computed already, as the planner does.

    Args:
        profile: what :func:`profile_step` has returned for the same model, units, dtypes, checkpointing and sizes.
    """
    ledger = Ledger()
    engine = (Fsdp1Engine if plan.backend == "fsdp1" else Fsdp2Engine)(plan, sizes, ledger)
    shards = [shard for unit in sizes for shard in unit.shards]
    params, state = sum(unit.params for unit in sizes), state_bytes(workload.optimizer, shards)
    on_host = list(offloaded_tensors(plan, sizes)) if engine.offloads else []
    windows = step_windows(plan, shards)
    on_host += [state_bytes(workload.optimizer, window) for window in windows] if plan.offload_optimizer else []
    pins = plan.pin_memory or plan.backend == "fsdp1"
    lost = sum(pinned_bytes(size) - size for size in on_host) if pins else 0
    copies = params + ignored["params"] + ignored["buffers"] + state if plan.spec.checkpoint.asynchronous else 0
    ledger.at("start of the step")
    ledger.add("params", ignored["params"] + (0 if engine.offloads else params))
    ledger.add("optimizer", 0 if engine.offloads or plan.offload_optimizer else state)
    ledger.add("other", ignored["buffers"] + framework_bytes(plan.device_type, machine))
    ledger.add("activations", profile.input_bytes)
    num = min(workload.accumulation, 3)  # the first, one in the middle, and the last
    last_batch = offloaded = 0  # index of the first moment, and the most bytes that activation offload moves at a time
    for number in range(num):
        engine.all_reduces = workload.sync_each_batch or number == num - 1
        engine.syncs = engine.all_reduces or plan.spec.sharding.reduce_replicas_at_last_micro_batch
        last_batch, moved = len(ledger.moments), 0
        for stage, phase, inside in profile.walk():
            name = stage.name if stage.kind in ("post_backward", "last_post_backward") else inside[-1]
            ledger.at(f"{phase} of {name or plan.model_class}")
            engine.run(stage)
            moved += stage.host_bytes
            offloaded = max(offloaded, moved)
        engine.end_backward()
    ledger.free("activations", profile.input_bytes)
    if workload.clip_norm:
        ledger.at("clipping")
    ledger.at("optimizer step")
    ledger.use("other", 0 if engine.offloads else max(step_bytes(workload, plan, windows), default=0))
    peak = max(ledger.moments, key=lambda moment: moment.bytes)
    return MemoryEstimate(
        peak=peak,
        timeline=tuple(ledger.moments[last_batch:]),
        offload_bytes=sum(on_host) + lost + (state if engine.offloads else 0) + offloaded,
        rounding_bytes=lost,
        staging_bytes=ceil(copies / (plan.mesh.replicate if plan.mesh.num_shards > 1 else plan.world_size)),
        assumptions=tuple(assumptions(plan, workload, shards, machine)),
        device=device_memory(plan, machine, peak.bytes),
    )


def offloaded_tensors(plan: FsdpPlan, sizes: Iterable[UnitBytes]) -> Iterator[int]:
    """Yield the bytes of each tensor of parameters and gradients that offload keeps in CPU memory.

    FSDP1 allocates a gradient for each flat shard, also of frozen units (``init_flat_param_attributes``).
    """
    for unit in sizes:
        if plan.backend == "fsdp1":
            yield from (unit.params, unit.params)
            continue
        for shard in unit.shards:
            yield shard.numel * shard.dtype.itemsize
            if shard.trainable:
                yield prod(shard.shape) * shard.dtype.itemsize


def state_bytes(optimizer: Optimizer, shards: Iterable[ParameterShard]) -> int:
    """Return the bytes of an optimizer's state for the trainable shards of a rank.

    ``adamw``: two tensors like the parameter. ``sgd``: none, as momentum is 0 by default. ``adafactor`` (Transformers):
    sums of rows and columns of whole matrices, which every rank has. ``adamw_8bit``: two bytes per element and two fp32
    scales per 256 elements. ``muon``: one tensor for matrices, and AdamW's two for other parameters.
    """
    return sum(_state_of(optimizer, shard) for shard in shards if shard.trainable) + (
        _CODE_BOOKS if optimizer == "adamw_8bit" else 0
    )


def _state_of(optimizer: Optimizer, shard: ParameterShard) -> int:
    size = prod(shard.shape) * shard.dtype.itemsize
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":
        if len(shard.whole) < 2:
            return prod(shard.whole) * 4
        *rows, columns = shard.whole
        return (prod(rows) + prod(rows[:-1]) * columns) * 4
    if optimizer == "adamw_8bit" and prod(shard.shape) >= _MIN_8BIT:
        return 2 * (prod(shard.shape) + ceil(prod(shard.shape) / _BLOCK) * 4)
    if optimizer == "adamw_8bit":
        return 2 * prod(shard.shape) * 4
    if optimizer == "muon" and len(shard.whole) == 2:
        return size
    return 2 * size + _STEP


def step_windows(plan: FsdpPlan, shards: Iterable[ParameterShard]) -> list[list[ParameterShard]]:
    """Return the shards that are updated together: all of them, unless the optimizer's state is in CPU memory."""
    trained = [shard for shard in shards if shard.trainable]
    if not plan.offload_optimizer:
        return [trained]
    sizes = (prod(shard.shape) * shard.dtype.itemsize for shard in trained)
    return [[trained[position] for position in window] for window in windows_of(sizes)]


def step_bytes(workload: Workload, plan: FsdpPlan, windows: Sequence[Sequence[ParameterShard]]) -> Iterator[int]:
    """Yield the bytes that the update of each window allocates: temporary tensors, its state, and that of the next."""
    states = [state_bytes(workload.optimizer, window) * plan.offload_optimizer for window in windows]
    for window, own, following in zip(windows, states, [*states[1:], 0], strict=True):
        yield own + following + update_bytes(workload, plan, window)


def update_bytes(workload: Workload, plan: FsdpPlan, shards: Sequence[ParameterShard]) -> int:
    """Return the bytes of temporary tensors at the worst moment of an update.

    ``for_loop``: a step of AdamW computes ``sqrt`` of the second moment and its quotient, and keeps the quotient until
    the next parameter's is computed. ``foreach``: the square roots of all parameters. ``fused``: none. Adafactor
    gathers one parameter and its gradient, and computes the update in fp32; Muon has the matrices of one exchange.
    """
    trained = [shard for shard in shards if shard.trainable]
    if not trained or workload.optimizer in ("adamw_8bit", "sgd"):
        return 0
    if workload.optimizer == "adafactor":
        # the square of the gradient and the update in fp32 (``Adafactor.step`` of Transformers), and of a sharded
        # parameter the whole one and its gradient
        return max(prod(shard.whole) * (2 if shard.shape == shard.whole else 4) for shard in trained) * 4
    if workload.optimizer == "muon":
        return muon_step(plan, trained).memory
    loop, sizes = (
        update_loop(workload, plan.device_type),
        [prod(shard.shape) * shard.dtype.itemsize for shard in trained],
    )
    if loop != "for_loop":
        return sum(sizes) if loop == "foreach" else 0
    return max([2 * sizes[0], *(before + 2 * size for before, size in pairwise(sizes))])


def workspace_bytes(device_type: str, machine: Machine | None = None) -> int:
    """Return the bytes of a workspace of cuBLAS, of which the forward's thread has one, and the backward's.

    For unknown GPUs, the compute capability of newer ones is assumed.
    """
    if device_type != "cuda":
        return 0
    capability = (machine.capability if machine is not None else None) or _WORKSPACES[0][0]
    return next(size for least, size in _WORKSPACES if capability >= least)


def framework_bytes(device_type: str, machine: Machine | None = None) -> int:
    """Return the bytes that torch allocates on a device for its libraries."""
    return _THREADS * workspace_bytes(device_type, machine)


def communicator_sizes(plan: FsdpPlan) -> tuple[int, ...]:
    """Return the number of ranks of each NCCL communicator of a rank: the world, and the axes of a mesh with several.

    The ranks that have the same experts have one, too.
    """
    mesh = plan.mesh
    axes: tuple[int, ...] = (mesh.replicate, mesh.num_shards) if plan.has_replicas or mesh.has_model_axes else ()
    if mesh.has_model_axes:
        axes += (mesh.context, mesh.tensor, mesh.expert)
        axes += (mesh.num_expert_shards,) if mesh.expert > 1 else ()
    return tuple(size for size in (plan.world_size, *axes) if size > 1)


def num_channels(machine: Machine | None) -> int:
    """Return the channels of a communicator. For unknown GPUs, NVLink is assumed, as it needs more memory."""
    if machine is None or machine.capability is None:
        return _CHANNELS[True]
    return _CHANNELS[machine.intra.bandwidth > _PCIE_BANDWIDTH]


def nccl_bytes(plan: FsdpPlan, machine: Machine | None = None) -> int:
    """Return the bytes of the buffers of all communicators.

    Each channel has a ring, and for all-reduces a tree: with one neighbour if there are two ranks, else with one in
    half of the channels and two in the others. NVIDIA/nccl issue 964 measures 544 MB for 2 A100 and 688 MB for more;
    this function returns 576 and 720 MiB. NVLink SHARP, and buffers for the network, are not included.
    """
    neighbours = sum(2.0 if size == 2 else 2.5 for size in communicator_sizes(plan))
    return int(num_channels(machine) * neighbours * _CONNECTION)


def device_memory(plan: FsdpPlan, machine: Machine | None, allocated: int) -> DeviceMemory | None:
    """Return the memory of a device with an allocated peak; ``None`` for device types whose allocator is not known."""
    if plan.device_type != "cuda":
        return None
    return DeviceMemory(
        allocated=allocated, reserved=int(allocated * RESERVED_RATIO), needed=int(allocated * NEEDED_RATIO),
        context=_CONTEXT, nccl=nccl_bytes(plan, machine),
    )  # fmt: skip


def assumptions(
    plan: FsdpPlan, workload: Workload, shards: Sequence[ParameterShard], machine: Machine | None = None
) -> Iterator[str]:
    """Yield the assumptions of an estimate, one sentence each."""
    loop, device = update_loop(workload, plan.device_type), plan.device_type
    is_default = workload.update_loop is None and loop == "fused"
    default = ", the Trainer's default (adamw_torch_fused); --foreach or --for-loop for others" if is_default else ""
    yield "All samples have the full sequence length."
    if plan.offload_optimizer and workload.optimizer in ("muon", "adamw_8bit"):
        yield f"fsdp_offload_optimizer is refused with {workload.optimizer} (FSDP-E331)."
    if plan.mesh.context > 1:
        yield "Each rank has its part of a sequence, in the batch of the Trainer. Memory is that of the first rank."
    if plan.mesh.expert > 1:
        yield "Tokens are distributed equally over the experts. A rank with more tokens needs more memory."
    if plan.spec.uses_fp8:
        yield "Layers in fp8 compute as fast as in bf16, and their copies of activations in fp8 are not included."
    yield f"The optimizer is {workload.optimizer} with {loop} updates{default}."
    if workload.optimizer == "muon":
        yield describe(plan, muon_step(plan, shards))
    if device == "cpu":
        yield "Memory that torch's allocator has reserved but not allocated (fragmentation) is not included."
        if plan.offload_params:
            yield "Parameter offload has no effect on CPU ranks."
        if plan.spec.offload.optimizer:
            yield "Offload of the optimizer state has no effect on CPU ranks."
    elif device != "cuda":
        yield f"Of {device} devices, only the allocated memory is known: no context, no cached memory, no collectives."
    else:
        size = format_memory(workspace_bytes("cuda", machine))
        of = "the GPU"
        if machine is None or machine.capability is None:
            of = "GPUs from compute capability 9.0 on; name a --machine for others"
        yield (
            f"The allocator reserves {RESERVED_RATIO:g} times the allocated memory, and needs {NEEDED_RATIO:g} times: "
            "medians of simulated steps, which vary from 1.1 to 1.6 and from 1.03 to 1.23."
        )
        yield f"cuBLAS has two workspaces of {size}, for the threads of forward and backward, as on {of}."
        yield f"The CUDA context has {format_memory(_CONTEXT)}, the largest published figure."
        if groups := communicator_sizes(plan):
            count = plural(len(groups), "communicator")
            yield f"NCCL has {count} with {num_channels(machine)} channels each, without NVLink SHARP."
