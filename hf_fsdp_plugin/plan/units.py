"""A unit of a plan: a group of modules whose parameters are gathered and freed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

ParameterRow = tuple[str, int, torch.dtype, bool]
"""Name, number of elements, dtype and ``requires_grad`` of one parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A group of modules whose parameters are gathered and freed together.

    Attributes:
        modules: names of the modules, as in ``named_modules()``, in forward order; ``("",)`` for the root.
        class_names: names of the modules' classes, in the same order.
        parameters: names of the parameters, except those in units inside this unit. A tied parameter occurs once.
        num_params: number of elements in ``parameters``.
        dtypes: dtype -> number of elements, before any cast.
        frozen: names of the parameters that do not require a gradient.
        reshard_after_forward: whether the gathered parameters are freed between forward and backward.
        from_policy: whether the wrap policy selected the modules. False for the units of embedding, norm, head and
            root, and for layers inside other layers. Only units from the policy are checkpointed.
        is_split_off: whether FSDP1 needs a unit for these modules because of their dtype or ``requires_grad``. Code
            around such a module reads the dtype of its shards, and may pass inputs of that dtype.
    """

    modules: tuple[str, ...]
    class_names: tuple[str, ...]
    parameters: tuple[str, ...]
    num_params: int
    dtypes: Mapping[str, int]
    frozen: tuple[str, ...]
    reshard_after_forward: bool
    from_policy: bool
    is_split_off: bool = False

    @property
    def name(self) -> str:
        """Name: ``model.layers.0``, ``model.norm + lm_head``, or the empty string for the root."""
        return " + ".join(self.modules)

    @property
    def class_name(self) -> str:
        return " + ".join(self.class_names)

    @property
    def label(self) -> str:
        """Name and class, for messages."""
        return f"{self.name} ({self.class_name})" if self.name else f"the root unit ({self.class_name})"


def unit_plan(
    modules: Iterable[str],
    class_names: Iterable[str],
    parameters: Iterable[ParameterRow],
    *,
    reshard: bool,
    from_policy: bool,
    is_split_off: bool = False,
) -> UnitPlan:
    """Return the unit with these modules and parameters."""
    rows = list(parameters)
    dtypes: Counter[str] = Counter()
    for _, num_elements, dtype, _ in rows:
        dtypes[str(dtype).removeprefix("torch.")] += num_elements
    return UnitPlan(
        modules=tuple(modules),
        class_names=tuple(class_names),
        parameters=tuple(name for name, *_ in rows),
        num_params=dtypes.total(),
        dtypes=MappingProxyType(dict(dtypes)),
        frozen=tuple(name for name, _, _, requires_grad in rows if not requires_grad),
        reshard_after_forward=reshard,
        from_policy=from_policy,
        is_split_off=is_split_off,
    )
