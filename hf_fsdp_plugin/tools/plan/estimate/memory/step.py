"""The model of a step that the engines of both FSDP versions follow: stages, memory in use, and events of units.

``estimate.memory.peak.follow_step`` runs an engine through the stages, and reads the peak.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.plan.estimate.machines import OpKind
from hf_fsdp_plugin.tools.plan.estimate.types import MEMORY_KINDS, Axis, CollectiveKind, MemoryKind, Moment
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import UnitBytes

StageKind = Literal[
    "start", "pre_forward", "post_forward", "loss", "pre_backward", "post_backward", "last_post_backward", "enter",
    "leave", "enter_backward", "leave_backward",
]  # fmt: skip
"""What happens at the start of a stage. ``enter`` and ``leave`` are the borders of layers that may not be units.

``last_post_backward`` is the ``post_backward`` of a unit whose inputs need no gradient: at the end of the backward.
"""


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch's pool of pinned memory allocates for a tensor: the next power of two.

    See ``allocate`` in ATen/core/CachingHostAllocator.h. ``pinned_max_round_threshold_mb`` of ``PYTORCH_ALLOC_CONF``
    is the size from which it does not round.
    """
    return 1 << (size - 1).bit_length() if size else 0


class Usage(NamedTuple):
    """Bytes of activations and temporary tensors, and bytes of whole gradients of parameters."""

    activations: int = 0
    grads: int = 0

    def minus(self, other: Usage) -> Usage:
        return Usage(self.activations - other.activations, self.grads - other.grads)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """One operation: FLOPs, bytes read and written, dtype of the computation, and tokens per sample of attention."""

    kind: OpKind
    flops: int
    bytes: int
    dtype: str
    length: int = 0


class AxisCall(NamedTuple):
    """A collective that the forward or backward of a layer runs over an axis; see ``Collective``."""

    kind: CollectiveKind
    axis: Axis
    bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What a forward and backward pass allocates from one event to the next.

    Attributes:
        kind: the event at the start.
        name: the unit, or the layer for ``enter`` and ``leave``.
        freed_grads: bytes of whole gradients of the unit that are complete at a ``post_backward``.
        peak: the largest usage of the stage, relative to its start.
        end: usage at its end, relative to its start.
        host_bytes: what activation offload moves to CPU memory, relative to the start.
        most_activations: the most activations of the stage, relative to the start, with each gradient until it is
            accumulated.
        ops: operations and how often each runs, without those that checkpointing repeats.
        calls: collectives over context, tensor and expert axes, with those that checkpointing repeats.
    """

    kind: StageKind
    name: str
    freed_grads: int
    peak: Usage
    end: Usage
    host_bytes: int
    most_activations: int
    ops: Mapping[OpCost, int]
    calls: Mapping[AxisCall, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One forward and backward pass of one micro-batch, for all layers of the model.

    Attributes:
        stages: the stages, in the order of execution.
        input_bytes: bytes of the batch.
    """

    stages: tuple[Stage, ...]
    input_bytes: int

    def walk(self) -> Iterator[tuple[Stage, Literal["forward", "backward"], tuple[str, ...]]]:
        """Yield each stage, the pass in which it runs, and the units and layers around it: the root (empty) first."""
        phase: Literal["forward", "backward"] = "forward"
        inside: tuple[str, ...] = ("",)
        for stage in self.stages:
            if stage.kind == "loss":
                phase, inside = "backward", ("",)
            elif stage.kind in ("pre_forward", "enter", "pre_backward", "enter_backward"):
                inside = (*inside, stage.name)
            elif stage.kind != "start":
                inside = ("", *(name for name in inside[1:] if name != stage.name))
            yield stage, phase, inside


def expand_layers(stages: Sequence[Stage], representatives: Mapping[str, str]) -> Iterator[Stage]:
    """Yield the stages. The stages of each layer that did not run are copied from its representative.

    Args:
        representatives: layer that did not run -> layer that ran.
    """
    events: list[tuple[str, str]] = [(stage.kind, stage.name) for stage in stages]
    for stage in stages:
        yield stage
        original = representatives.get(stage.name)
        if original is None or stage.kind not in ("enter", "enter_backward") or (stage.kind, original) not in events:
            continue
        first = last = events.index((stage.kind, original))
        leave = (stage.kind.replace("enter", "leave"), original)
        if leave in events:
            last = events.index(leave)
        for copied in stages[first : last + 1]:
            is_of_layer = is_inside(copied.name, original)
            yield replace(copied, name=stage.name + copied.name.removeprefix(original)) if is_of_layer else copied


class Ledger:
    """Bytes in use now by kind. Keeps the moment of the largest usage in each part of the step.

    Attributes:
        moments: the moment of the largest usage in each part, such as ``forward of model.layers.3``, in order.
    """

    def __init__(self) -> None:
        self._live: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.moments: list[Moment] = []

    def at(self, where: str) -> None:
        """Begin another place."""
        if not self.moments or where != self.moments[-1].where:
            self.moments.append(Moment(where=where, bytes_by_kind=self._live.copy()))

    def add(self, kind: MemoryKind, size: int) -> None:
        """Allocate memory."""
        self.free(kind, -size)
        self._record()

    def free(self, kind: MemoryKind, size: int) -> None:
        self._live[kind] -= size

    def use(self, kind: MemoryKind, size: int) -> None:
        """Allocate memory and free it at once."""
        self.add(kind, size)
        self.free(kind, size)

    def run(self, peak: Usage, end: Usage) -> None:
        """Run operators that allocate and free activations and whole gradients."""
        self._apply(peak)
        self._record()
        self._apply(end.minus(peak))

    def _apply(self, usage: Usage) -> None:
        self._live["activations"] += usage.activations
        self._live["grads"] += usage.grads

    def _record(self) -> None:
        if sum(self._live.values()) > self.moments[-1].bytes:
            self.moments[-1] = replace(self.moments[-1], bytes_by_kind=self._live.copy())


class Engine(ABC):
    """What an FSDP version allocates and frees at the events of units during a step. Subclasses follow torch's sources.

    Attributes:
        ledger: memory in use.
        syncs: whether gradients are reduced in the current backward.
        all_reduces: whether they are reduced over the replicas, too.
        is_sharded: whether there are all-gathers.
        order: units in the order in which their forwards ended.
        tree_order: units in the order of the module tree, each before the units in it, without the root.
        accumulated: unit -> bytes of whole gradients that are kept while gradients accumulate.
        reduced: units with a sharded gradient.
    """

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitBytes], ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        self.sizes = {unit.name: unit for unit in sizes}
        self.syncs = self.all_reduces = True
        self.offloads = plan.offload_params and plan.device_type != "cpu"
        self.is_sharded = plan.mesh.num_shards > 1 if plan.backend == "fsdp2" else STRATEGIES[plan.strategy].is_sharded
        self.gathered: set[str] = set()
        self.order: list[str] = []
        self.tree_order = [unit.name for unit in in_tree_order(plan.units) if unit.name]
        self.accumulated: dict[str, int] = {}
        self.reduced: set[str] = set()

    def run(self, stage: Stage) -> None:
        """Do what happens at the start of a stage, and run its operators."""
        name = stage.name
        if stage.kind == "pre_forward":
            self.pre_forward(name)
        elif stage.kind == "post_forward":
            if self.sizes[name].shards:
                self.order.append(name)
            if self.sizes[name].reshards:
                self.release(name)
        elif stage.kind == "loss":
            self.end_forward()
        elif stage.kind == "pre_backward":
            self.pre_backward(name)
        elif stage.kind in ("post_backward", "last_post_backward"):
            self.post_backward(name, stage.freed_grads, at_end=stage.kind == "last_post_backward")
        self.run_operators(stage)

    @abstractmethod
    def pre_forward(self, name: str) -> None: ...

    def end_forward(self) -> None:  # noqa: B027 (not all versions keep something)
        """Free what is kept until the end of the root's forward."""

    @abstractmethod
    def pre_backward(self, name: str) -> None: ...

    @abstractmethod
    def post_backward(self, name: str, grads: int, *, at_end: bool) -> None:
        """Complete the backward of a unit.

        Args:
            grads: bytes of the unit's whole gradients, which the ledger contains.
            at_end: whether the unit's inputs need no gradient.
        """

    def run_operators(self, stage: Stage) -> None:
        self.ledger.run(stage.peak, stage.end)

    def end_backward(self) -> None:
        """Complete the backward of the root."""
        self.order.clear()

    def release(self, name: str) -> None:
        """Free the gathered parameters of a unit."""
        if name in self.gathered:
            self.gathered.remove(name)
            self.ledger.free("gathered", self.sizes[name].gathered)

    def copy_of_collective(self, size: int) -> None:
        """Allocate and free the copy that gloo makes: of an all-gather's output, and of a reduce-scatter's input.

        See ``newLikeFlat`` in ``AsyncAllgatherWork`` and ``reduce_scatter_tensor_coalesced`` in ProcessGroupGloo.cpp.
        NCCL makes none.
        """
        if self.plan.device_type == "cpu":
            self.ledger.use("gathered", size)

    def keep_reduced(self, name: str) -> None:
        """Keep the reduced gradient, which the ledger contains; free it if it is offloaded or added to an older one."""
        if self.offloads or name in self.reduced:
            self.ledger.free("grads", self.sizes[name].grad_shard)
        self.reduced.add(name)


def in_tree_order(units: Iterable[UnitPlan]) -> list[UnitPlan]:
    """Return the units of a plan, which has each after the units in it, in the order of ``model.modules()``."""
    trees: list[list[UnitPlan]] = []  # of the units so far, each without one around it
    for unit in units:
        inner: list[UnitPlan] = []
        while trees and is_inside(trees[-1][0].modules[0], unit.modules[0]):
            inner = trees.pop() + inner
        trees.append([unit, *inner])
    return [unit for tree in trees for unit in tree]


def neighbour(order: Sequence[str], name: str, step: int) -> str | None:
    """Return the unit before (-1) or after (1) a unit; ``None`` at the ends, and for units outside of the order."""
    at = order.index(name) + step if name in order else -1
    return order[at] if 0 <= at < len(order) else None
