"""Reads the units of a model that was sharded before it was passed to the plugin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.plan.fsdp_plan import Backend, ModelParts, ProblemCollector, UnitParameter, UnitPlan, unit_plan
from hf_fsdp_plugin.plan.names import canonical_name, parent_of
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2


def sharded_parts(model: nn.Module, problems: ProblemCollector) -> ModelParts | None:
    """Return the parts of a model that is already sharded; ``None`` for other models."""
    backend = sharded_backend(model)
    if backend is None:
        return None
    spec, version, name = problems.spec, 1 if backend == "fsdp1" else 2, model_class_name(model)
    # Other parallelism, such as tensor parallelism, uses DTensors too.
    has_units = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    function = "FullyShardedDataParallel" if version == 1 else "fully_shard"
    function = function if has_units else "DTensors of another parallelism"
    if spec.fsdp.version != version:
        message = f"version {spec.fsdp.version} is overridden: the model is already sharded with {function}."
        fix = f"Set fsdp_version: {version}, or pass the model unwrapped."
        problems.add("FSDP-W250", "fsdp.version", message, fix)
    at_load = distributed_config_of(model) is not None
    kept = ["wrap.policy", "wrap.classes", "wrap.min_num_params", "wrap.ignored_modules"]
    kept += [] if at_load else ["precision.fp32_modules"]
    unused = [setting for setting in kept if spec.asked(setting)]
    ignored = f" {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} ignored." if unused else ""
    if at_load and not unused:
        problems.add("FSDP-N280", None, f"from_pretrained has sharded {name}: its units, mesh and offload are kept.")
    elif has_units:
        message = f"{name} is already sharded with {function}. Its units, sharding, precision and offload are kept."
        fix = "Pass the model unwrapped to apply the config."
        problems.add("FSDP-W251", unused[0] if unused else None, f"{message}{ignored}", fix)
    else:
        message = (
            f"the parameters of {name} are DTensors already, as tensor parallelism makes them, and it has no FSDP "
            "units. FSDP is not applied: nothing more is sharded, and no gradients are averaged over ranks with "
            f"other data.{ignored}"
        )
        fix = "Load the model without tp_plan and without parallelize_module to train it with FSDP."
        problems.add("FSDP-W251", unused[0] if unused else None, message, fix)
    units = sharded_units(model, backend)
    if at_load:
        # Transformers never frees the last norm and the head, so these units do not show the strategy.
        units = tuple(replace(unit, from_policy=unit.from_policy and unit.reshard_after_forward) for unit in units)
    added = [path for path, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    names: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    return ModelParts(
        backend=backend,
        units=units,
        ties=tuple(tuple(found) for found in names.values() if len(found) > 1) if backend == "fsdp2" else (),
        # Transformers does not know of parameters that are added after from_pretrained. In a model that the script
        # sharded, the script reduces their gradients.
        ignored_parameters=tuple(added) if at_load else (),
        pre_sharded=True,
        sharded_at_load=at_load,
    )


def sharded_backend(model: nn.Module) -> Backend | None:
    """Return the version of FSDP that sharded a model; ``None`` for a model that is not sharded.

    A model with ``DTensor`` parameters counts as sharded by version 2.
    """
    sharded = (FSDPModule, FullyShardedDataParallel)
    kinds = {isinstance(module, FSDPModule) for module in model.modules() if isinstance(module, sharded)}
    if kinds:
        return "fsdp2" if True in kinds else "fsdp1"
    return "fsdp2" if any(isinstance(parameter, DTensor) for parameter in model.parameters()) else None


def distributed_config_of(model: Any) -> Any:
    """Return the ``DistributedConfig`` with which ``from_pretrained`` sharded a model; ``None`` for other models.

    A PEFT model returns the config of the model inside.
    """
    if not isinstance(model, nn.Module):
        return None
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    # A config may also be a copy of another model's.
    return config if config is not None and sharded_backend(model) == "fsdp2" else None


def model_class_name(model: nn.Module) -> str:
    """Return the name of the model's class before FSDP wrapped or renamed it."""
    if isinstance(model, FullyShardedDataParallel):
        return type(model.module).__name__
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def sharded_units(model: nn.Module, backend: Backend) -> tuple[UnitPlan, ...]:
    """Return the existing units, children before parents. Counts are of whole parameters, not of shards."""
    return _fsdp1_units(model) if backend == "fsdp1" else _fsdp2_units(model)


def _fsdp2_units(model: nn.Module) -> tuple[UnitPlan, ...]:
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
    owned: dict[object, list[UnitParameter]] = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            owned.setdefault(owner[parent_of(name)], []).append((name, p.numel(), p.dtype, p.requires_grad))
    if None in owned and not groups:  # DTensors without FSDP: the whole model is one unit
        groups[None] = [""]
    units = [
        unit_plan(
            {name: model_class_name(modules[name]) for name in names},
            owned.get(state, []),
            reshard=state is not None and fsdp2.reshards_after_forward(state, is_root="" in names),
            from_policy=names != [""],
            is_split_off=False,
        )
        for state, names in groups.items()
    ]
    return tuple(reversed(units))


def _fsdp1_units(model: nn.Module) -> tuple[UnitPlan, ...]:
    units = []
    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        name = canonical_name(path)
        flat = fsdp1.flat_parameter(module)
        rows: list[UnitParameter] = []
        if flat is not None:
            rows = [
                (canonical_name(f"{name}.{m.name}".lstrip(".")), m.shape.numel(), flat.dtype, m.requires_grad)
                for m in fsdp1.original_parameters(flat)
            ]
        reshard = fsdp1.strategy_of_unit(module).reshards_after_forward and bool(name)
        modules = {name: model_class_name(module)}
        units.append(unit_plan(modules, rows, reshard=reshard, from_policy=bool(name), is_split_off=False))
    return tuple(reversed(units))
