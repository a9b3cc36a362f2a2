"""The planner: compares strategies, meshes, checkpointing, offload and micro-batches, and ranks what fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Literal

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import Checkpointing, DtypeName, Version
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_memory
from hf_fsdp_plugin.tools.common import nearest_multiples
from hf_fsdp_plugin.tools.plan.estimate.divided import as_loaded
from hf_fsdp_plugin.tools.plan.estimate.machines import Machine
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import profile_step
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import follow_step
from hf_fsdp_plugin.tools.plan.estimate.memory.step import StepProfile
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel, UnitCosts, estimate_communication, unit_costs
from hf_fsdp_plugin.tools.plan.estimate.types import KIND_NAMES, MemoryEstimate, TimeEstimate, Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import UnitBytes, ignored_bytes, unit_bytes

HEADROOM: Final = 0.95
"""Part of a device's memory that a row may need. The rest is for the error of the prediction."""
SAME_SPEED: Final = 0.05
"""Difference of predicted times, as a part of the time, that is within the error of the prediction.

It is the median error of the predicted times of steps in docs/results.md.
"""
_SAME_MEMORY: Final = 0.02
"""Difference of peaks, as a part of the memory that a row may need, below which the simpler mesh is preferred."""
_SAVINGS: Final[tuple[tuple[Checkpointing, bool], ...]] = (
    ("full", True), ("full", False), ("selective", False), ("none", False),
)  # fmt: skip
"""Checkpointing, and whether activations are offloaded: from what needs least memory to the fastest."""
_Offload = Literal["", "optimizer", "params"]
_OFFLOADS: Final[Mapping[_Offload, Mapping[str, Any]]] = {
    "": {}, "optimizer": {"offload_optimizer": True}, "params": {"offload_params": True},
}  # fmt: skip
_OFFLOAD_TEXTS: Final[Mapping[_Offload, str]] = {
    "": "", "optimizer": " and offload of the optimizer state", "params": " and offload of parameters",
}  # fmt: skip
_OFFLOADED: Final = ("adamw", "adafactor")
"""Optimizers with state that fsdp_offload_optimizer supports."""
_MAX_DOUBLINGS: Final = 6
"""Maximum number of times that the number of machines is doubled."""
_MIN_LENGTH: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One combination of settings.

    Attributes:
        shard, replicate, context, tensor, expert: the sizes of the mesh.
        offload_activations: whether what is saved for backward is moved to CPU memory.
        offload_optimizer: whether the optimizer's state is kept in CPU memory.
        sync_each_batch: whether gradients are reduced after every micro-batch.
    """

    strategy: str
    shard: int
    replicate: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    checkpointing: Checkpointing = "none"
    offload_activations: bool = False
    offload_optimizer: bool = False
    offload_params: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    sync_each_batch: bool = False

    def settings(self, version: Version) -> dict[str, Any]:
        """Return the FSDP settings by canonical name, as the spec has them."""
        is_hybrid = STRATEGIES[self.strategy].hybrid
        mesh = {"mesh.shard": self.shard, "mesh.replicate": self.replicate} if is_hybrid else {}
        mesh |= {f"mesh.{axis}": size for axis, size in self.axes.items() if size > 1}
        return {
            "fsdp.version": version,
            "sharding.strategy": self.strategy,
            **mesh,
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
            "offload.params": self.offload_params,
            "offload.optimizer": self.offload_optimizer,
        }

    @property
    def axes(self) -> dict[str, Any]:
        """Axes whose ranks train the same samples or share experts, and their sizes."""
        return {"context": self.context, "tensor": self.tensor, "expert": self.expert}

    @property
    def mesh(self) -> Choice:
        """The choice with the sizes of the mesh and the strategy only."""
        return Choice(strategy=self.strategy, shard=self.shard, replicate=self.replicate, **self.axes)

    @property
    def extra_work(self) -> tuple[int, ...]:
        """The order of choices by what they copy and recompute."""
        slower = ("none", "selective", "full").index(self.checkpointing)
        return int(self.offload_params), int(self.offload_optimizer), int(self.offload_activations), slower


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceRow:
    """One combination of settings and what it needs.

    Attributes:
        settings: FSDP settings by canonical name.
        plan: what the figures are for.
        fits: whether the needed memory is within the device's memory without headroom.
        time: ``None`` without a machine, and for rows that do not fit.
        communicated: bytes of all collectives of a rank per optimizer step.
        reason: why the row is not the best one, in one line; empty for the best one.
    """

    choice: Choice
    settings: Mapping[str, Any]
    plan: FsdpPlan
    fits: bool
    memory: MemoryEstimate
    time: TimeEstimate | None
    communicated: int
    reason: str

    @property
    def tokens_per_second(self) -> float | None:
        return self.time.tokens_per_second if self.time is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The planner's answer.

    Attributes:
        fitting: the rows that fit, the best first (see :func:`in_order`).
        rejected: a row for each combination that does not fit.
        limit: bytes of a device without headroom.
        remedies: what would fit, one sentence each, if nothing does.
    """

    fitting: tuple[AdviceRow, ...]
    rejected: tuple[AdviceRow, ...]
    gpu_memory: int
    limit: int
    remedies: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[AdviceRow, ...]:
        return (*self.fitting, *self.rejected)

    @property
    def best(self) -> AdviceRow | None:
        """The first row that fits; ``None`` if nothing fits."""
        return self.fitting[0] if self.fitting else None


def advise(
    model: nn.Module, workload: Workload, *, global_batch: int, gpu_memory: int, headroom: float = HEADROOM, **more: Any
) -> Advice:
    """Return the combinations of settings that fit, the best first, and why the others do not.

    Context and tensor axes, pairs of axes, and offload of parameters are tried only if nothing fits without them, and
    axes up to the first size that fits; a machine's ranks as an expert axis, for each model that has one; and offload
    of the optimizer state with full_shard, for each optimizer that has state and supports it. A combination
    that does not fit is not tried with a larger micro-batch, and a strategy that does not fit with full checkpointing
    and offloaded activations is not tried with less.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        workload: what is trained. Each row has its own micro-batch, accumulation and synchronization.
        global_batch: samples of all ranks per optimizer step.
        gpu_memory: bytes of a device.
        headroom: part of the device's memory that may be used, above 0 and at most 1.
        more: other attributes of :class:`Subject`: ``num_machines``, ``gpus_per_machine``, ``machine``, ``version``,
            ``precision`` and ``wrap``.

    Raises:
        SpecError: the global batch is not divisible by the number of ranks (FSDP-E812), the model cannot be planned, or
            it has other inputs than a batch of text or images (FSDP-E811).
    """
    subject = Subject(model=model, workload=workload, limit=int(gpu_memory * headroom), **more)
    if global_batch < 1 or global_batch % subject.world_size:
        message = f"a global batch of {global_batch} is not divisible by {subject.world_size} ranks."
        near = nearest_multiples(global_batch, subject.world_size)
        fix = f"Use a global batch of {near}, or another number of ranks."
        raise SpecError([Problem(code="FSDP-E812", message=message, fix=fix)])
    plain = list(shardings(subject.num_machines, subject.gpus_per_machine))
    rows = list(_rows(subject, global_batch, [*plain, *_with_axes(subject, _expert_axes(subject))]))
    if workload.optimizer in _OFFLOADED:
        rows += _rows(subject, global_batch, plain, offload="optimizer")
    for alternatives in (_axes_in_machine, _pairs_of_axes):
        if not any(row.fits for row in rows):
            for sizes in alternatives(subject):
                rows += _up_to_first_size(subject, global_batch, sizes)
    if not any(row.fits for row in rows):
        rows += _rows(subject, global_batch, plain, offload="params")
    fitting = in_order([row for row in rows if row.fits], subject.limit)
    return Advice(
        fitting=tuple(replace(row, reason=_reason(row, fitting[0])) for row in fitting),
        rejected=tuple(sorted((row for row in rows if not row.fits), key=lambda row: row.memory.needed_bytes)),
        gpu_memory=gpu_memory,
        limit=subject.limit,
        remedies=() if fitting else tuple(_remedies(subject, global_batch)),
    )


@dataclass(kw_only=True, eq=False)
class Subject:
    """What all choices have in common, and their memory and time. What several choices share is computed once.

    Attributes:
        workload: what is trained, without the sizes that a choice sets.
        precision: ``bf16`` or ``fp16`` with fp32 master weights, or ``auto`` for the model's dtype.
        wrap: settings of the wrap policy, such as ``{"wrap.policy": "size", "wrap.min_num_params": 10**8}``. Default:
            the layer classes that the model declares.
        machine: figures of devices and links, which predict tokens/s. Without them, rows that fit are ranked by
            recomputation and communication.
        limit: bytes that a row may need.
    """

    model: nn.Module
    workload: Workload
    version: Version = 2
    precision: DtypeName = "bf16"
    wrap: Mapping[str, Any] = field(default_factory=dict)
    num_machines: int = 1
    gpus_per_machine: int = 8
    machine: Machine | None = None
    limit: int = 0

    def __post_init__(self) -> None:
        self.world_size = self.num_machines * self.gpus_per_machine
        self._sharded, self._profile, self._costs = cache(self._resolve), cache(self._run), cache(self._count)

    def row(self, choice: Choice) -> AdviceRow:
        """Return the row of a choice: the memory that it needs and, if it fits, its time."""
        plan, memory, workload = self.plan(choice), self.memory(choice), self.workload_of(choice)
        fits, communicated, time = memory.needed_bytes <= self.limit, 0, None
        if fits:
            profile, (_, sizes, _) = self._profile_of(choice), self._sharded(choice.mesh)
            calls = estimate_communication(plan, self.model, workload, profile, sizes)
            communicated = sum(each.bytes * each.calls for each in calls)
        if fits and self.machine is not None:
            costs = self._costs(choice.micro_batch, self._whole_of(choice))
            time = TimeModel(plan, self.model, workload, costs, profile, sizes).estimate(self.machine)
        return AdviceRow(
            choice=choice, settings=choice.settings(self.version), plan=plan, fits=fits, memory=memory, time=time,
            communicated=communicated, reason="" if fits else _rejection_reason(memory, self.limit),
        )  # fmt: skip

    def plan(self, choice: Choice) -> FsdpPlan:
        """Return the plan of a choice. Its units do not depend on checkpointing and offload."""
        plan, *_ = self._sharded(choice.mesh)
        activation = replace(plan.activation, checkpointing=choice.checkpointing, native=False)
        activation = replace(activation, offload=choice.offload_activations)
        return replace(
            plan, activation=activation, offload_params=choice.offload_params,
            offload_optimizer=choice.offload_optimizer,
        )  # fmt: skip

    def workload_of(self, choice: Choice) -> Workload:
        return replace(
            self.workload, micro_batch=choice.micro_batch, accumulation=choice.accumulation,
            sync_each_batch=choice.sync_each_batch,
        )  # fmt: skip

    def memory(self, choice: Choice) -> MemoryEstimate:
        """Return the memory of a choice. The model runs once for each micro-batch and way to save activations."""
        _, sizes, ignored = self._sharded(choice.mesh)
        return follow_step(self.plan(choice), sizes, ignored, self.workload_of(choice), self._profile_of(choice))

    def supports(self, choice: Choice) -> bool:
        """Return whether the model can be divided over the axes of a choice."""
        if self.workload.seq_len % (2 * choice.context if choice.context > 1 else 1):
            return False
        try:
            self._sharded(choice.mesh)
        except SpecError:
            return False
        return True

    def _whole_of(self, choice: Choice) -> Choice:
        """Return the mesh with the same axes, and full_shard."""
        return Choice(strategy="full_shard", shard=choice.shard * choice.replicate, **choice.axes)

    def _profile_of(self, choice: Choice) -> StepProfile:
        saving = choice.checkpointing, choice.offload_activations
        return self._profile(*saving, choice.micro_batch, self._whole_of(choice))

    def _resolve(self, mesh: Choice) -> tuple[FsdpPlan, tuple[UnitBytes, ...], Mapping[str, int]]:
        settings = {
            "launch.distributed_type": "FSDP",
            "launch.num_processes": self.world_size,
            "launch.num_machines": self.num_machines,
            "precision.param": self.precision,
            "wrap.policy": "transformer",
            **self.wrap,
            **mesh.settings(self.version),
        }
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        spec, local = load_spec(overrides=written, environ={}), self.gpus_per_machine
        plan = resolve(spec, self.model, world_size=self.world_size, device_type="cuda", local_world_size=local)
        plan = as_loaded(plan, self.model)
        return plan, unit_bytes(plan, self.model), ignored_bytes(plan, self.model)

    def _run(self, checkpointing: Checkpointing, offload: bool, micro_batch: int, whole: Choice) -> StepProfile:
        choice = replace(whole, checkpointing=checkpointing, offload_activations=offload, micro_batch=micro_batch)
        return profile_step(self.plan(choice), self.model, self.workload_of(choice))

    def _count(self, micro_batch: int, whole: Choice) -> dict[str, UnitCosts]:
        return unit_costs(self.plan(whole), self._profile("none", False, micro_batch, whole))


def shardings(num_machines: int, gpus_per_machine: int) -> Iterator[Choice]:
    """Yield the strategies, hybrid ones for each shard size that divides a machine or is a number of machines."""
    world = num_machines * gpus_per_machine
    inside = set(micro_batches(gpus_per_machine))
    across = {count * gpus_per_machine for count in _powers(num_machines) if num_machines % count == 0}
    for row in STRATEGIES.values():
        sizes = [world if row.is_sharded else 1]
        if row.hybrid:
            sizes = sorted(size for size in inside | across if 1 < size < world)
        for shard in sizes:
            yield Choice(strategy=row.name, shard=shard, replicate=world // shard)


def micro_batches(samples: int) -> tuple[int, ...]:
    """Return the powers of two that divide a rank's samples per step, and all of its samples."""
    return tuple(sorted({size for size in _powers(samples) if samples % size == 0} | {samples}))


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length())]


def _expert_axes(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield the largest expert axis inside a machine: tokens are exchanged in each layer."""
    sizes = [size for size in _powers(subject.gpus_per_machine) if size > 1 and getattr(subject.model, "ep_plan", None)]
    supported = [size for size in sizes if any(_with_axes(subject, [{"expert": size}]))]
    if supported:
        yield {"expert": supported[-1]}


def _axes_in_machine(subject: Subject) -> Iterator[list[dict[str, Any]]]:
    """Yield the sizes of a context and of a tensor axis inside a machine.

    Accelerate divides attention in modules of one name only.
    """
    sizes = _powers(subject.gpus_per_machine)[1:]
    if any(name.endswith("self_attn") for name, _ in subject.model.named_modules()):
        yield [{"context": size} for size in sizes]
    if getattr(subject.model, "tp_plan", None):
        yield [{"tensor": size} for size in sizes]


def _pairs_of_axes(subject: Subject) -> Iterator[list[dict[str, Any]]]:
    """Yield the sizes of a context axis with a tensor axis inside a machine, and with the largest expert axis."""
    axes = [sizes for each in _axes_in_machine(subject) for sizes in each]
    contexts = [sizes for sizes in axes if "context" in sizes]
    pairs = [{**context, **other} for context in contexts for other in axes if "tensor" in other]
    in_machine = [pair for pair in pairs if pair["context"] * pair["tensor"] <= subject.gpus_per_machine]
    yield sorted(in_machine, key=lambda pair: pair["context"] * pair["tensor"])
    yield [{**context, **expert} for expert in _expert_axes(subject) for context in contexts]


def _up_to_first_size(subject: Subject, global_batch: int, sizes: Iterable[dict[str, Any]]) -> Iterator[AdviceRow]:
    """Yield the rows of growing sizes of an axis, up to the first that fits: larger ones communicate more."""
    for choice in _with_axes(subject, sizes):
        rows = list(_rows(subject, global_batch, [choice]))
        yield from rows
        if any(row.fits for row in rows):
            return


def _with_axes(subject: Subject, axes: Iterable[dict[str, Any]]) -> Iterator[Choice]:
    """Yield full_shard with each of the axes over which the model can be divided."""
    for sizes in axes if subject.version == 2 else ():
        per_sample = sizes.get("context", 1) * sizes.get("tensor", 1)
        choice = Choice(strategy="full_shard", shard=subject.world_size // per_sample, **sizes)
        if subject.world_size % per_sample == 0 and subject.supports(choice):
            yield choice


def _rows(
    subject: Subject, global_batch: int, meshes: Iterable[Choice], *, offload: _Offload = ""
) -> Iterator[AdviceRow]:
    """Yield the rows of meshes without offload of parameters or state, or with one of them."""
    for sharding in meshes:
        if offload and sharding.strategy != "full_shard":
            continue
        for saving in _SAVINGS:
            choice = replace(sharding, checkpointing=saving[0], offload_activations=saving[1], **_OFFLOADS[offload])
            rows = list(_growing_batches(subject, choice, global_batch))
            yield from rows
            if saving == _SAVINGS[0] and not any(row.fits for row in rows):
                break


def _growing_batches(subject: Subject, choice: Choice, global_batch: int) -> Iterator[AdviceRow]:
    """Yield a choice with growing micro-batches, up to the first that does not fit."""
    per_rank = global_batch // (choice.shard * choice.replicate)
    # FSDP1 cannot add gradients on the CPU to new ones on the device (``prepare_gradient_for_backward``).
    can_sync = subject.version == 2 or not choice.offload_params
    for syncs in (False, True) if can_sync else (False,):
        for micro_batch in micro_batches(per_rank):
            accumulation = per_rank // micro_batch
            if syncs and accumulation == 1:
                continue
            choice = replace(choice, micro_batch=micro_batch, accumulation=accumulation, sync_each_batch=syncs)
            row = subject.row(choice)
            yield row
            if not row.fits:
                break


def _rejection_reason(memory: MemoryEstimate, limit: int) -> str:
    """Return why an estimate does not fit, in one line."""
    sizes, kind = memory.peak.bytes_by_kind, memory.peak.largest
    name = "other memory" if kind == "other" else KIND_NAMES[kind]
    needed, available = format_memory(memory.needed_bytes), format_memory(limit)
    return f"needs {needed} of {available}, {format_memory(sizes[kind])} of it {name}, in the {memory.peak.where}"


def in_order(fitting: Sequence[AdviceRow], limit: int) -> list[AdviceRow]:
    """Return the rows that fit, the best first.

    The fastest rows whose predicted times are equal within the error of the prediction are ordered by what is known to
    cost time, then by memory, then by the complexity of the mesh. All others are ordered by predicted speed, else by
    the work that is known to cost time.

    Args:
        limit: bytes that a row may need.
    """

    def cost(row: AdviceRow) -> tuple[float, ...]:
        speed = row.tokens_per_second or 0.0
        return -speed, *row.choice.extra_work, row.communicated, row.choice.accumulation

    def cost_of_equals(row: AdviceRow) -> tuple[float, ...]:
        choice = row.choice
        memory = int(row.memory.needed_bytes / (limit * _SAME_MEMORY)) if limit else row.memory.needed_bytes
        is_hybrid = choice.replicate > 1 and choice.shard > 1
        return *choice.extra_work, memory, *choice.axes.values(), is_hybrid, choice.sync_each_batch, *cost(row)

    rows = sorted(fitting, key=cost)
    fastest = rows[0].tokens_per_second if rows else None
    if not fastest:
        return rows
    tied = [row for row in rows if (row.tokens_per_second or 0.0) >= fastest * (1 - SAME_SPEED)]
    return [*sorted(tied, key=cost_of_equals), *rows[len(tied) :]]


def _reason(row: AdviceRow, best: AdviceRow) -> str:
    """Return why a row that fits is ranked below the best one; empty for the best one."""
    if row is best:
        return ""
    if not row.tokens_per_second or not best.tokens_per_second:
        return _difference(row, best)
    slower = 1 - row.tokens_per_second / best.tokens_per_second
    if slower > SAME_SPEED:
        return f"{slower:.0%} slower"
    if row.choice.extra_work > best.choice.extra_work:
        return f"as fast although it {_difference(row, best)}"
    more = row.memory.needed_bytes - best.memory.needed_bytes
    return f"as fast with {format_memory(more)} more memory" if more > 0 else "as fast"


def _difference(row: AdviceRow, best: AdviceRow) -> str:
    """Return what a choice of settings does in a step that the best choice does not."""
    if row.choice.offload_params and not best.choice.offload_params:
        return "copies parameters between CPU and device"
    if row.choice.offload_optimizer and not best.choice.offload_optimizer:
        return "copies the optimizer state between CPU and device"
    if row.choice.checkpointing != best.choice.checkpointing:
        return "recomputes activations"
    if row.choice.offload_activations and not best.choice.offload_activations:
        return "copies activations between CPU and device"
    more = row.communicated - best.communicated
    if more > 0:
        return f"communicates {format_memory(more)} more per step"
    return f"{row.choice.accumulation} smaller micro-batches per step"


def _remedies(subject: Subject, global_batch: int) -> Iterator[str]:
    """Yield the smallest changes of one thing after which the settings with the least memory fit, one sentence each.

    The settings are full_shard, full checkpointing with offloaded activations and micro-batches of one sample; with and
    without offload of the optimizer state or of parameters.
    """
    step = subject.workload
    lengths = [step.seq_len >> power for power in range(1, step.seq_len.bit_length())]
    machines = [replace(subject, num_machines=subject.num_machines << more) for more in range(1, _MAX_DOUBLINGS + 1)]
    shorter = [replace(subject, workload=replace(step, seq_len=size)) for size in lengths if size >= _MIN_LENGTH]
    for offload, with_offload in _OFFLOAD_TEXTS.items():
        if offload == "optimizer" and step.optimizer not in _OFFLOADED:
            continue
        for found, size in _first_fitting(machines, offload=offload):
            ranks = found.world_size
            batch = f", with a global batch of at least {ranks}" if global_batch < ranks else ""
            yield (
                f"{ranks} GPUs on {found.num_machines} machines{with_offload} would fit with {size} per GPU{batch}: "
                "full_shard, full activation checkpointing with offload."
            )
        for found, size in _first_fitting(shorter, offload=offload):
            yield f"Sequences of {found.workload.seq_len:,} tokens{with_offload} would fit with {size} per GPU."
    if step.optimizer == "adamw":
        packed = replace(subject, workload=replace(step, optimizer="adamw_8bit"))
        for _, size in _first_fitting([packed], offload=""):
            yield f"AdamW with 8-bit state (adamw_8bit) would fit with {size} per GPU."


def _first_fitting(subjects: Iterable[Subject], *, offload: _Offload) -> Iterator[tuple[Subject, str]]:
    """Yield the first subject for which the settings with the least memory fit, if any, and this memory as text."""
    for subject in subjects:
        least = Choice(strategy="full_shard", shard=subject.world_size, checkpointing="full", offload_activations=True)
        needed = subject.memory(replace(least, **_OFFLOADS[offload])).needed_bytes
        if needed <= subject.limit:
            yield subject, format_memory(needed)
            return
