"""What a forward and backward pass of a model allocates between the points at which FSDP acts on a unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from hf_fsdp_plugin.estimate.memory.tracker import Usage

StageKind = Literal[
    "start",
    "pre_forward",
    "post_forward",
    "loss",
    "pre_backward",
    "post_backward",
    "enter",
    "leave",
    "enter_backward",
    "leave_backward",
]
"""What happens at the start of a stage. ``enter`` and ``leave`` are the borders of layers that may not be units."""


_NOTHING: Final = Usage()


@dataclass(frozen=True, slots=True)
class Stage:
    """What is allocated from one event to the next.

    Attributes:
        kind: the event at the start.
        name: the unit, or the layer for ``enter`` and ``leave``.
        peak: the largest usage of the stage, relative to its start.
        end: usage at its end, relative to its start.
        freed_grads: bytes of whole gradients of the unit that are complete at a ``post_backward``.
        host_bytes: what activation offload moves to CPU memory, relative to the start.
        most_activations: the most activations of the stage, relative to the start, with each gradient until it is
            accumulated.
    """

    kind: StageKind
    name: str
    peak: Usage = _NOTHING
    end: Usage = _NOTHING
    freed_grads: int = 0
    host_bytes: int = 0
    most_activations: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One forward and backward pass of one micro-batch, for all layers of the model.

    Attributes:
        stages: in the order of execution.
        input_bytes: the batch.
    """

    stages: tuple[Stage, ...]
    input_bytes: int


def expand(
    stages: Iterable[Stage], representatives: Mapping[str, str], unit_names: Mapping[tuple[str, str], str]
) -> tuple[Stage, ...]:
    """Insert the stages of each layer that did not run, copied from its representative.

    Args:
        representatives: layer that did not run -> layer that ran.
        unit_names: layer that did not run, unit in the representative -> the corresponding unit.
    """
    stages = list(stages)
    spans = {
        (name, enter): _span(stages, name, enter, leave)
        for name in set(representatives.values())
        for enter, leave in (("enter", "leave"), ("enter_backward", "leave_backward"))
    }
    expanded: list[Stage] = []
    for stage in stages:
        expanded.append(stage)
        if stage.name in representatives and stage.kind in ("enter", "enter_backward"):
            layer = stage.name
            for copied in spans[representatives[layer], stage.kind]:
                is_border = copied.name == representatives[layer] and copied.kind not in _UNIT_KINDS
                name = layer if is_border else unit_names.get((layer, copied.name), copied.name)
                expanded.append(replace(copied, name=name))
    return tuple(expanded)


_UNIT_KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


def _span(stages: list[Stage], name: str, enter: str, leave: str) -> list[Stage]:
    """Return the stages of one layer, from its first event to what follows its last."""
    first = next((at for at, stage in enumerate(stages) if stage.kind == enter and stage.name == name), None)
    if first is None:
        return []
    last = next((at for at, stage in enumerate(stages) if stage.kind == leave and stage.name == name), None)
    return stages[first : last + 1] if last is not None else stages[first : first + 1]
