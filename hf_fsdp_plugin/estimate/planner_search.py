"""The order in which the planner tries settings, and which it need not try.

Other units than the layers are tried where they can be better. Smaller units need less memory for gathered parameters,
so they are tried for strategies that free units after forward, if a row does not fit but would without any gathered
unit. They, and larger units, also change the communication that is not overlapped, so both are tried for the fastest
rows, if such communication is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_fsdp_plugin.estimate.memory.device import NEEDED_RATIO
from hf_fsdp_plugin.estimate.planner_evaluator import Evaluator
from hf_fsdp_plugin.estimate.planner_rows import AdviceRow, rejection
from hf_fsdp_plugin.estimate.planner_space import Choice, Sharding, memory_savings, micro_batches, shardings
from hf_fsdp_plugin.estimate.planner_units import GIVEN, Units
from hf_fsdp_plugin.strategies import STRATEGIES

_FASTEST: Final = 3
"""Number of rows that are compared with the same settings and other units."""
_MIN_EXPOSED: Final = 0.01
"""Smallest part of a step in which nothing is computed during communication, for which other units are tried."""


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
                if row.choice.units == GIVEN and not _loses_checkpoints(row, units):
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


def _loses_checkpoints(row: AdviceRow, units: Units) -> bool:
    """Whether a row needs checkpointed layers, which larger units are not."""
    return units.size == "larger" and row.choice.checkpointing != "none"
