"""What every estimate takes and returns: the workload, and memory, communication and time of one step of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Optimizer = Literal["adamw", "sgd", "adafactor", "adamw_8bit", "muon"]
UpdateLoop = Literal["for_loop", "foreach", "fused"]
"""How the optimizer runs over the parameters: torch's arguments ``foreach`` and ``fused``, or neither."""
Attention = Literal["eager", "sdpa", "flash_attention_2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step of one rank.

    Attributes:
        micro_batch: samples per rank and forward pass.
        seq_len: tokens per sample, with padding.
        accumulation: micro-batches per optimizer step.
        sync_each_batch: whether gradients are reduced after every micro-batch. If not, ranks keep whole gradients of
            all units until the last micro-batch (``no_sync``, Accelerate's default).
        optimizer: adamw_8bit is bitsandbytes' ``AdamW8bit``.
        update_loop: ``None`` for the default: ``fused`` for AdamW on CUDA, as the Trainer's; else torch's on the
            device, ``foreach`` on accelerators and ``for_loop`` on the CPU.
        clip_norm: whether gradients are clipped by their norm before the step (the Trainer's default).
        attention: Transformers' ``attn_implementation``.
    """

    micro_batch: int
    seq_len: int
    accumulation: int = 1
    sync_each_batch: bool = False
    optimizer: Optimizer = "adamw"
    update_loop: UpdateLoop | None = None
    clip_norm: bool = True
    attention: Attention = "sdpa"


def update_loop(workload: Workload, device_type: str) -> UpdateLoop:
    """Return how the optimizer runs over the parameters.

    Unless the workload sets it: the Trainer's default for AdamW on CUDA (``optim`` of TrainingArguments is
    ``adamw_torch_fused``), else torch's default on the device.
    """
    if workload.update_loop is not None:
        return workload.update_loop
    if device_type == "cuda" and workload.optimizer == "adamw":
        return "fused"
    return "for_loop" if device_type == "cpu" else "foreach"


MemoryKind = Literal["params", "grads", "optimizer", "activations", "gathered", "other"]
KIND_NAMES: Final[Mapping[MemoryKind, str]] = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer state", "activations": "activations",
    "gathered": "gathered units and buffers", "other": "other",
}  # fmt: skip
MEMORY_KINDS: Final = tuple(KIND_NAMES)
"""Kinds of memory.

``params``: this rank's shards. ``grads``: sharded gradients, and whole ones kept while gradients accumulate.
``optimizer``: the optimizer's state. ``activations``: tensors that the backward pass needs, and temporary tensors of
the forward and backward passes, logits and loss included. ``gathered``: whole parameters of gathered units, and the
buffers of all-gathers and reduce-scatters. ``other``: temporary tensors of update and clipping, buffers of the model,
and what the framework allocates.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Memory of a rank at one moment of a step.

    Attributes:
        where: ``forward of model.layers.3``, ``backward of model.layers.3``, ``clipping``, ``optimizer step``.
        bytes_by_kind: bytes at this moment.
    """

    where: str
    bytes_by_kind: Mapping[MemoryKind, int]

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_kind.values())

    @property
    def largest(self) -> MemoryKind:
        """The kind with the most bytes."""
        return max(MEMORY_KINDS, key=lambda kind: self.bytes_by_kind[kind])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes, of which torch's allocator manages a part.

    Attributes:
        allocated: largest allocated memory, as ``torch.cuda.max_memory_allocated`` counts it.
        reserved: what the allocator then holds on a device with enough memory (``max_memory_reserved``).
        needed: the least that the allocator must be able to hold. Below `reserved`, it returns cached memory to the
            device when it needs other memory, which waits for the device.
        context: the CUDA context.
        nccl: buffers of NCCL's communicators.
    """

    allocated: int
    reserved: int
    needed: int
    context: int
    nccl: int

    @property
    def total(self) -> int:
        """Memory that the device shows as used (``nvidia-smi``)."""
        return self.reserved + self.context + self.nccl

    @property
    def total_needed(self) -> int:
        return self.needed + self.context + self.nccl

    def to_json(self) -> dict[str, int | None]:
        """Return the object ``device_memory`` of ``plan --json``."""
        return {
            "allocated_bytes": self.allocated, "reserved_bytes": self.reserved, "context_bytes": self.context,
            "nccl_bytes": self.nccl, "total_bytes": self.total, "needed_bytes": self.total_needed,
            "expandable_reserved_bytes": None,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of the rank that needs most, in the steady state: from the second step on.

    Attributes:
        peak: the moment with the most memory.
        timeline: moments in the order of a step; every unit's forward and backward pass, clipping and update.
        offload_bytes: memory of the host per rank that offload uses.
        rounding_bytes: the part of it that is lost by rounding, of parameters and gradients.
        staging_bytes: memory of the host per rank for the copies of asynchronous saves. Replicas divide the tensors.
        assumptions: what the figures assume, one sentence each.
        device: what the device holds; ``None`` where only the allocated memory, the peak, is predicted.
    """

    peak: Moment
    timeline: tuple[Moment, ...] = ()
    offload_bytes: int = 0
    rounding_bytes: int = 0
    staging_bytes: int = 0
    assumptions: tuple[str, ...] = ()
    device: DeviceMemory | None = None

    @property
    def host_bytes(self) -> int:
        """Memory of the host per rank, besides that of the process."""
        return self.offload_bytes + self.staging_bytes

    @property
    def needed_bytes(self) -> int:
        """The least memory of a device on which the step runs."""
        return self.peak.bytes if self.device is None else self.device.total_needed

    @property
    def total_bytes(self) -> int:
        """The memory of a device that the step uses if it is there."""
        return self.peak.bytes if self.device is None else self.device.total

    def to_json(self) -> dict[str, Any]:
        """Return the object ``per_rank`` of ``plan --json``: bytes of each kind at the peak."""
        kinds = {f"{kind}_bytes": self.peak.bytes_by_kind.get(kind, 0) for kind in MEMORY_KINDS}
        return {"peak_bytes": self.peak.bytes, **kinds, "host_bytes": self.host_bytes}


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Axis = Literal["shard", "replicate", "context", "tensor", "expert", "world"]
LAYER_AXES: Final = frozenset({"context", "tensor", "expert"})
"""Axes whose collectives are in the forward and backward of layers, which wait for them."""
StepPhase = Literal["forward", "backward", "clipping", "update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Calls of one collective that are alike, in one optimizer step.

    Attributes:
        axis: the ranks that take part: those of an axis of the mesh, or all. Experts are sharded over the ranks of the
            shard axis that have the same ones.
        group_size: number of ranks that take part in a call.
        bytes: bytes of the larger side of one call on a rank: the output of an all-gather, the input of a
            reduce-scatter, the tensor of an all-reduce, what one side of an all-to-all has.
        calls: number of calls per optimizer step.
        unit: name of the unit, as in the plan; empty for the root unit and for collectives of no unit.
        phase: the part of the step.
    """

    kind: CollectiveKind
    axis: Axis
    group_size: int
    bytes: int
    calls: int
    unit: str
    phase: StepPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Time of one optimizer step.

    Attributes:
        step_seconds: the most likely time.
        low_seconds, high_seconds: interval of the time; ``None`` without measurements that support one.
        evidence: how many measured runs lay inside such intervals, or why there is no interval.
        compute_seconds: forward, backward and update without communication.
        communication_seconds: all collectives, overlapped or not.
        exposed_seconds: communication during which no computation runs.
        tokens_per_second: tokens that all ranks together train per second.
        mfu: model FLOP/s utilization: FLOPs of the model (without recomputation) over the peak of the devices, between
            0 and 1; ``None`` if the machine's peak is unknown.
        machine: the figures of devices and links that were used.
    """

    step_seconds: float
    low_seconds: float | None
    high_seconds: float | None
    evidence: str
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    tokens_per_second: float
    mfu: float | None
    machine: str
