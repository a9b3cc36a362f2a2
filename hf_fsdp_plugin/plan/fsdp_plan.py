"""The plan: a spec resolved for one model and one world size. It contains neither ``auto`` nor ``None``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from hf_fsdp_plugin.plan.names import common_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import ActivationSection, FsdpSpec, PrefetchSection, StateDictKind, Version
from hf_fsdp_plugin.spec.rules import fp8_backend
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_dtype, format_table, format_value, plural, truncate_lines

Backend = Literal["fsdp1", "fsdp2"]
PlannedDtype = Literal["fp32", "bf16", "fp16", "unchanged"]
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a dtype in the spec and the plan -> torch's dtype."""
UnitParameter = tuple[str, int, torch.dtype, bool]
"""Name, number of elements, dtype and ``requires_grad`` of one parameter."""

_SECTIONS: Final = ("mesh", "precision", "prefetch", "activation")
"""Sections of the spec that the plan contains with the same names and fields."""
_NOT_IN_JSON: Final = frozenset({"ignored_parameters", "fp32_parameters", "device_type", "spec", "problems"})

_ATTRIBUTES: Final[Mapping[str, str]] = {
    "fsdp.version": "version", "sharding.strategy": "strategy", "offload.params": "offload_params",
    "offload.optimizer": "offload_optimizer", "offload.pin_memory": "pin_memory",
    "checkpoint.state_dict": "state_dict", "loading.ram_efficient": "ram_efficient",
    "loading.sync_module_states": "sync_module_states", "params.use_orig": "use_orig",
    "fp8.backend": "fp8_backend", "launch.num_processes": "world_size",
}  # fmt: skip
"""Canonical name -> attribute of the plan, for other settings that the plan resolves."""


def torch_dtype(name: PlannedDtype) -> torch.dtype | None:
    """Return the torch dtype of a planned dtype; ``None`` for ``unchanged``, which means no cast."""
    return DTYPES.get(name)


class ProblemCollector:
    """Collects the problems of one spec, so that all of them are reported at once."""

    def __init__(self, spec: FsdpSpec) -> None:
        self.spec = spec
        self.problems: list[Problem] = []

    def add(self, code: str, setting: str | None, message: str, fix: str = "") -> None:
        """Add a problem. Its origin is the source of ``setting``; a default has no origin."""
        self.problems.append(self.spec.problem(code, setting, message, fix))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Sizes of the mesh's axes. The product of all but ``expert`` is the world size.

    Attributes:
        replicate, shard: axes of data parallelism; each of their ranks trains other samples.
        context: ranks that divide each sequence. FSDP shards over them, too.
        tensor: ranks that divide each layer.
        expert: ranks that divide the experts of a layer; they are ranks of the shard and tensor axes.
    """

    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def num_shards(self) -> int:
        """Number of shards of a parameter that only FSDP divides."""
        return self.shard * self.context

    def axes(self) -> dict[str, int]:
        """Return replicate and shard, and the other axes above 1, with their sizes."""
        others = {"context": self.context, "tensor": self.tensor, "expert": self.expert}
        return {"replicate": self.replicate, "shard": self.shard} | {k: v for k, v in others.items() if v > 1}

    @property
    def has_model_axes(self) -> bool:
        """Whether ranks divide sequences, layers or experts."""
        return max(self.context, self.tensor, self.expert) > 1

    @property
    def has_divided_layers(self) -> bool:
        """Whether ``from_pretrained`` divides the layers of a model."""
        return max(self.tensor, self.expert) > 1

    @property
    def num_expert_shards(self) -> int:
        """Number of shards of a parameter of experts: the ranks that have the same experts shard them."""
        return self.num_shards * self.tensor // self.expert

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that train different samples."""
        return self.replicate * self.shard


def has_replicas(mesh: MeshPlan, strategy: str) -> bool:
    """Return whether the mesh has an axis of replicas. Hybrid and unsharded strategies have one also of size 1."""
    return mesh.replicate > 1 or STRATEGIES[strategy].hybrid or not STRATEGIES[strategy].is_sharded


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPlan:
    """``unchanged`` means no cast. ``master`` is the dtype in which trainable parameters are stored and updated."""

    param: PlannedDtype
    reduce: PlannedDtype
    output: PlannedDtype
    buffer: PlannedDtype
    master: Literal["fp32", "unchanged"]
    fp32_modules: str = ""
    """The pattern of the spec; :attr:`FsdpPlan.fp32_modules` are the modules."""

    def stored_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is stored, and updated by the optimizer if it is trainable."""
        is_updated = parameter.requires_grad and parameter.is_floating_point()
        return torch.float32 if self.master == "fp32" and is_updated else parameter.dtype


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
    modules: Mapping[str, str], rows: Sequence[UnitParameter], *, reshard: bool, from_policy: bool, is_split_off: bool
) -> UnitPlan:
    """Return the unit with these modules (name -> name of the class) and parameters."""
    dtypes: Counter[str] = Counter()
    for _, num_elements, dtype, _ in rows:
        dtypes[format_dtype(dtype)] += num_elements
    return UnitPlan(
        modules=tuple(modules),
        class_names=tuple(modules.values()),
        parameters=tuple(name for name, *_ in rows),
        num_params=dtypes.total(),
        dtypes=MappingProxyType(dict(dtypes)),
        frozen=tuple(name for name, _, _, requires_grad in rows if not requires_grad),
        reshard_after_forward=reshard,
        from_policy=from_policy,
        is_split_off=is_split_off,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """The fields of a plan that depend on the modules of the model.

    Attributes:
        units: the units in the order of wrapping: children before parents, otherwise in forward order, root last.
        ties: one tuple per tied parameter, with all its names, which are all in the same unit.
        ignored_modules: names of modules whose parameters are not sharded.
        ignored_parameters: names of the parameters that are not sharded: the parameters of ignored modules, and
            scalars, which have no dimension to shard. Their gradients are averaged over all ranks.
        pre_sharded: whether the model was sharded before ``prepare``. Its units are kept.
        sharded_at_load: whether ``from_pretrained`` sharded the model, with a ``DistributedConfig``.
    """

    backend: Backend
    units: tuple[UnitPlan, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    ignored_modules: tuple[str, ...] = ()
    ignored_parameters: tuple[str, ...] = ()
    pre_sharded: bool = False
    sharded_at_load: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan(ModelParts):
    """Everything that a backend needs to shard a model.

    Attributes:
        fp32_modules: names of the modules that compute in fp32 while the others compute in ``precision.param``.
        fp32_parameters: names of their parameters that are sharded.
        spec: the requested settings.
        problems: warnings and notes of the spec and of the plan.
    """

    model_class: str
    world_size: int
    device_type: str
    strategy: str
    mesh: MeshPlan
    fp32_modules: tuple[str, ...] = ()
    fp32_parameters: tuple[str, ...] = ()
    offload_params: bool
    offload_optimizer: bool = False
    pin_memory: bool
    precision: PrecisionPlan
    prefetch: PrefetchSection
    state_dict: StateDictKind
    activation: ActivationSection
    ram_efficient: bool
    sync_module_states: bool
    use_orig: bool
    spec: FsdpSpec
    problems: tuple[Problem, ...]

    @property
    def version(self) -> Version:
        return 1 if self.backend == "fsdp1" else 2

    @property
    def fp8_backend(self) -> str:
        return fp8_backend(self.spec)

    @property
    def has_replicas(self) -> bool:
        return has_replicas(self.mesh, self.strategy)

    @property
    def num_params(self) -> int:
        """Number of elements in all units, before sharding."""
        return sum(unit.num_params for unit in self.units)

    def get(self, name: str) -> Any:
        """Return the resolved value of a setting, or the spec's value if the plan does not resolve it.

        Args:
            name: canonical name, such as ``prefetch.backward``.

        Raises:
            KeyError: the name is not a setting of the vocabulary.
        """
        requested = self.spec.get(name)
        section, _, field = name.partition(".")
        if section in _SECTIONS:
            return getattr(getattr(self, section), field, requested)
        return getattr(self, _ATTRIBUTES[name]) if name in _ATTRIBUTES else requested

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield every setting as (canonical name, resolved value), in the order of the spec's sections."""
        for name, _, _ in self.spec.settings():
            yield name, self.get(name)

    def to_json(self) -> dict[str, Any]:
        """Return the ``plan`` object of ``check --json``. Counts are of whole parameters, not of shards."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_IN_JSON}
        units = [
            {
                "name": unit.name,
                "class": unit.class_name,
                "num_params": unit.num_params,
                "dtypes": dict(unit.dtypes),
                "num_frozen": len(unit.frozen),
                "reshard_after_forward": unit.reshard_after_forward,
                "from_policy": unit.from_policy,
            }
            for unit in self.units
        ]
        values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        values |= {name: asdict(values[name]) for name in _SECTIONS}
        return {**values, "device": self.device_type, "num_params": self.num_params, "units": units}

    def __str__(self) -> str:
        lines = [self.text(), *(["", "problems"] if self.problems else [])]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def text(self, *, width: int | None = None) -> str:
        """Return the settings and the table of units, without the problems.

        Args:
            width: maximum number of columns of a line; ``None`` for no limit.
        """
        hidden = ("launch.", "xla.") if self.spec.uses_fp8 else ("launch.", "xla.", "fp8.")
        settings = [(name, value) for name, value in self.settings() if not name.startswith(hidden)]
        master = self.precision.master
        frozen = [name for unit in self.units for name in unit.frozen]
        lines = [
            f"{self.model_class} · {format_count(self.num_params)} parameters · {self.backend.upper()} on "
            f"{plural(self.world_size, f'{self.device_type} rank')}"
            + (f" · master weights {master}" if master != "unchanged" else "")
            + (" · already sharded" if self.pre_sharded else ""),
            *_settings_text(settings, width),
            "",
            _units_text(self.units, width),
            *_names_text("tied parameters", [" = ".join(names) for names in self.ties]),
            *_names_text(f"frozen parameters: {len(frozen)}", frozen),
            *_names_text(f"ignored modules: {len(self.ignored_modules)}", self.ignored_modules),
            *_names_text(f"modules in fp32: {len(self.fp32_modules)}", self.fp32_modules),
        ]
        return "\n".join(lines)


_MAX_NAMES = 12


def _settings_text(settings: Iterable[tuple[str, Any]], width: int | None) -> list[str]:
    """Return one line per section: ``prefetch    backward pre · forward false · limit_all_gathers true``.

    Args:
        settings: canonical names and values, grouped by section.
        width: maximum number of columns. Longer sections have several lines.
    """
    split = [(*name.split(".", 1), value) for name, value in settings]
    indent = max(len(section) for section, _, _ in split) + 4
    lines: list[str] = []
    for section, group in groupby(split, key=lambda setting: setting[0]):
        lines.append(f"  {section}".ljust(indent))
        for number, item in enumerate(f"{name} {format_value(value)}" for _, name, value in group):
            if number and width is not None and len(lines[-1]) + len(item) + 3 > width:
                lines.append(" " * indent + item)
            else:
                lines[-1] += f" · {item}" if number else item
    return lines


def _names_text(title: str, names: Sequence[str]) -> list[str]:
    """Return a blank line, a title and the first names as lines; an empty list if there are no names."""
    return ["", title, *truncate_lines((f"  {name}" for name in names), _MAX_NAMES)] if names else []


def _units_text(units: Iterable[UnitPlan], width: int | None) -> str:
    """Return a table of units. Units that differ only in the numbers in their names share a row."""
    rows = [("unit", "class", "parameters", "dtype", "after forward")]
    for name, same in equal_units(units):
        first, several = same[0], len(same) > 1
        class_name = f"{first.class_name} ×{len(same)}" if several else first.class_name
        count = format_count(first.num_params) + (" each" if several else "")
        dtypes, after = " + ".join(sorted(first.dtypes)) or "–", "freed" if first.reshard_after_forward else "kept"
        rows.append((name, class_name, count, dtypes, after))
    return format_table(rows, width=width)


def equal_units(units: Iterable[UnitPlan]) -> list[tuple[str, list[UnitPlan]]]:
    """Group units that differ only in the numbers in their names, and name each group: ``model.layers.0–29``."""
    groups: dict[tuple[object, ...], list[UnitPlan]] = {}
    for unit in units:
        template = tuple("#" if part.isdigit() else part for part in unit.name.split("."))
        dtypes = tuple(sorted(unit.dtypes))
        key = (template, unit.class_name, unit.num_params, dtypes, len(unit.frozen), unit.reshard_after_forward)
        groups.setdefault(key, []).append(unit)
    return [(common_name([unit.name for unit in same]) or "(root)", same) for same in groups.values()]
