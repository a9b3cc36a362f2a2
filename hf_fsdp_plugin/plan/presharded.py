"""Models that their author has wrapped by hand: the units are read off, not decided."""

from __future__ import annotations

from torch import nn

from hf_fsdp_plugin.plan.model import Backend
from hf_fsdp_plugin.plan.modules import parent_of
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.plan.units import ParameterRow, UnitPlan, unit_plan


def author_backend(model: nn.Module) -> Backend | None:
    """Which FSDP the author used; ``None`` for a model that is not sharded yet.

    Parameters that are already ``DTensor`` count as version 2: whoever made them decided their placement.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    sharded = (FSDPModule, FullyShardedDataParallel)
    kinds = {isinstance(module, FSDPModule) for module in model.modules() if isinstance(module, sharded)}
    if kinds:
        return "fsdp2" if True in kinds else "fsdp1"
    return "fsdp2" if any(isinstance(parameter, DTensor) for parameter in model.parameters()) else None


def model_class_name(model: nn.Module) -> str:
    """The model's own class, without what FSDP made of it."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return type(model.module).__name__
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def author_units(model: nn.Module, backend: Backend) -> tuple[UnitPlan, ...]:
    """The units as they stand, children before parents. Counts are of whole parameters, not of this rank's shards."""
    return _flat_units(model) if backend == "fsdp1" else _grouped_units(model)


def _grouped_units(model: nn.Module) -> tuple[UnitPlan, ...]:
    from torch.distributed.fsdp import FSDPModule

    from hf_fsdp_plugin.torch_private import fsdp2

    modules = dict(model.named_modules())
    owner: dict[str, object] = {}
    groups: dict[object, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, FSDPModule):
            state: object = fsdp2.state_of(module)
            groups.setdefault(state, []).append(name)
            owner[name] = state
        else:
            owner[name] = owner.get(parent_of(name)) if name else None
    owned: dict[object, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        owned.setdefault(owner[parent_of(name)], []).append((name, parameter))
    if None in owned and not groups:  # DTensors with no FSDP over them: one unit stands for the whole
        groups[None] = [""]
    units = []
    for state, names in groups.items():
        parameters = owned.get(state, [])
        units.append(
            unit_plan(
                names,
                [model_class_name(modules[name]) for name in names],
                [(name, p.numel(), p.dtype, p.requires_grad) for name, p in parameters],
                reshard=fsdp2.reshards_after_forward(state, is_root="" in names),
                from_policy=names != [""],
            )
        )
    return tuple(reversed(units))


def _flat_units(model: nn.Module) -> tuple[UnitPlan, ...]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from hf_fsdp_plugin.torch_private import fsdp1

    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        flat = fsdp1.flat_parameter(module)
        rows: list[ParameterRow] = []
        name = canonical_name(name)
        if flat is not None:
            prefix = f"{name}." if name else ""
            rows = [
                (canonical_name(prefix + member.name), member.shape.numel(), flat.dtype, member.requires_grad)
                for member in fsdp1.members(flat)
            ]
        reshard = fsdp1.strategy_of(module).reshards_after_forward and bool(name)
        units.append(unit_plan([name], [model_class_name(module)], rows, reshard=reshard, from_policy=bool(name)))
    return tuple(reversed(units))
