"""``advise``: compares strategies, meshes, checkpointing, offload and micro-batches, and ranks what fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.planner_evaluator import Evaluator, Subject
from hf_fsdp_plugin.estimate.planner_remedies import remedies
from hf_fsdp_plugin.estimate.planner_space import Choice, Sharding, memory_savings, micro_batches, shardings
from hf_fsdp_plugin.estimate.planner_time import Times
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryEstimate, MemoryKind, TimeEstimate
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.model import DtypeName, Version
from hf_fsdp_plugin.text import format_bytes

HEADROOM: Final = 0.9
"""Part of a device's memory that a row may need. The rest is for fragmentation, the CUDA context and NCCL."""
_NAMES: Final[Mapping[MemoryKind, str]] = {
    "params": "parameters", "grads": "gradients", "optimizer": "optimizer state", "activations": "activations",
    "gathered": "gathered units and buffers", "other": "other memory",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceRow:
    """One combination of settings and what it needs.

    Attributes:
        settings: FSDP settings by canonical name.
        fits: whether the peak is within the device's memory without headroom.
        time: ``None`` without a machine, and for rows that do not fit.
        communicated: bytes of all collectives of a rank per optimizer step.
        reason: why the row is not the best one, in one line; empty for the best one.
    """

    choice: Choice
    settings: Mapping[str, Any]
    fits: bool
    memory: MemoryEstimate
    time: TimeEstimate | None
    communicated: int
    reason: str

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak.bytes

    @property
    def tokens_per_second(self) -> float | None:
        return self.time.tokens_per_second if self.time is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The planner's answer.

    Attributes:
        rows: those that fit, the fastest first, then one for each combination that does not fit.
        limit: bytes of a device without headroom.
        remedies: what would fit, one sentence each, if nothing does.
    """

    rows: tuple[AdviceRow, ...]
    gpu_memory: int
    limit: int
    remedies: tuple[str, ...] = ()

    @property
    def fitting(self) -> tuple[AdviceRow, ...]:
        return tuple(row for row in self.rows if row.fits)

    @property
    def rejected(self) -> tuple[AdviceRow, ...]:
        return tuple(row for row in self.rows if not row.fits)

    @property
    def best(self) -> AdviceRow | None:
        """The fastest row that fits; ``None`` if nothing fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def advise(
    model: nn.Module,
    *,
    seq_len: int,
    global_batch: int,
    gpu_memory: int,
    num_machines: int = 1,
    gpus_per_machine: int = 8,
    machine: Machine | None = None,
    version: Version = 2,
    precision: DtypeName = "bf16",
    wrap: Mapping[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    update_loop: UpdateLoop | None = None,
    clip_norm: bool = True,
    attention: Attention = "sdpa",
    headroom: float = HEADROOM,
) -> Advice:
    """Return the combinations of settings that fit, the fastest first, and why the others do not.

    Offload of parameters is tried only if nothing fits without it. A combination that does not fit is not tried with a
    larger micro-batch, and a strategy that does not fit with full checkpointing and offloaded activations is not tried
    with less.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        global_batch: samples of all ranks per optimizer step.
        gpu_memory: bytes of a device.
        machine: figures of devices and links, which predict tokens/s. Without them, rows that fit are ranked by
            recomputation and communication.
        precision: ``bf16`` or ``fp16`` with fp32 master weights, or ``auto`` for the model's dtype.
        wrap: settings of the wrap policy, such as ``{"wrap.policy": "size", "wrap.min_num_params": 10**8}``. Default:
            the layer classes that the model declares.
        headroom: part of the device's memory that may be used, above 0 and at most 1.

    Raises:
        SpecError: the global batch is not divisible by the number of ranks (FSDP-E812), the model cannot be planned, or
            it has other inputs than a batch of text or images (FSDP-E811).
    """
    world_size = num_machines * gpus_per_machine
    if global_batch < 1 or global_batch % world_size:
        raise SpecError([_indivisible(global_batch, world_size)])
    subject = Subject(
        model=model, seq_len=seq_len, version=version, precision=precision, wrap=wrap or {}, optimizer=optimizer,
        update_loop=update_loop, clip_norm=clip_norm, attention=attention, num_machines=num_machines,
        gpus_per_machine=gpus_per_machine,
    )  # fmt: skip
    evaluator = Evaluator(subject, Times(model, machine) if machine is not None else None)
    limit = int(gpu_memory * headroom)
    rows = list(_rows(evaluator, global_batch, limit, offload=False))
    if not any(row.fits for row in rows):
        rows += _rows(evaluator, global_batch, limit, offload=True)
    fitting = sorted((row for row in rows if row.fits), key=_cost)
    rejected = sorted((row for row in rows if not row.fits), key=lambda row: row.peak_bytes)
    return Advice(
        rows=(*_with_reasons(fitting), *rejected),
        gpu_memory=gpu_memory,
        limit=limit,
        remedies=() if fitting else remedies(subject, global_batch, limit),
    )


def _rows(evaluator: Evaluator, global_batch: int, limit: int, *, offload: bool) -> Iterator[AdviceRow]:
    subject = evaluator.subject
    for sharding in shardings(subject.num_machines, subject.gpus_per_machine):
        if offload and sharding.strategy != "full_shard":
            continue
        *others, most_saving = memory_savings(offload=offload)
        smallest = list(_micro_batches(evaluator, global_batch, limit, sharding, most_saving))
        yield from smallest
        if any(row.fits for row in smallest):
            for saving in others:
                yield from _micro_batches(evaluator, global_batch, limit, sharding, saving)


def _micro_batches(
    evaluator: Evaluator, global_batch: int, limit: int, sharding: Sharding, saving: Mapping[str, Any]
) -> Iterator[AdviceRow]:
    """Yield the rows for growing micro-batches, up to the first that does not fit."""
    # FSDP1 cannot add gradients on the CPU to new ones on the device (``prepare_gradient_for_backward``).
    can_sync = evaluator.subject.version == 2 or not saving["offload_params"]
    for syncs in (False, True) if can_sync else (False,):
        for micro_batch in micro_batches(global_batch, evaluator.subject.world_size):
            accumulation = global_batch // evaluator.subject.world_size // micro_batch
            if syncs and accumulation == 1:
                continue
            choice = Choice(
                sharding=sharding, micro_batch=micro_batch, accumulation=accumulation, sync_each_batch=syncs, **saving
            )
            row = _row(evaluator, choice, limit)
            yield row
            if not row.fits:
                break


def _row(evaluator: Evaluator, choice: Choice, limit: int) -> AdviceRow:
    memory = evaluator.memory(choice)
    fits = memory.peak.bytes <= limit
    return AdviceRow(
        choice=choice,
        settings=choice.settings(evaluator.subject.version),
        fits=fits,
        memory=memory,
        time=evaluator.time(choice) if fits else None,
        communicated=evaluator.communicated(choice) if fits else 0,
        reason="" if fits else rejection(memory, limit),
    )


def rejection(memory: MemoryEstimate, limit: int) -> str:
    """Return why an estimate does not fit, in one line."""
    peak = memory.peak
    kind = max(MEMORY_KINDS, key=lambda kind: peak.bytes_by_kind[kind])
    size = format_bytes(peak.bytes_by_kind[kind], binary=True)
    needed, available = format_bytes(peak.bytes, binary=True), format_bytes(limit, binary=True)
    return f"needs {needed} of {available}, {size} of it {_NAMES[kind]}, in the {peak.where}"


def _cost(row: AdviceRow) -> tuple[float, ...]:
    """Return the order of rows that fit: by predicted speed, else by what is known to cost time."""
    choice = row.choice
    slower = ("none", "selective", "full").index(choice.checkpointing)
    known = (choice.offload_params, choice.offload_activations, slower, row.communicated, choice.accumulation)
    return (-(row.tokens_per_second or 0.0), *known)


def _with_reasons(fitting: list[AdviceRow]) -> Iterator[AdviceRow]:
    for number, row in enumerate(fitting):
        best = fitting[0]
        if number == 0:
            yield row
        elif row.tokens_per_second and best.tokens_per_second:
            slower = 1 - row.tokens_per_second / best.tokens_per_second
            yield replace(row, reason=f"{slower:.0%} slower" if slower >= 0.005 else "as fast")
        else:
            yield replace(row, reason=_difference(row, best))


def _difference(row: AdviceRow, best: AdviceRow) -> str:
    """Return why a row is ranked below the best one without predicted times."""
    if row.choice.offload_params and not best.choice.offload_params:
        return "copies parameters between CPU and device"
    if row.choice.checkpointing != best.choice.checkpointing:
        return "recomputes activations"
    if row.choice.offload_activations and not best.choice.offload_activations:
        return "copies activations between CPU and device"
    more = row.communicated - best.communicated
    if more > 0:
        return f"communicates {format_bytes(more, binary=True)} more per step"
    return f"{row.choice.accumulation} smaller micro-batches per step"


def _indivisible(global_batch: int, world_size: int) -> Problem:
    smaller = global_batch - global_batch % world_size
    near = f"{smaller} or {smaller + world_size}" if smaller > 0 else str(world_size)
    return Problem(
        code="FSDP-E812",
        message=f"a global batch of {global_batch} is not divisible by {world_size} ranks.",
        fix=f"Use a global batch of {near}, or another number of ranks.",
    )
