"""The plan: a spec resolved for one model and one world size. It contains neither ``auto`` nor ``None``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from hf_fsdp_plugin.plan.render import names_text, settings_text, units_text
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import ActivationSection, FsdpSpec, PrefetchSection, StateDictKind, Version
from hf_fsdp_plugin.text import format_count, plural

Backend = Literal["fsdp1", "fsdp2"]
PlannedDtype = Literal["fp32", "bf16", "fp16", "unchanged"]

_SECTIONS: Final = ("mesh", "precision", "prefetch", "activation")
"""Sections of the spec that the plan contains with the same names and fields."""

_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fsdp.version": "version",
        "sharding.strategy": "strategy",
        "offload.params": "offload_params",
        "offload.pin_memory": "pin_memory",
        "checkpoint.state_dict": "state_dict",
        "loading.ram_efficient": "ram_efficient",
        "loading.sync_module_states": "sync_module_states",
        "params.use_orig": "use_orig",
        "launch.num_processes": "world_size",
    }
)
"""Canonical name -> attribute of the plan, for other settings that the plan resolves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Sizes of the mesh's axes. Their product is the world size."""

    replicate: int
    shard: int


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


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpPlan:
    """Everything that a backend needs to shard a model.

    Attributes:
        units: in the order in which they are wrapped: children before parents, otherwise in forward order, root last.
        ties: one tuple per tied parameter, with all its names, which are all in the same unit.
        ignored_modules: names of modules whose parameters are not sharded.
        ignored_parameters: names of the parameters that are not sharded: the parameters of ignored modules, and
            scalars, which have no dimension to shard. Their gradients are averaged over all ranks.
        fp32_modules: names of the modules that compute in fp32 while the others compute in ``precision.param``.
        fp32_parameters: names of their parameters that are sharded.
        pre_sharded: whether the model was sharded before ``prepare``. Its units are kept.
        sharded_at_load: whether ``from_pretrained`` sharded the model, with a ``DistributedConfig``.
        spec: the requested settings.
        problems: warnings and notes of the spec and of the plan.
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
    fp32_modules: tuple[str, ...] = ()
    fp32_parameters: tuple[str, ...] = ()
    pre_sharded: bool
    sharded_at_load: bool
    offload_params: bool
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
            return getattr(getattr(self, section), field)
        return getattr(self, _ATTRIBUTES[name]) if name in _ATTRIBUTES else requested

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield every setting as (canonical name, resolved value), in the order of the spec's sections."""
        for name, _, _ in self.spec.settings():
            yield name, self.get(name)

    def to_json(self) -> dict[str, Any]:
        """Return the ``plan`` object of ``check --json``. Counts are of whole parameters, not of shards."""
        return {
            "backend": self.backend,
            "model_class": self.model_class,
            "world_size": self.world_size,
            "device": self.device_type,
            "strategy": self.strategy,
            "mesh": asdict(self.mesh),
            "num_params": self.num_params,
            "units": [
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
            ],
            "ties": [list(names) for names in self.ties],
            "ignored_modules": list(self.ignored_modules),
            "fp32_modules": list(self.fp32_modules),
            "pre_sharded": self.pre_sharded,
            "sharded_at_load": self.sharded_at_load,
            "offload_params": self.offload_params,
            "pin_memory": self.pin_memory,
            "precision": asdict(self.precision),
            "prefetch": asdict(self.prefetch),
            "activation": asdict(self.activation),
            "state_dict": self.state_dict,
            "ram_efficient": self.ram_efficient,
            "sync_module_states": self.sync_module_states,
            "use_orig": self.use_orig,
        }

    def __str__(self) -> str:
        lines = [self.text(), *(["", "problems"] if self.problems else [])]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])

    def text(self, *, width: int | None = None) -> str:
        """Return the settings and the table of units, without the problems.

        Args:
            width: maximum number of columns of a line; ``None`` for no limit.
        """
        settings = [(name, value) for name, value in self.settings() if not name.startswith(("launch.", "xla."))]
        master = self.precision.master
        frozen = [name for unit in self.units for name in unit.frozen]
        lines = [
            f"{self.model_class} · {format_count(self.num_params)} parameters · {self.backend.upper()} on "
            f"{plural(self.world_size, f'{self.device_type} rank')}"
            + (f" · master weights {master}" if master != "unchanged" else "")
            + (" · already sharded" if self.pre_sharded else ""),
            *settings_text(settings, width),
            "",
            units_text(self.units, width),
            *names_text("tied parameters", [" = ".join(names) for names in self.ties]),
            *names_text(f"frozen parameters: {len(frozen)}", frozen),
            *names_text(f"ignored modules: {len(self.ignored_modules)}", self.ignored_modules),
            *names_text(f"modules in fp32: {len(self.fp32_modules)}", self.fp32_modules),
        ]
        return "\n".join(lines)
