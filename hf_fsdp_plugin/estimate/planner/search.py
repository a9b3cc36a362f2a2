"""The planner: compares strategies, meshes, checkpointing, offload and micro-batches, and ranks what fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.communication import estimate_communication
from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.memory.peak import follow_step, profile_step
from hf_fsdp_plugin.estimate.memory.step import StepProfile
from hf_fsdp_plugin.estimate.planner.advice import (
    Advice,
    AdviceRow,
    Choice,
    Sharding,
    in_order,
    micro_batches,
    rejection_reason,
    shardings,
    with_reasons,
)
from hf_fsdp_plugin.estimate.results import MemoryEstimate, TimeEstimate
from hf_fsdp_plugin.estimate.time import TimeModel, UnitCosts, unit_costs
from hf_fsdp_plugin.estimate.unit_sizes import UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop, Workload, nearest_multiples
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import Checkpointing, DtypeName, Version
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.text import format_memory

HEADROOM: Final = 0.95
"""Part of a device's memory that a row may need. The rest is for the error of the prediction."""
_SAVINGS: Final[tuple[tuple[Checkpointing, bool], ...]] = (
    ("none", False), ("selective", False), ("full", False), ("full", True),
)  # fmt: skip
"""Checkpointing, and whether activations are offloaded: from the fastest to what needs least memory."""
_MAX_DOUBLINGS: Final = 6
"""Maximum number of times that the number of machines is doubled."""
_MIN_LENGTH: Final = 256


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
    """Return the combinations of settings that fit, the best first, and why the others do not.

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
    step = Workload(
        micro_batch=1, seq_len=seq_len, optimizer=optimizer, update_loop=update_loop, clip_norm=clip_norm,
        attention=attention,
    )  # fmt: skip
    subject = Subject(
        model=model, step=step, version=version, precision=precision, wrap=wrap or {}, num_machines=num_machines,
        gpus_per_machine=gpus_per_machine,
    )  # fmt: skip
    if global_batch < 1 or global_batch % subject.world_size:
        raise SpecError([_indivisible(global_batch, subject.world_size)])
    evaluator = Evaluator(subject, machine)
    limit = int(gpu_memory * headroom)
    rows = list(_rows(evaluator, global_batch, limit, offload=False))
    if not any(row.fits for row in rows):
        rows += _rows(evaluator, global_batch, limit, offload=True)
    fitting = in_order([row for row in rows if row.fits], limit)
    rejected = sorted((row for row in rows if not row.fits), key=lambda row: row.needed_bytes)
    return Advice(
        rows=(*with_reasons(fitting), *rejected),
        gpu_memory=gpu_memory,
        limit=limit,
        remedies=() if fitting else tuple(_remedies(subject, global_batch, limit)),
    )


def _indivisible(global_batch: int, world_size: int) -> Problem:
    return Problem(
        code="FSDP-E812",
        message=f"a global batch of {global_batch} is not divisible by {world_size} ranks.",
        fix=f"Use a global batch of {nearest_multiples(global_batch, world_size)}, or another number of ranks.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What all choices have in common.

    Attributes:
        step: the workload, without the sizes that a choice sets.
    """

    model: nn.Module
    step: Workload
    version: Version
    precision: DtypeName
    wrap: Mapping[str, Any]
    num_machines: int
    gpus_per_machine: int

    @property
    def world_size(self) -> int:
        return self.num_machines * self.gpus_per_machine

    def workload(self, choice: Choice) -> Workload:
        return replace(
            self.step, micro_batch=choice.micro_batch, accumulation=choice.accumulation,
            sync_each_batch=choice.sync_each_batch,
        )  # fmt: skip


class Evaluator:
    """Computes memory and time of choices for one subject. What several choices share is computed once."""

    def __init__(self, subject: Subject, machine: Machine | None = None) -> None:
        """Compute no times without a machine."""
        self.subject, self._machine = subject, machine
        self._any_sharding = Sharding(strategy="full_shard", shard=subject.world_size, replicate=1)
        self._resolved, self._sizes = cache(self._resolve), cache(self._find_sizes)
        self._profile, self._costs = cache(self._run), cache(self._count)

    def row(self, choice: Choice, limit: int) -> AdviceRow:
        """Return the row of a choice: the memory that it needs and, if that is at most `limit` bytes, its time."""
        model, plan, memory = self.subject.model, self.plan(choice), self.memory(choice)
        workload = self.subject.workload(choice)
        fits, communicated = memory.needed_bytes <= limit, 0
        time: TimeEstimate | None = None
        if fits:
            calls = estimate_communication(plan, model, workload).collectives
            communicated = sum(each.bytes * each.calls for each in calls)
        if fits and self._machine is not None:
            time = TimeModel(plan, model, workload, self._costs(choice.micro_batch)).estimate(self._machine)
        return AdviceRow(
            choice=choice, settings=choice.settings(self.subject.version), plan=plan, workload=workload, fits=fits,
            memory=memory, time=time, communicated=communicated, reason="" if fits else rejection_reason(memory, limit),
        )  # fmt: skip

    def plan(self, choice: Choice) -> FsdpPlan:
        """Return the plan of a choice. Its units do not depend on checkpointing and offload."""
        plan = self._resolved(choice.sharding)
        activation = replace(
            plan.activation, checkpointing=choice.checkpointing, offload=choice.offload_activations, native=False
        )
        return replace(plan, activation=activation, offload_params=choice.offload_params)

    def memory(self, choice: Choice) -> MemoryEstimate:
        """Return the memory of a choice. The model runs once for each micro-batch and way to save activations."""
        sizes, ignored = self._sizes(choice.sharding)
        profile = self._profile(
            replace(choice, sharding=self._any_sharding, accumulation=1, sync_each_batch=False, offload_params=False)
        )
        return follow_step(self.plan(choice), sizes, ignored, self.subject.workload(choice), profile)

    def _resolve(self, sharding: Sharding) -> FsdpPlan:
        subject = self.subject
        settings = {
            "launch.distributed_type": "FSDP",
            "launch.num_processes": subject.world_size,
            "launch.num_machines": subject.num_machines,
            "precision.param": subject.precision,
            "wrap.policy": "transformer",
            **subject.wrap,
            **Choice(sharding=sharding).settings(subject.version),
        }
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        spec, ranks = load_spec(overrides=written, environ={}), subject.gpus_per_machine
        return resolve(
            spec, subject.model, world_size=subject.world_size, device_type="cuda", local_world_size=ranks
        )  # fmt: skip

    def _find_sizes(self, sharding: Sharding) -> tuple[tuple[UnitSizes, ...], Mapping[str, int]]:
        plan = self._resolved(sharding)
        return unit_sizes(plan, self.subject.model), ignored_bytes(plan, self.subject.model)

    def _run(self, choice: Choice) -> StepProfile:
        return profile_step(self.plan(choice), self.subject.model, self.subject.workload(choice))

    def _count(self, micro_batch: int) -> dict[str, UnitCosts]:
        choice = Choice(sharding=self._any_sharding, micro_batch=micro_batch)
        return unit_costs(self.plan(choice), self._profile(choice))


def _rows(evaluator: Evaluator, global_batch: int, limit: int, *, offload: bool) -> Iterator[AdviceRow]:
    """Yield the rows with or without offload of parameters."""
    subject = evaluator.subject
    for sharding in shardings(subject.num_machines, subject.gpus_per_machine):
        if offload and sharding.strategy != "full_shard":
            continue
        for saving in reversed(_SAVINGS):
            choice = Choice(
                sharding=sharding, checkpointing=saving[0], offload_activations=saving[1], offload_params=offload
            )
            rows = list(_growing_batches(evaluator, choice, global_batch, limit))
            yield from rows
            if saving == _SAVINGS[-1] and not any(row.fits for row in rows):
                break


def _growing_batches(evaluator: Evaluator, choice: Choice, global_batch: int, limit: int) -> Iterator[AdviceRow]:
    """Yield a choice with growing micro-batches, up to the first that does not fit."""
    per_rank = global_batch // evaluator.subject.world_size
    # FSDP1 cannot add gradients on the CPU to new ones on the device (``prepare_gradient_for_backward``).
    can_sync = evaluator.subject.version == 2 or not choice.offload_params
    for syncs in (False, True) if can_sync else (False,):
        for micro_batch in micro_batches(per_rank):
            accumulation = per_rank // micro_batch
            if syncs and accumulation == 1:
                continue
            tried = replace(choice, micro_batch=micro_batch, accumulation=accumulation, sync_each_batch=syncs)
            row = evaluator.row(tried, limit)
            yield row
            if not row.fits:
                break


def _remedies(subject: Subject, global_batch: int, limit: int) -> Iterator[str]:
    """Yield the smallest changes of one thing after which the settings with the least memory fit, one sentence each.

    The settings are full_shard, full checkpointing with offloaded activations and micro-batches of one sample; with and
    without offload of parameters.
    """
    machines = [subject.num_machines << power for power in range(1, _MAX_DOUBLINGS + 1)]
    lengths = [subject.step.seq_len >> power for power in range(1, subject.step.seq_len.bit_length())]
    for offload in (False, True):
        with_offload = " and offload of parameters" if offload else ""
        more = (replace(subject, num_machines=number) for number in machines)
        if (found := _first_fitting(more, limit, offload=offload)) is not None:
            ranks, number = found[0].world_size, found[0].num_machines
            batch = f", with a global batch of at least {ranks}" if global_batch < ranks else ""
            yield (
                f"{ranks} GPUs on {number} machines{with_offload} would fit with {found[1]} per GPU{batch}: "
                "full_shard, full activation checkpointing with offload."
            )
        shorter = (_with_step(subject, seq_len=length) for length in lengths if length >= _MIN_LENGTH)
        if (found := _first_fitting(shorter, limit, offload=offload)) is not None:
            yield f"Sequences of {found[0].step.seq_len:,} tokens{with_offload} would fit with {found[1]} per GPU."
    if subject.step.optimizer == "adamw":
        packed = [_with_step(subject, optimizer="adamw_8bit")]
        if (found := _first_fitting(packed, limit, offload=False)) is not None:
            yield f"AdamW with 8-bit state (adamw_8bit) would fit with {found[1]} per GPU."


def _with_step(subject: Subject, **changed: Any) -> Subject:
    return replace(subject, step=replace(subject.step, **changed))


def _first_fitting(subjects: Iterable[Subject], limit: int, *, offload: bool) -> tuple[Subject, str] | None:
    """Return the first subject for which the settings with the least memory fit, and this memory as text."""
    for subject in subjects:
        sharding = Sharding(strategy="full_shard", shard=subject.world_size, replicate=1)
        choice = Choice(
            sharding=sharding, checkpointing="full", offload_activations=True, offload_params=offload
        )  # fmt: skip
        needed = Evaluator(subject).memory(choice).needed_bytes
        if needed <= limit:
            return subject, format_memory(needed)
    return None
