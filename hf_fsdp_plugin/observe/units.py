"""The units of a live model, with the names and classes of the unwrapped model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import CheckpointWrapper
from hf_fsdp_plugin.torch_private.live_unit import LiveUnit

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class UnitObservation:
    """One unit on this rank. Counts are in elements, without padding.

    Attributes:
        name: ``model.layers.0``, ``model.norm + lm_head``, or empty for the root, without the names of wrappers.
        class_name: the class of the wrapped module, joined like the name.
        param_dtype: dtype of the gathered parameters, in which the unit computes; empty if it owns none.
        reduce_dtype: dtype of gradient reduction; empty if no parameter is trained.
        master_dtype: dtype in which the shards are kept and updated.
        reshard_after_forward: whether gathered parameters are freed between forward and backward; neither version
            frees the root's.
        live: the torch objects of the unit; not part of the report.
    """

    name: str
    class_name: str
    num_params: int
    num_local_params: int
    num_frozen: int
    param_dtype: str
    reduce_dtype: str
    master_dtype: str
    reshard_after_forward: bool
    offloaded: bool
    checkpointed: bool
    version: Literal[1, 2]
    is_root: bool
    live: LiveUnit = field(repr=False, compare=False)

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(self.name.split(" + "))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": self.class_name,
            "num_params": self.num_params,
            "num_local_params": self.num_local_params,
            "num_frozen": self.num_frozen,
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "master_dtype": self.master_dtype,
            "reshard_after_forward": self.reshard_after_forward,
            "offloaded": self.offloaded,
            "checkpointed": self.checkpointed,
        }


def observe_units(model: nn.Module) -> tuple[UnitObservation, ...]:
    """Return every FSDP unit in the order of the module tree; the root, which owns the remaining parameters, is last.

    Works before and after the first forward, in which both versions complete their initialization. No collectives.
    """
    names = {id(module): canonical_name(name) for name, module in model.named_modules()}
    checkpointed = _checkpointed_names(model)
    units = [_observe_unit(unit, names, checkpointed) for unit in live_units(model)]
    return tuple(sorted(units, key=lambda unit: unit.is_root))


def live_units(model: nn.Module) -> Iterator[LiveUnit]:
    """Yield every FSDP1 and FSDP2 unit in the order of the module tree, parents first, with or without parameters."""
    seen: set[int] = set()
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDP):
            unit_modules: tuple[nn.Module, ...] = (module,)
            units = [fsdp1.read_unit(module, is_root=id(module) not in inside)]
        elif isinstance(module, FSDPModule):
            state = fsdp2.state_of(module)
            if id(state) in seen:
                continue
            seen.add(id(state))
            unit_modules = fsdp2.modules_of(state)
            units = list(fsdp2.read_units(state, is_root=all(id(m) not in inside for m in unit_modules)))
        else:
            continue
        inside.update(id(inner) for outer in unit_modules for inner in outer.modules())
        yield from units


def _observe_unit(live: LiveUnit, names: dict[int, str], checkpointed: set[str]) -> UnitObservation:
    order = {name: position for position, name in enumerate(names.values())}
    # torch keeps the modules of a group in the order given; the order of the module tree never changes.
    modules = sorted(live.modules, key=lambda module: order[names[id(module)]])
    module_names = [names[id(module)] for module in modules]
    inner = [unwrapped(module) for module in modules]
    return UnitObservation(
        name=" + ".join(module_names),
        class_name=" + ".join(plain_class_name(module) for module in inner),
        num_params=live.num_params,
        num_local_params=live.num_local_params,
        num_frozen=live.num_frozen,
        param_dtype=dtype_name(live.compute_dtype),
        reduce_dtype=dtype_name(live.reduce_dtype),
        master_dtype="+".join(dtype_name(dtype) for dtype in live.master_dtypes),
        reshard_after_forward=live.reshards,
        offloaded=live.offloaded,
        checkpointed=all(name in checkpointed for name in module_names),
        version=live.version,
        is_root=live.is_root,
        live=live,
    )


def _checkpointed_names(model: nn.Module) -> set[str]:
    """Return the names of modules whose activations are recomputed, through torch's wrapper or by Transformers."""
    return {
        canonical_name(name)
        for name, module in model.named_modules()
        if isinstance(module, CheckpointWrapper) or checkpoints_natively(module)
    }


def checkpoints_natively(module: nn.Module) -> bool:
    """Return whether Transformers' own gradient checkpointing is enabled on this module."""
    attributes = vars(module)
    return attributes.get("gradient_checkpointing") is True and "_gradient_checkpointing_func" in attributes


def plain_class_name(module: nn.Module) -> str:
    """Return the name of the module's own class; ``fully_shard`` replaces it by a subclass ``FSDP<Name>``."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and len(cls.__mro__) > 2 and cls.__name__ == f"FSDP{cls.__mro__[2].__name__}":
        return cls.__mro__[2].__name__
    return cls.__name__


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return ``fp32``, ``bf16`` or ``fp16``; torch's name for other dtypes; the empty string for ``None``."""
    if dtype is None:
        return ""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
