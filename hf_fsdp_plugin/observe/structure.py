"""Compares the units of the live model and their parameters with those of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hf_fsdp_plugin.observe.memory import unmanaged_parameters
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.text import format_names, plural


@dataclass(frozen=True, kw_only=True)
class StructureComparison:
    """What differs between the planned units and the live ones. Names are canonical.

    Attributes:
        missing: planned units that the live model does not have.
        extra: units of the live model that are not planned.
        unsharded: parameters of the live model that the plan shards and that no unit has.
        moved: parameters that are in another unit than planned.
        sharded: parameters that the plan does not shard and that a unit has.
        frozen: parameters of units that the plan trains and that no longer require a gradient. The units are equal.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.extra or self.unsharded or self.moved or self.sharded)

    @property
    def reason(self) -> str:
        """Describe the differences in one line; empty if there are none."""
        kinds = (
            (self.missing, "planned unit", "not a unit of the live model"),
            (self.extra, "unit", "not planned"),
            (self.unsharded, "parameter", "not sharded"),
            (self.moved, "parameter", "not in the planned unit"),
            (self.sharded, "ignored parameter", "sharded"),
        )
        return "; ".join(
            f"{plural(len(names), noun)} {'is' if len(names) == 1 else 'are'} {what}: "
            f"{format_names([name or '(root)' for name in names], 2)}"
            for names, noun, what in kinds
            if names
        )


def compare_structure(model: nn.Module, units: Sequence[UnitObservation], plan: FsdpPlan) -> StructureComparison:
    """Compare units and parameters, in both directions. Without collectives."""
    first_name = {name: _canonical(names)[0] for names in plan.ties for name in _canonical(names)}
    planned = {
        first_name.get(name, name): frozenset(_canonical(unit.modules))
        for unit in plan.units
        for name in _canonical(unit.parameters)
    }
    live: dict[str, frozenset[str]] = {}
    frozen = set()
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    for unit in units:
        for module, attribute, requires_grad in unit.live.places:
            if id(module) in names:  # otherwise the module has been replaced
                name = f"{names[id(module)]}.{attribute}".lstrip(".")
                name = first_name.get(name, name)
                live[name] = frozenset(unit.module_names)
                if not requires_grad:
                    frozen.add(name)
    frozen_before = {first_name.get(name, name) for unit in plan.units for name in _canonical(unit.frozen)}
    # The root is a unit even if all parameters belong to others.
    planned_units = {frozenset(_canonical(unit.modules)) for unit in plan.units} - {frozenset([""])}
    live_units = {frozenset(unit.module_names) for unit in units} - {frozenset([""])}
    unmanaged = {id(parameter) for parameter in unmanaged_parameters(model, units)}
    ignored = set(_canonical(plan.ignored_parameters))
    unsharded = {
        first_name.get(canonical_name(name), canonical_name(name))
        for name, parameter in model.named_parameters()
        if id(parameter) in unmanaged
    }
    return StructureComparison(
        missing=_unit_names(planned_units - live_units),
        extra=_unit_names(live_units - planned_units),
        unsharded=tuple(sorted(unsharded & planned.keys() - ignored)),
        moved=tuple(sorted(name for name in live.keys() & planned.keys() if live[name] != planned[name])),
        sharded=tuple(sorted(live.keys() & ignored)),
        frozen=tuple(sorted(frozen & planned.keys() - frozen_before)),
    )


def _canonical(names: Sequence[str]) -> list[str]:
    return [canonical_name(name) for name in names]


def _unit_names(units: set[frozenset[str]]) -> tuple[str, ...]:
    return tuple(sorted(" + ".join(sorted(names)) for names in units))
