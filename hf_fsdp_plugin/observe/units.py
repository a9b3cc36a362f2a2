"""The units of a live model: their parameters, compared with those of the plan, and the memory of this rank.

Memory is measured from the storages of the live tensors, beside the memory that DDP would need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.parameters import step_mode
from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.plan.units import live_units, model_class_name
from hf_fsdp_plugin.text import format_names, plural, short_dtype
from hf_fsdp_plugin.torch_private.functions import CheckpointWrapper
from hf_fsdp_plugin.torch_private.live_unit import LiveUnit
from hf_fsdp_plugin.torch_private.modules import plain_tensors

HELD = ("params_bytes", "grads_bytes", "optimizer_bytes")


@dataclass(frozen=True, kw_only=True)
class UnitObservation:
    """One unit on this rank. Counts are in elements, without padding.

    Attributes:
        name: the canonical name of the module, such as ``model.layers.0``; empty for the root. Names of several
            modules are joined: ``model.norm + lm_head``.
        class_name: the class of the unwrapped module; several are joined like the names.
        param_dtype: dtype of the gathered parameters, in which the unit computes; empty if there are no parameters.
        reduce_dtype: dtype of gradient reduction; empty if no parameter is trained.
        master_dtype: dtype in which the shards are kept and updated.
        reshard_after_forward: whether gathered parameters are freed between forward and backward; never true for
            the root. ``None``, like ``offloaded``, if the installed torch does not show it.
        fp8_modules: the canonical names of the layers that compute in fp8.
        parameters: the canonical names of the parameters, in the order of ``live.held``; not part of the report, like
            ``live``.
        live: the torch objects of the unit.
    """

    name: str
    class_name: str
    num_params: int
    num_local_params: int
    num_frozen: int
    param_dtype: str
    reduce_dtype: str
    master_dtype: str
    reshard_after_forward: bool | None
    offloaded: bool | None
    checkpointed: bool
    fp8_modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    live: LiveUnit = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """The name in messages and tables."""
        return self.name or "(root)"

    @property
    def num_trainable(self) -> int:
        return self.num_params - self.num_frozen

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(self.name.split(" + "))

    def to_json(self) -> dict[str, Any]:
        """Return ``observed_unit`` of docs/json.schema.json."""
        facts = {name: value for name, value in vars(self).items() if name not in ("live", "parameters")}
        facts["fp8_modules"] = list(self.fp8_modules)
        return {"name": facts.pop("name"), "class": facts.pop("class_name"), **facts}


def observe_units(model: nn.Module) -> tuple[UnitObservation, ...]:
    """Return all FSDP units in the order of the module tree, with the root last.

    The result is the same before and after the first forward, in which FSDP completes its initialization. No
    collectives.
    """
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    found = (each for each in model.modules() if isinstance(each, CheckpointWrapper) or checkpoints_natively(each))
    checkpointed = {names[id(module)] for module in found}
    order = {name: position for position, name in enumerate(names.values())}
    units = []
    for live in live_units(model):
        # torch stores a group's modules in the order of the call; reports use the order of the module tree.
        # A script may have replaced some of them.
        modules = [module for module in live.modules if id(module) in names]
        modules.sort(key=lambda module: order[names[id(module)]])
        module_names = [names[id(module)] for module in modules]
        held = [(names.get(id(each.module), "(replaced)"), each) for each in live.known("held", ())]
        unit = UnitObservation(
            name=" + ".join(module_names),
            class_name=" + ".join(model_class_name(unwrapped(module)) for module in modules),
            num_params=live.num_params,
            num_local_params=live.num_local_params,
            num_frozen=live.num_frozen,
            param_dtype=dtype_name(live.known("compute_dtype")),
            reduce_dtype=dtype_name(live.known("reduce_dtype")),
            master_dtype="+".join(dtype_name(dtype) for dtype in live.known("master_dtypes", ())),
            reshard_after_forward=live.known("reshards"),
            offloaded=live.known("offloaded"),
            checkpointed=all(name in checkpointed for name in module_names),
            fp8_modules=tuple(name for name, each in held if each.attribute == "weight" and fp8_library(each.module)),
            parameters=tuple(f"{name}.{each.attribute}".lstrip(".") for name, each in held),
            live=live,
        )
        units.append(unit)
    return tuple(sorted(units, key=lambda unit: unit.live.is_root))


def unmanaged_parameters(model: nn.Module, units: Iterable[UnitObservation]) -> list[nn.Parameter]:
    """Return the parameters that no unit shards: those of ignored modules, or all if the model is not sharded."""
    managed = frozenset[int]().union(*(unit.live.parameter_ids for unit in units))
    return [parameter for parameter in model.parameters() if id(parameter) not in managed]


def checkpoints_natively(module: nn.Module) -> bool:
    """Return whether Transformers' gradient checkpointing is enabled on this module."""
    attributes = vars(module)
    return attributes.get("gradient_checkpointing") is True and "_gradient_checkpointing_func" in attributes


def fp8_library(module: nn.Module) -> str:
    """Return ``ao`` for a layer of torchao that computes in fp8, ``te`` for one of Transformer Engine, or nothing."""
    for kind in type(module).__mro__:
        if kind.__name__ == "Float8Linear":
            return "ao"
        if kind.__module__.startswith("transformer_engine."):
            return "te"
    return ""


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return ``fp32``, ``bf16`` or ``fp16``; torch's name for other dtypes; the empty string for ``None``."""
    return "" if dtype is None else short_dtype(dtype)


@dataclass(frozen=True, kw_only=True)
class StructureComparison:
    """What differs between the planned units and the live ones. Names are canonical.

    Attributes:
        reason: describes the differences in one line; empty if there are none.
        unsharded: parameters of the live model that the plan shards and that no unit has.
        added: parameters that were added after the model was sharded. The units are equal.
    """

    reason: str = ""
    unsharded: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def compare_structure(model: nn.Module, units: Sequence[UnitObservation], plan: FsdpPlan) -> StructureComparison:
    """Compare units and parameters, in both directions. Without collectives."""
    first_name = {canonical_name(name): canonical_name(names[0]) for names in plan.ties for name in names}

    def first(name: str) -> str:
        name = canonical_name(name)
        return first_name.get(name, name)

    modules_of = [frozenset(map(canonical_name, unit.modules)) for unit in plan.units]
    planned = {first(n): modules for unit, modules in zip(plan.units, modules_of, strict=True) for n in unit.parameters}
    live = {first(name): frozenset(unit.module_names) for unit in units for name in unit.parameters}
    # The root is left out: FSDP makes it a unit even if other units own all its parameters.
    planned_units = set(modules_of) - {frozenset([""])}
    live_units = {frozenset(unit.module_names) for unit in units} - {frozenset([""])}
    unmanaged = {id(parameter) for parameter in unmanaged_parameters(model, units)}
    ignored = set(map(canonical_name, plan.ignored_parameters))
    unsharded = {first(name) for name, parameter in model.named_parameters() if id(parameter) in unmanaged}
    unsharded = unsharded & planned.keys() - ignored
    moved = (name for name in live.keys() & planned.keys() if live[name] != planned[name])
    kinds = (
        ((" + ".join(sorted(each)) for each in planned_units - live_units), "planned unit", "not in the live model"),
        ((" + ".join(sorted(each)) for each in live_units - planned_units), "unit", "not planned"),
        (unsharded, "parameter", "not sharded"),
        (moved, "parameter", "in another unit"),
        (live.keys() & ignored, "ignored parameter", "sharded"),
    )
    reasons = [
        f"{plural(len(found), noun)} {'is' if len(found) == 1 else 'are'} {what}: {format_names(found, 2)}"
        for names, noun, what in kinds
        if (found := sorted(name or "(root)" for name in names))
    ]
    return StructureComparison(reason="; ".join(reasons), unsharded=tuple(sorted(unsharded)))


def observe_memory(
    model: nn.Module, units: Sequence[UnitObservation], optimizers: Sequence[Any], recorded_grads_bytes: int | None
) -> dict[str, Any]:
    """Measure the memory of this rank: ``memory`` of the report (docs/json.schema.json). No collectives.

    A storage that several tensors share counts once. ``params_bytes`` are the shards, with FSDP's padding, and the
    parameters that no unit shards; ``gathered_bytes`` the gathered parameters that are currently not freed;
    ``buffers_bytes`` the buffers of the model, which are never sharded. ``grads_source`` is ``alive`` if the gradients
    exist now, ``optimizer step`` if their size was recorded before a step, or ``trainable shards`` if it is computed
    from the shards. ``peak_source`` is the name of an allocator (tensors on the device) or ``process resident set``
    (includes libraries). ``ddp_…`` are the same tensors with the same dtypes, unsharded as on every rank of
    DistributedDataParallel.

    Args:
        optimizers: torch's optimizers of the model.
        recorded_grads_bytes: size of the gradients before an optimizer step; used if no gradient exists now.
    """
    unmanaged = unmanaged_parameters(model, units)
    trained = [parameter for parameter in unmanaged if parameter.requires_grad]
    shards = [shard for unit in units for shard in unit.live.shards]
    gathered = [tensor for unit in units for tensor in unit.live.known("gathered", ())]
    ddp_params_bytes = sum(unit.num_params * _master_itemsize(unit) for unit in units)
    ddp_grads_bytes = sum(unit.num_trainable * _master_itemsize(unit) for unit in units) + _nbytes(trained)
    grads_bytes, grads_source = gradient_bytes(model, units), "alive"
    if not (optimizers or recorded_grads_bytes or model.training):  # a process that only evaluates
        ddp_grads_bytes = 0
    elif grads_bytes == 0 and recorded_grads_bytes is None:
        grads_bytes = sum(unit.live.known("num_local_trainable", 0) * _master_itemsize(unit) for unit in units)
        grads_bytes, grads_source = grads_bytes + _nbytes(trained), "trainable shards"
    if grads_bytes == 0 and recorded_grads_bytes is not None:
        grads_bytes, grads_source = recorded_grads_bytes, "optimizer step"
    device = available_device() if available_device().is_initialized() else DEVICES["cpu"]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    # The unsharded optimizer state: exact for DTensors, else scaled by the trainable elements.
    optimizer_bytes = storage_bytes(tensors)
    if any(step_mode(optimizer) == "whole" for optimizer in optimizers):
        whole_bytes = optimizer_bytes
    elif any(isinstance(tensor, DTensor) and type(tensor.to_local()) is torch.Tensor for tensor in tensors):
        whole_bytes = _nbytes(tensors)
    else:
        num_trained = sum(parameter.numel() for parameter in trained)
        local = sum(unit.live.num_local_trainable for unit in units) + num_trained
        whole = sum(unit.num_trainable for unit in units) + num_trained
        whole_bytes = round(optimizer_bytes * whole / local) if local else 0
    ddp = {"ddp_params_bytes": ddp_params_bytes + _nbytes(unmanaged), "ddp_grads_bytes": ddp_grads_bytes}
    ddp["ddp_optimizer_bytes"] = whole_bytes
    return {
        "params_bytes": storage_bytes([*shards, *unmanaged]),
        "grads_bytes": grads_bytes,
        "optimizer_bytes": optimizer_bytes,
        "gathered_bytes": storage_bytes(gathered, excluding=shards),
        "buffers_bytes": storage_bytes(model.buffers()),
        "peak_bytes": device.peak_memory(),
        "grads_source": grads_source,
        "peak_source": device.peak_source,
        **ddp,
        "ddp_bytes": sum(ddp.values()),
    }


def gradient_bytes(model: nn.Module, units: Sequence[UnitObservation]) -> int:
    """Return the bytes of the gradients that exist on this rank now; 0 after ``zero_grad``."""
    tensors = [gradient for unit in units for gradient in unit.live.known("gradients", ())]
    # Between two collectives, parameters of FSDP1 can be views of gathered ones, which have no gradient.
    tensors += [p.grad for p in unmanaged_parameters(model, units) if p.is_leaf and p.grad is not None]
    return storage_bytes(tensors)


def storage_bytes(tensors: Iterable[torch.Tensor], *, excluding: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the distinct storages of the tensors' local parts; a freed or meta storage counts 0."""
    excluded = dict(map(_storage, plain_tensors(excluding)))
    return sum(size for key, size in dict(map(_storage, plain_tensors(tensors))).items() if key not in excluded)


def _storage(local: torch.Tensor) -> tuple[tuple[str, int], int]:
    """Return the identity and the bytes of a tensor's storage."""
    storage = local.untyped_storage()
    key = str(local.device), storage.data_ptr() or -id(local)
    return key, 0 if local.is_meta else storage.nbytes()


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _master_itemsize(unit: UnitObservation) -> int:
    return max((dtype.itemsize for dtype in unit.live.known("master_dtypes", ())), default=0)
