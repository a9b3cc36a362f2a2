"""The settings that the planner compares: strategies and meshes, micro-batches, what saves memory, and units.

Smaller units than the layers save memory, larger ones save time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.modules import no_split_classes
from hf_fsdp_plugin.plan.names import ancestors, parent_of
from hf_fsdp_plugin.spec.fsdp_spec import Checkpointing, Version
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count

CHECKPOINTING: Final[tuple[Checkpointing, ...]] = ("none", "selective", "full")
"""From the fastest to the one that needs least memory."""
_MIN_SHARE: Final = 0.3
"""Smallest part of a layer's parameters for which a module inside it becomes a unit."""
_MAX_SHARE: Final = 0.98
"""A module with a larger part is not a smaller unit than the layer."""
_MIN_EXPERTS: Final = 4
"""Smallest number of modules of a list in a layer that are taken for experts."""
_LEVELS: Final = 4
"""Factor between the thresholds of the wrap policy by size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Settings of the wrap policy.

    Attributes:
        settings: (canonical name, value). Empty for the units that the config or the model has.
        label: what is different, for people; empty if nothing is.
        size: compared with the layers: smaller units need less memory, larger ones fewer collectives.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    size: Literal["given", "smaller", "larger"] = "given"


GIVEN: Final = Units()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """A strategy and the sizes of its mesh."""

    strategy: str
    shard: int
    replicate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One combination of settings.

    Attributes:
        offload_activations: whether what is saved for backward is moved to CPU memory.
        sync_each_batch: whether gradients are reduced after every micro-batch.
        units: the units, if they are others than those of the config or the model.
    """

    sharding: Sharding
    checkpointing: Checkpointing = "none"
    offload_activations: bool = False
    offload_params: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    sync_each_batch: bool = False
    units: Units = GIVEN

    def settings(self, version: Version) -> dict[str, Any]:
        """Return the FSDP settings by canonical name, as the spec has them."""
        sharding = self.sharding
        strategy = STRATEGIES[sharding.strategy]
        mesh = {"mesh.shard": sharding.shard, "mesh.replicate": sharding.replicate} if strategy.hybrid else {}
        return {
            "fsdp.version": version,
            "sharding.strategy": sharding.strategy,
            **mesh,
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
            "offload.params": self.offload_params,
            **dict(self.units.settings),
        }


def shardings(num_machines: int, gpus_per_machine: int) -> Iterator[Sharding]:
    """Yield the strategies, hybrid ones for each shard size that divides a machine or is a number of machines."""
    world = num_machines * gpus_per_machine
    for row in STRATEGIES.values():
        if not row.is_sharded:
            yield Sharding(strategy=row.name, shard=1, replicate=world)
        elif not row.hybrid:
            yield Sharding(strategy=row.name, shard=world, replicate=1)
        else:
            for shard in _shard_sizes(num_machines, gpus_per_machine):
                yield Sharding(strategy=row.name, shard=shard, replicate=world // shard)


def _shard_sizes(num_machines: int, gpus_per_machine: int) -> list[int]:
    world = num_machines * gpus_per_machine
    inside = {size for size in _powers(gpus_per_machine) if gpus_per_machine % size == 0} | {gpus_per_machine}
    across = {count * gpus_per_machine for count in _powers(num_machines) if num_machines % count == 0}
    return sorted(size for size in inside | across if 1 < size < world)


def micro_batches(global_batch: int, world_size: int) -> tuple[int, ...]:
    """Return the powers of two that divide a rank's samples per step, and all of its samples."""
    per_rank = global_batch // world_size
    return tuple(sorted({size for size in _powers(per_rank) if per_rank % size == 0} | {per_rank}))


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]


def memory_savings(*, offload: bool) -> Iterator[Mapping[str, Any]]:
    """Yield what saves memory besides sharding, the fastest first.

    Args:
        offload: with offload of parameters, which is far slower, instead of without.
    """
    for checkpointing in CHECKPOINTING:
        yield {"checkpointing": checkpointing, "offload_activations": False, "offload_params": offload}
    yield {"checkpointing": "full", "offload_activations": True, "offload_params": offload}


def other_units(plan: FsdpPlan, model: nn.Module) -> Iterator[Units]:
    """Yield other units than those of a plan: the largest modules in layers, stacks of layers, and the whole model.

    FSDP2 has a unit for the embedding and one for the head. FSDP1 has both in its root, which stays gathered, so they
    are units of their own here.

    Args:
        plan: with the units to compare with.
        model: the model that was planned.
    """
    layers = [name for unit in plan.units if unit.from_policy for name in unit.modules]
    spec = plan.spec.wrap
    if spec.policy == "size":
        yield _by_size(max(1, spec.min_num_params // _LEVELS), "smaller")
        yield _by_size(spec.min_num_params * _LEVELS, "larger")
    elif spec.policy == "transformer" and layers:
        classes = spec.classes or tuple(name for name in no_split_classes(model) if name in _classes(model))
        if parts := _parts(model, layers):
            yield _by_class((*classes, *parts), parts, "smaller")
        if plan.backend == "fsdp1":
            yield from _outside_of_layers(plan, model, layers, classes)
        if stacks := _stacks(model, layers):
            yield _by_class(stacks, stacks, "larger")
    if spec.policy != "none" and layers:
        yield Units(settings=(("wrap.policy", "none"),), label="one unit", size="larger")


def _by_size(threshold: int, size: Literal["smaller", "larger"]) -> Units:
    settings = (("wrap.policy", "size"), ("wrap.min_num_params", threshold))
    return Units(settings=settings, label=f"units from {format_count(threshold)} parameters", size=size)


def _by_class(classes: Sequence[str], new: Sequence[str], size: Literal["smaller", "larger"]) -> Units:
    settings = (("wrap.policy", "transformer"), ("wrap.classes", tuple(dict.fromkeys(classes))))
    return Units(settings=settings, label=f"units of {', '.join(new)}", size=size)


def _classes(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def _parts(model: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of the largest modules in layers, such as MLPs and the experts of a mixture.

    Experts in a list are not among them: ranks that route no token to an expert would not gather it.
    """
    found: dict[str, None] = {}
    for layer in {type(module): module for module in map(model.get_submodule, layers)}.values():
        total = _size(layer)
        pending = list(layer.children())
        while pending:
            module = pending.pop(0)
            share = _size(module) / max(1, total)
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            if is_list and len(list(module.children())) >= _MIN_EXPERTS:
                continue
            if is_list or share > _MAX_SHARE:
                pending += module.children()
            elif share >= _MIN_SHARE and not type(module).__module__.startswith("torch."):
                found[type(module).__name__] = None
    return tuple(found)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outside_of_layers(
    plan: FsdpPlan, model: nn.Module, layers: Sequence[str], classes: Sequence[str]
) -> Iterator[Units]:
    """Yield units for the embedding, and for embedding and head, which are in the root of FSDP1."""
    names = [name for name in map(parent_of, plan.units[-1].parameters) if name]
    shared = {type(model.get_submodule(parent_of(name))).__name__ for tie in plan.ties for name in tie}
    smallest = min(_size(model.get_submodule(name)) for name in layers)
    large = [name for name in names if _size(model.get_submodule(name)) >= smallest]
    modules = [module for name in names if isinstance(module := model.get_submodule(name), nn.Embedding)]
    embeddings = [type(module).__name__ for module in modules if _size(module) >= _MIN_SHARE * smallest]
    if new := tuple(name for name in dict.fromkeys(embeddings) if name not in shared):
        yield _by_class((*classes, *new), new, "smaller")
    if not plan.ties and len(large) > len(embeddings):
        yield _by_size(smallest, "smaller")


def _stacks(model: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of modules that contain several layers each, if there are several of them."""
    containers: Counter[str] = Counter(_stack_of(model, name) for name in layers)
    stacks = [name for name, count in containers.items() if name and count > 1]
    if len(stacks) < 2 or len(stacks) < len(containers):
        return ()
    return tuple(dict.fromkeys(type(model.get_submodule(name)).__name__ for name in stacks))


def _stack_of(model: nn.Module, layer: str) -> str:
    """Return the innermost module around a layer that is called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return next((p for p in ancestors(parent_of(layer)) if not isinstance(model.get_submodule(p), lists)), "")
