"""Evaluates the planner's choices, and what would fit if nothing does.

What several choices share is computed once: plans, sizes, activations, times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from torch import nn

from hf_fsdp_plugin.estimate.communication import estimate_communication
from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.memory.estimate import follow_step
from hf_fsdp_plugin.estimate.memory.run import profile_step
from hf_fsdp_plugin.estimate.planner.choices import GIVEN, Choice, Sharding, Units, other_units
from hf_fsdp_plugin.estimate.results import MemoryEstimate, TimeEstimate
from hf_fsdp_plugin.estimate.time import TimeModel, no_time
from hf_fsdp_plugin.estimate.unit_sizes import UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import DtypeName, Version
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.text import format_bytes

Value = TypeVar("Value")
_IGNORED: Final = "wrap.ignored_modules"
"""The setting of the wrap policy that all units have in common."""
_MAX_FACTOR: Final = 64
"""Largest factor by which the number of machines is multiplied."""
_MIN_LENGTH: Final = 256


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


@dataclass(slots=True)
class Evaluator:
    """Computes memory and time of choices for one subject.

    Attributes:
        machine: predicts times; ``None`` for none, and after operations could not be counted.
        problems: warnings about times.
    """

    subject: Subject
    machine: Machine | None = None
    problems: list[Problem] = field(default_factory=list)
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def _once(self, key: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
        """Return what was computed for a key before, or compute it."""
        if key not in self._known:
            self._known[key] = compute()
        found: Value = self._known[key]
        return found

    @property
    def units(self) -> tuple[Units, ...]:
        """Other units than the given ones, with which the model can be sharded."""
        return self._once(("units",), lambda: tuple(self._other_units()))

    def _other_units(self) -> Iterator[Units]:
        sharding = Sharding(strategy="full_shard", shard=self.subject.world_size, replicate=1)
        given = self._resolved(sharding, GIVEN)
        for units in dict.fromkeys(other_units(given, self.subject.model)):
            with suppress(SpecError):  # such as units with parameters of several dtypes
                plan = self._resolved(sharding, units)
                if [unit.modules for unit in plan.units] != [unit.modules for unit in given.units]:
                    yield units

    def plan(self, choice: Choice) -> FsdpPlan:
        """Return the plan of a choice. Its units do not depend on checkpointing and offload."""
        sharded = (choice.sharding, choice.units)
        plan = self._once(("plan", *sharded), lambda: self._resolved(*sharded))
        activation = replace(
            plan.activation, checkpointing=choice.checkpointing, offload=choice.offload_activations, native=False
        )
        return replace(plan, activation=activation, offload_params=choice.offload_params)

    def _resolved(self, sharding: Sharding, units: Units) -> FsdpPlan:
        subject = self.subject
        given = {name: value for name, value in subject.wrap.items() if units == GIVEN or name == _IGNORED}
        settings = {
            "launch.distributed_type": "FSDP",
            "launch.num_processes": subject.world_size,
            "launch.num_machines": subject.num_machines,
            "precision.param": subject.precision,
            "wrap.policy": "transformer",
            **given,
            **Choice(sharding=sharding, units=units).settings(subject.version),
        }
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        spec, ranks = load_spec(overrides=written, environ={}), subject.gpus_per_machine
        return resolve(
            spec, subject.model, world_size=subject.world_size, device_type="cuda", local_world_size=ranks
        )  # fmt: skip

    def sizes(self, choice: Choice) -> Sequence[UnitSizes]:
        """Return the sizes of a choice's units."""
        key = ("sizes", choice.sharding, choice.units)
        return self._once(key, lambda: unit_sizes(self.plan(choice), self.subject.model))

    def memory(self, choice: Choice) -> MemoryEstimate:
        """Return the memory of a choice. Activations are counted once for each micro-batch and checkpointing."""
        model, plan, workload = self.subject.model, self.plan(choice), self.subject.workload(choice)
        ignored = self._once(("ignored",), lambda: ignored_bytes(plan, model))
        key = ("profile", choice.units, choice.micro_batch, choice.checkpointing, choice.offload_activations)
        profile = self._once(key, lambda: profile_step(plan, model, workload))
        return follow_step(plan, self.sizes(choice), ignored, workload, profile)

    def time(self, choice: Choice) -> TimeEstimate | None:
        """Return the time of a step; ``None`` without a machine, or if operations cannot be counted (a warning)."""
        if self.machine is None:
            return None
        plan, workload = self.plan(choice), self.subject.workload(choice)
        try:
            key = ("time", workload, choice.units)
            return self._once(key, lambda: TimeModel(plan, self.subject.model, workload)).estimate(self.machine, plan)
        except SpecError as error:
            self.problems.append(no_time(error))
            self.machine = None
            return None

    def communicated(self, choice: Choice) -> int:
        """Return the bytes of all collectives of a rank per optimizer step."""
        plan, workload = self.plan(choice), self.subject.workload(choice)
        key = ("bytes", choice.sharding, choice.units, choice.checkpointing, workload)
        found = self._once(key, lambda: estimate_communication(plan, self.subject.model, workload))
        return sum(each.bytes * each.calls for each in found.collectives)


def remedies(subject: Subject, global_batch: int, limit: int) -> Iterator[str]:
    """Yield the smallest changes of one thing after which the settings with the least memory fit, one sentence each.

    The settings are full_shard, full checkpointing with offloaded activations and micro-batches of one sample; with and
    without offload of parameters.
    """
    factors = [1 << power for power in range(1, _MAX_FACTOR.bit_length())]
    lengths = [subject.step.seq_len >> power for power in range(1, subject.step.seq_len.bit_length())]
    for offload in (False, True):
        with_offload = " and offload of parameters" if offload else ""
        more = [replace(subject, num_machines=subject.num_machines * factor) for factor in factors]
        if (found := _first_fitting(more, limit, offload=offload)) is not None:
            larger, peak = found
            ranks, machines = larger.world_size, larger.num_machines
            batch = f", with a global batch of at least {ranks}" if global_batch < ranks else ""
            yield (
                f"{ranks} GPUs on {machines} machines{with_offload} would fit with {peak} per GPU{batch}: "
                "full_shard, full activation checkpointing with offload."
            )
        shorter = [_with_step(subject, seq_len=length) for length in lengths if length >= _MIN_LENGTH]
        if (found := _first_fitting(shorter, limit, offload=offload)) is not None:
            yield f"Sequences of {found[0].step.seq_len:,} tokens{with_offload} would fit with {found[1]} per GPU."
    if subject.step.optimizer == "adamw":
        packed = [_with_step(subject, optimizer="adamw_8bit")]
        if (found := _first_fitting(packed, limit, offload=False)) is not None:
            yield f"AdamW with 8-bit state (adamw_8bit) would fit with {found[1]} per GPU."


def _with_step(subject: Subject, **changed: Any) -> Subject:
    return replace(subject, step=replace(subject.step, **changed))


def _first_fitting(subjects: Sequence[Subject], limit: int, *, offload: bool) -> tuple[Subject, str] | None:
    """Return the first subject for which the settings with the least memory fit, and what they need."""
    for subject in subjects:
        choice = Choice(
            sharding=Sharding(strategy="full_shard", shard=subject.world_size, replicate=1), checkpointing="full",
            offload_activations=True, offload_params=offload,
        )  # fmt: skip
        needed = Evaluator(subject).memory(choice).needed_bytes
        if needed <= limit:
            return subject, format_bytes(needed, binary=True)
    return None
