"""The planner: compares strategies, meshes, units, checkpointing, offload and micro-batches, and ranks what fits.

Other units than the layers are tried where they can be better. Smaller units need less memory for gathered parameters,
so they are tried for strategies that free units after forward, if a row does not fit but would without any gathered
unit. They, and larger units, also change the communication that is not overlapped, so both are tried for the fastest
rows, if such communication is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.memory.device import NEEDED_RATIO
from hf_fsdp_plugin.estimate.planner.advice import Advice, AdviceRow, in_order, rejection, row_cost, with_reasons
from hf_fsdp_plugin.estimate.planner.choices import GIVEN, Choice, Sharding, memory_savings, micro_batches, shardings
from hf_fsdp_plugin.estimate.planner.evaluator import Evaluator, Subject, remedies
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import DtypeName, Version
from hf_fsdp_plugin.strategies import STRATEGIES

HEADROOM: Final = 0.95
"""Part of a device's memory that a row may need. The rest is for the error of the prediction."""
_FASTEST: Final = 3
"""Number of rows that are compared with the same settings and other units."""
_MIN_EXPOSED: Final = 0.01
"""Smallest part of a step in which nothing is computed during communication, for which other units are tried."""


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
    with less. Other units than the layers are tried where they can be better: see the module.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        global_batch: samples of all ranks per optimizer step.
        gpu_memory: bytes of a device.
        machine: figures of devices and links, which predict tokens/s. Without them, rows that fit are ranked by
            recomputation and communication.
        precision: ``bf16`` or ``fp16`` with fp32 master weights, or ``auto`` for the model's dtype.
        wrap: settings of the wrap policy, such as ``{"wrap.policy": "size", "wrap.min_num_params": 10**8}``. Default:
            the layer classes that the model declares. Other units are compared with these.
        headroom: part of the device's memory that may be used, above 0 and at most 1.

    Raises:
        SpecError: the global batch is not divisible by the number of ranks (FSDP-E812), the model cannot be planned, or
            it has other inputs than a batch of text or images (FSDP-E811).
    """
    world_size = num_machines * gpus_per_machine
    if global_batch < 1 or global_batch % world_size:
        raise SpecError([_indivisible(global_batch, world_size)])
    step = Workload(
        micro_batch=1, seq_len=seq_len, optimizer=optimizer, update_loop=update_loop, clip_norm=clip_norm,
        attention=attention,
    )  # fmt: skip
    subject = Subject(
        model=model, step=step, version=version, precision=precision, wrap=wrap or {}, num_machines=num_machines,
        gpus_per_machine=gpus_per_machine,
    )  # fmt: skip
    evaluator = Evaluator(subject, machine)
    limit = int(gpu_memory * headroom)
    search = Search(evaluator, global_batch, limit)
    rows = list(search.rows(offload=False))
    if not any(row.fits for row in rows):
        rows += search.rows(offload=True)
    rows += search.with_other_units(sorted((row for row in rows if row.fits), key=row_cost))
    fitting = in_order([row for row in rows if row.fits], limit)
    rejected = sorted((row for row in rows if not row.fits), key=lambda row: row.needed_bytes)
    return Advice(
        rows=(*with_reasons(fitting), *rejected),
        gpu_memory=gpu_memory,
        limit=limit,
        remedies=() if fitting else tuple(remedies(subject, global_batch, limit)),
        problems=tuple(evaluator.problems),
    )


def _indivisible(global_batch: int, world_size: int) -> Problem:
    smaller = global_batch - global_batch % world_size
    near = f"{smaller} or {smaller + world_size}" if smaller > 0 else str(world_size)
    return Problem(
        code="FSDP-E812",
        message=f"a global batch of {global_batch} is not divisible by {world_size} ranks.",
        fix=f"Use a global batch of {near}, or another number of ranks.",
    )


@dataclass(frozen=True, slots=True)
class Search:
    """The rows of one subject.

    Attributes:
        limit: bytes that a rank may need.
    """

    evaluator: Evaluator
    global_batch: int
    limit: int

    def rows(self, *, offload: bool) -> Iterator[AdviceRow]:
        """Yield the rows with or without offload of parameters."""
        subject = self.evaluator.subject
        for sharding in shardings(subject.num_machines, subject.gpus_per_machine):
            if offload and sharding.strategy != "full_shard":
                continue
            *others, most_saving = memory_savings(offload=offload)
            smallest = list(self._micro_batches(sharding, most_saving))
            yield from smallest
            if any(row.fits for row in smallest):
                for saving in others:
                    yield from self._micro_batches(sharding, saving)

    def _micro_batches(self, sharding: Sharding, saving: Mapping[str, Any]) -> Iterator[AdviceRow]:
        """Yield the rows for growing micro-batches, up to the first that does not fit, also with smaller units."""
        # FSDP1 cannot add gradients on the CPU to new ones on the device (``prepare_gradient_for_backward``).
        can_sync = self.evaluator.subject.version == 2 or not saving["offload_params"]
        per_rank = self.global_batch // self.evaluator.subject.world_size
        for syncs in (False, True) if can_sync else (False,):
            units = GIVEN
            for micro_batch in micro_batches(self.global_batch, self.evaluator.subject.world_size):
                accumulation = per_rank // micro_batch
                if syncs and accumulation == 1:
                    continue
                choice = Choice(
                    sharding=sharding, micro_batch=micro_batch, accumulation=accumulation, sync_each_batch=syncs,
                    units=units, **saving,
                )  # fmt: skip
                row = self._row(choice)
                yield row
                if row.fits:
                    continue
                smaller = list(self._with_smaller_units(row))
                yield from smaller
                fitting = [each for each in smaller if each.fits]
                if not fitting:
                    break
                units = min(fitting, key=lambda each: each.needed_bytes).choice.units

    def _with_smaller_units(self, row: AdviceRow) -> Iterator[AdviceRow]:
        """Yield the same settings with smaller units, if they can fit."""
        if row.choice.units != GIVEN or not STRATEGIES[row.choice.sharding.strategy].reshards_after_forward:
            return
        if self._without_units(row) > self.limit:
            return
        for units in self.evaluator.units:
            if units.size == "smaller":
                yield self._row(replace(row.choice, units=units))

    def _without_units(self, row: AdviceRow) -> int:
        """Return a lower bound of the memory for any units: without gathered ones, buffers and gradients of a unit."""
        choice, kinds = row.choice, row.memory.peak.bytes_by_kind
        of_unit = kinds["grads"] - sum(unit.grad_shard for unit in self.evaluator.sizes(choice))
        keeps_whole = choice.accumulation > 1 and not choice.sync_each_batch
        without = kinds["gathered"] + (0 if keeps_whole else max(0, of_unit))
        return row.needed_bytes - int(NEEDED_RATIO * without)

    def with_other_units(self, fastest: Sequence[AdviceRow]) -> Iterator[AdviceRow]:
        """Yield the fastest rows with other units, where these can overlap more communication."""
        for row in fastest[:_FASTEST]:
            if row.time is None or row.time.exposed_seconds < _MIN_EXPOSED * row.time.step_seconds:
                continue
            for units in self.evaluator.units:
                # Larger units are no layers, which checkpointing needs.
                loses_checkpoints = units.size == "larger" and row.choice.checkpointing != "none"
                if row.choice.units == GIVEN and not loses_checkpoints:
                    yield self._row(replace(row.choice, units=units))

    def _row(self, choice: Choice) -> AdviceRow:
        memory = self.evaluator.memory(choice)
        fits = memory.needed_bytes <= self.limit
        return AdviceRow(
            choice=choice,
            settings=choice.settings(self.evaluator.subject.version),
            plan=self.evaluator.plan(choice),
            workload=self.evaluator.subject.workload(choice),
            fits=fits,
            memory=memory,
            time=self.evaluator.time(choice) if fits else None,
            communicated=self.evaluator.communicated(choice) if fits else 0,
            reason="" if fits else rejection(memory, self.limit),
        )
