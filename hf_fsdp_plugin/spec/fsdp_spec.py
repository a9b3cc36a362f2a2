"""``FsdpSpec``: the requested settings, typed and in sections, with defaults; those that differ are at the end.

Attribute paths are the canonical names: ``spec.sharding.strategy`` is the setting ``sharding.strategy``. ``"auto"`` is
replaced by ``plan.resolve`` with a value for the model and the world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from hf_fsdp_plugin.problems import DEFAULT_ORIGIN, Origin, Problem
from hf_fsdp_plugin.sources.interface import SourceFamily, enables_fsdp
from hf_fsdp_plugin.strategies import DEFAULT_STRATEGY

Version = Literal[1, 2]
WrapPolicy = Literal["transformer", "size", "none"]
DtypeName = Literal["fp32", "bf16", "fp16", "auto"]
BackwardPrefetch = Literal["pre", "post", "none"]
ContextExchange = Literal["allgather", "alltoall"]
StateDictKind = Literal["full", "sharded", "local"]
SaveOnSignal = Literal["none", "usr1", "term", "both"]
MetricsPlace = Literal["none", "file", "log"]
Fp8Backend = Literal["auto", "ao", "te", "msamp"]
Checkpointing = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpSection:
    version: Version = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSection:
    """``strategy`` is a name of :data:`hf_fsdp_plugin.strategies.STRATEGIES`."""

    strategy: str = DEFAULT_STRATEGY.name
    reduce_replicas_at_last_micro_batch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSection:
    """Sizes of the axes. The product of all but ``expert``, which divides shard × tensor again, is the world size."""

    shard: int | Literal["auto"] = "auto"
    replicate: int | Literal["auto"] = "auto"
    context: int = 1
    tensor: int = 1
    expert: int = 1
    context_exchange: ContextExchange = "allgather"

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that train the same samples."""
        return self.context * self.tensor

    @property
    def has_model_axes(self) -> bool:
        """Whether the mesh has other axes than those of data parallelism."""
        return self.ranks_per_sample > 1 or self.expert > 1

    def axes(self) -> dict[str, int | Literal["auto"]]:
        """Return replicate and shard, and the other axes above 1, with their sizes."""
        return self.rank_axes() | ({"expert": self.expert} if self.expert > 1 else {})

    def rank_axes(self) -> dict[str, int | Literal["auto"]]:
        """Return the axes whose product is the world size: all but the expert axis."""
        others = {"context": self.context, "tensor": self.tensor}
        return {"replicate": self.replicate, "shard": self.shard} | {k: v for k, v in others.items() if v > 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapSection:
    """If ``classes`` is empty, the model's own ``_no_split_modules`` apply. ``min_num_params`` counts parameters."""

    policy: WrapPolicy = "none"
    classes: tuple[str, ...] = ()
    min_num_params: int = 0
    ignored_modules: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSection:
    params: bool = False
    optimizer: bool = False
    pin_memory: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSection:
    """``auto`` keeps the dtype of the model: no cast. ``fp32_modules`` is a pattern of names; empty selects none."""

    param: DtypeName = "auto"
    reduce: DtypeName = "fp32"
    output: DtypeName = "auto"
    buffer: DtypeName = "auto"
    fp32_modules: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Section:
    """They have an effect with ``mixed_precision: fp8``. ``te_options`` are arguments of ``TERecipeKwargs``."""

    backend: Fp8Backend = "auto"
    all_gather: bool = True  # false under FSDP1: VERSION_DEFAULTS
    pad_inner_dim: bool = True
    te_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchSection:
    backward: BackwardPrefetch = "none"  # "pre" under FSDP2: VERSION_DEFAULTS
    forward: bool = False
    limit_all_gathers: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    state_dict: StateDictKind = "sharded"
    asynchronous: bool = False
    verify: bool = True
    storage: str = ""
    save_on_signal: SaveOnSignal = "usr1"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSection:
    log: MetricsPlace = "file"
    straggler_percent: int = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationSection:
    """``native`` is true if ``gradient_checkpointing`` of Transformers is used instead of FSDP's checkpointing."""

    checkpointing: Checkpointing = "none"
    offload: bool = False
    native: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingSection:
    ram_efficient: bool = False
    sync_module_states: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamsSection:
    use_orig: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class XlaSection:
    enabled: bool = False
    v2: bool = False
    grad_ckpt: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSection:
    """Settings of the launcher, not of the model. ``extra`` contains keys that the plugin does not use."""

    compute_environment: str = "LOCAL_MACHINE"
    distributed_type: str = "FSDP"
    num_processes: int | Literal["auto"] = "auto"
    num_machines: int = 1
    machine_rank: int = 0
    main_process_ip: str = ""
    main_process_port: int = 0
    mixed_precision: str = "no"
    use_cpu: bool = False
    debug: bool = False
    downcast_bf16: bool = False
    rdzv_backend: str = "static"
    same_network: bool = True
    gpu_ids: str = "all"
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    dynamo_config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpSpec:
    """A checked FSDP config without errors, returned by :func:`hf_fsdp_plugin.load_spec`.

    Attributes:
        origins: canonical name -> origin of its value. Settings without an entry have their default value.
        problems: warnings and notes.
    """

    fsdp: FsdpSection = field(default_factory=FsdpSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    wrap: WrapSection = field(default_factory=WrapSection)
    offload: OffloadSection = field(default_factory=OffloadSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    fp8: Fp8Section = field(default_factory=Fp8Section)
    prefetch: PrefetchSection = field(default_factory=PrefetchSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    activation: ActivationSection = field(default_factory=ActivationSection)
    loading: LoadingSection = field(default_factory=LoadingSection)
    params: ParamsSection = field(default_factory=ParamsSection)
    xla: XlaSection = field(default_factory=XlaSection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}))
    problems: tuple[Problem, ...] = ()

    def get(self, name: str) -> Any:
        """Return the value of a setting. Raises ``KeyError`` for a name that is not canonical."""
        section, _, setting = name.partition(".")
        try:
            return getattr(getattr(self, section), setting)
        except AttributeError:
            raise KeyError(name) from None

    def origin(self, name: str) -> Origin:
        """Return the origin of the value; ``DEFAULT_ORIGIN`` if no source sets it."""
        return self.origins.get(name, DEFAULT_ORIGIN)

    def asked(self, name: str) -> bool:
        """Whether a source sets this setting."""
        return name in self.origins

    def problem(self, code: str, setting: str | None, message: str, fix: str = "") -> Problem:
        """Return a problem of one setting, with the origin of its value."""
        origin = self.origins.get(setting) if setting is not None else None
        return Problem(code=code, message=message, fix=fix, setting=setting, origin=origin)

    @property
    def enabled(self) -> bool:
        """Whether a source enables FSDP, and no source of higher precedence selects another engine.

        The FSDP of PyTorch/XLA is another engine.
        """
        if self.uses_xla:
            return False
        asked = (setting for setting in self.settings() if self.asked(setting[0]))
        return self.launch.distributed_type == "FSDP" and any(enables_fsdp(*setting) for setting in asked)

    @property
    def uses_fp8(self) -> bool:
        """Whether linear layers compute in fp8."""
        return self.launch.mixed_precision == "fp8"

    @property
    def uses_xla(self) -> bool:
        """Whether the settings select the FSDP of PyTorch/XLA."""
        return self.xla.enabled or self.xla.v2

    def with_values(self, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> FsdpSpec:
        """Return a copy with other values of some settings, by canonical name. The caller checks the rules."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, setting = name.partition(".")
            sections.setdefault(section, {})[setting] = value
        changed: dict[str, Any] = {name: replace(getattr(self, name), **new) for name, new in sections.items()}
        return replace(self, **changed, origins=MappingProxyType({**self.origins, **origins}))

    def settings(self) -> Iterator[tuple[str, Any, Origin]]:
        """Yield every setting as (name, value, origin), in the order of the sections."""
        for section in SECTIONS:
            for setting in fields(getattr(self, section)):
                name = f"{section}.{setting.name}"
                yield name, self.get(name), self.origin(name)


SECTIONS: tuple[str, ...] = tuple(f.name for f in fields(FsdpSpec) if f.name not in ("origins", "problems"))

FAMILY_DEFAULTS: Final[Mapping[SourceFamily | None, Mapping[str, Any]]] = {
    "accelerate": {"fsdp.version": 1, "wrap.policy": "none"},
    "training_arguments": {"fsdp.version": 2, "wrap.policy": "transformer"},
    None: {"fsdp.version": 2},
}
"""Family of a source, ``None`` if no source mentions FSDP -> the defaults that depend on it."""

VERSION_DEFAULTS: Final[Mapping[int, Mapping[str, Any]]] = {
    1: {"prefetch.backward": "none", "fp8.all_gather": False},
    2: {"prefetch.backward": "pre", "fp8.all_gather": True},
}
"""FSDP version -> the defaults that depend on it."""
