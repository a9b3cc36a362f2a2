"""What will be done: an FSDP spec decided for one model and one world. No ``auto`` and no ``None`` is left here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.model import BackwardPrefetch, Checkpointing, FsdpSpec, StateDictKind

Backend = Literal["fsdp1", "fsdp2"]
PlannedDtype = Literal["fp32", "bf16", "fp16", "unchanged"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Axis sizes; their product is the world size."""

    replicate: int
    shard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPlan:
    """``unchanged``: no cast. ``master`` is the dtype in which trainable parameters are kept and updated."""

    param: PlannedDtype
    reduce: PlannedDtype
    output: PlannedDtype
    buffer: PlannedDtype
    master: PlannedDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchPlan:
    backward: BackwardPrefetch
    forward: bool
    limit_all_gathers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPlan:
    """``native``: Transformers' own checkpointing does it; otherwise each unit of the wrap policy is checkpointed."""

    checkpointing: Checkpointing
    offload: bool
    native: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """A group of modules whose parameters are gathered and freed together.

    Attributes:
        modules: names of the modules in the group (``named_modules`` names, in forward order); ``("",)`` is the root.
        class_names: their classes, in the same order.
        parameters: names of the parameters that the unit owns (not owned by a unit inside it); ties are counted once.
        num_params: elements in ``parameters``.
        dtypes: dtype -> elements, as the model has them before any cast.
        frozen: those of ``parameters`` that need no gradient.
        reshard_after_forward: whether the gathered parameters are freed between forward and backward.
        from_policy: whether the wrap policy chose it (a layer), as against an embedding, norm, head or root unit. Only
            these are checkpointed; a layer within a layer is not one of them, as the outer one covers it.
    """

    modules: tuple[str, ...]
    class_names: tuple[str, ...]
    parameters: tuple[str, ...]
    num_params: int
    dtypes: Mapping[str, int]
    frozen: tuple[str, ...]
    reshard_after_forward: bool
    from_policy: bool

    @property
    def name(self) -> str:
        """``model.layers.0``, ``model.norm + lm_head``, or the empty string for the root."""
        return " + ".join(self.modules)

    @property
    def class_name(self) -> str:
        return " + ".join(self.class_names)


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan:
    """Everything a backend needs, decided.

    Attributes:
        units: bottom-up and otherwise in forward order, the order in which they are wrapped; the root is last.
        ties: groups of names of one and the same parameter, each group inside one unit.
        ignored_modules: names of modules whose parameters stay whole on every rank.
        ignored_parameters: names of the parameters that stay whole on every rank: those of the ignored modules, and
            scalars, which have no axis to be cut along. Their gradients are averaged over all ranks.
        pre_sharded: the author wrapped the model by hand; the units are the author's, and nothing is wrapped again.
        spec: what was asked, for the report's "asked" column.
        problems: the spec's warnings and notes, and those of the decision.
    """

    backend: Backend
    model_class: str
    world_size: int
    device_type: str
    strategy: str
    mesh: MeshPlan
    units: tuple[UnitPlan, ...]
    ties: tuple[tuple[str, ...], ...]
    ignored_modules: tuple[str, ...]
    ignored_parameters: tuple[str, ...]
    pre_sharded: bool
    offload_params: bool
    pin_memory: bool
    precision: PrecisionPlan
    prefetch: PrefetchPlan
    state_dict: StateDictKind
    activation: ActivationPlan
    ram_efficient: bool
    sync_module_states: bool
    use_orig: bool
    spec: FsdpSpec
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        from hf_fsdp_plugin.plan.render import to_text

        return to_text(self)
