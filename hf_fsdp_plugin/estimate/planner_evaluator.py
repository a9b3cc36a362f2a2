"""Evaluates the planner's choices. What several choices share is computed once: plans, sizes, activations, times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.communication import estimate_communication
from hf_fsdp_plugin.estimate.memory.estimate import follow_step
from hf_fsdp_plugin.estimate.memory.profile import StepProfile
from hf_fsdp_plugin.estimate.memory.run import profile_step
from hf_fsdp_plugin.estimate.memory.shards import UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.planner_space import Choice, Sharding
from hf_fsdp_plugin.estimate.planner_time import Times
from hf_fsdp_plugin.estimate.planner_units import GIVEN, Units, other_units
from hf_fsdp_plugin.estimate.results import CommunicationEstimate, MemoryEstimate, TimeEstimate
from hf_fsdp_plugin.estimate.time import no_time
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.spec.model import DtypeName, Version

_Key = tuple[Sharding, Units]
_IGNORED: Final = "wrap.ignored_modules"
"""The setting of the wrap policy that all units have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What all choices have in common."""

    model: nn.Module
    seq_len: int
    version: Version
    precision: DtypeName
    wrap: Mapping[str, Any]
    optimizer: Optimizer
    update_loop: UpdateLoop | None
    clip_norm: bool
    attention: Attention
    num_machines: int
    gpus_per_machine: int

    @property
    def world_size(self) -> int:
        return self.num_machines * self.gpus_per_machine

    def workload(self, choice: Choice) -> Workload:
        return Workload(
            micro_batch=choice.micro_batch,
            seq_len=self.seq_len,
            accumulation=choice.accumulation,
            sync_each_batch=choice.sync_each_batch,
            optimizer=self.optimizer,
            update_loop=self.update_loop,
            clip_norm=self.clip_norm,
            attention=self.attention,
        )


@dataclass(slots=True)
class Evaluator:
    """Computes memory and time of choices for one subject.

    Attributes:
        times: ``None`` without a machine, and after operations could not be counted.
        problems: warnings about times.
    """

    subject: Subject
    times: Times | None
    problems: list[Problem] = field(default_factory=list)
    _plans: dict[_Key, FsdpPlan] = field(default_factory=dict)
    _sizes: dict[_Key, Sequence[UnitSizes]] = field(default_factory=dict)
    _units: tuple[Units, ...] | None = None
    _ignored: Mapping[str, int] | None = None
    _profiles: dict[tuple[Any, ...], StepProfile] = field(default_factory=dict)
    _communication: dict[tuple[Any, ...], CommunicationEstimate] = field(default_factory=dict)

    @property
    def units(self) -> tuple[Units, ...]:
        """Other units than the given ones, with which the model can be sharded."""
        if self._units is None:
            sharding = Sharding(strategy="full_shard", shard=self.subject.world_size, replicate=1)
            plans = {GIVEN: self._resolved(sharding, GIVEN)}
            for units in other_units(plans[GIVEN], self.subject.model):
                with suppress(SpecError):  # such as units with parameters of several dtypes
                    plans[units] = self._resolved(sharding, units)
            modules = {units: [unit.modules for unit in plan.units] for units, plan in plans.items()}
            found = [units for units in plans if units != GIVEN and modules[units] != modules[GIVEN]]
            self._units = tuple(found)
        return self._units

    def plan(self, choice: Choice) -> FsdpPlan:
        """Return the plan of a choice. Its units do not depend on checkpointing and offload."""
        key = (choice.sharding, choice.units)
        if key not in self._plans:
            self._plans[key] = self._resolved(*key)
        plan = self._plans[key]
        activation = replace(
            plan.activation, checkpointing=choice.checkpointing, offload=choice.offload_activations, native=False
        )
        return replace(plan, activation=activation, offload_params=choice.offload_params)

    def _resolved(self, sharding: Sharding, units: Units) -> FsdpPlan:
        subject = self.subject
        base = Choice(
            sharding=sharding, checkpointing="none", offload_activations=False, offload_params=False, micro_batch=1,
            accumulation=1, sync_each_batch=False, units=units,
        )  # fmt: skip
        given = {name: value for name, value in subject.wrap.items() if units == GIVEN or name == _IGNORED}
        settings = {
            "launch.distributed_type": "FSDP",
            "launch.num_processes": subject.world_size,
            "launch.num_machines": subject.num_machines,
            "precision.param": subject.precision,
            "wrap.policy": "transformer",
            **given,
            **base.settings(subject.version),
        }
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        spec = load_spec(overrides=written, environ={})
        return resolve(
            spec,
            subject.model,
            world_size=subject.world_size,
            device_type="cuda",
            local_world_size=subject.gpus_per_machine,
        )

    def sizes(self, choice: Choice) -> Sequence[UnitSizes]:
        """Return the sizes of a choice's units."""
        key = (choice.sharding, choice.units)
        if key not in self._sizes:
            self._sizes[key] = unit_sizes(self.plan(choice), self.subject.model)
        return self._sizes[key]

    def memory(self, choice: Choice) -> MemoryEstimate:
        """Return the memory of a choice. Activations are counted once for each micro-batch and checkpointing."""
        plan, workload = self.plan(choice), self.subject.workload(choice)
        if self._ignored is None:
            self._ignored = ignored_bytes(plan, self.subject.model)
        key = (choice.units, choice.micro_batch, choice.checkpointing, choice.offload_activations)
        if key not in self._profiles:
            self._profiles[key] = profile_step(plan, self.subject.model, workload)
        return follow_step(plan, self.sizes(choice), self._ignored, workload, self._profiles[key])

    def time(self, choice: Choice) -> TimeEstimate | None:
        """Return the time of a step; ``None`` without a machine, or if operations cannot be counted (a warning)."""
        if self.times is None:
            return None
        try:
            return self.times.estimate(self.plan(choice), self.subject.workload(choice), choice.units)
        except SpecError as error:
            self.problems.append(no_time(error))
            self.times = None
            return None

    def communicated(self, choice: Choice) -> int:
        """Return the bytes of all collectives of a rank per optimizer step."""
        key = (choice.sharding, choice.units, choice.checkpointing, choice.accumulation, choice.sync_each_batch)
        if key not in self._communication:
            plan, workload = self.plan(choice), self.subject.workload(choice)
            self._communication[key] = estimate_communication(plan, self.subject.model, workload)
        return sum(each.bytes * each.calls for each in self._communication[key].collectives)
