"""Replacements of ``state_dict`` and ``load_state_dict`` of torch's modules, for modules of sharded models.

Under FSDP2 a state dict contains ``DTensor`` objects, as ``torch.distributed.checkpoint`` needs them. Loading also
accepts whole tensors. Under FSDP1 the state dict of a wrapper is complete. That of the module in the root's wrapper,
which ``unwrap_model`` returns, or of a submodule, would contain flat shards and empty tensors for the parameters of the
units around it; it is a part of the root's state dict instead.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.arrivals import together
from hf_fsdp_plugin.backends.fsdp2 import reshard, shard_like
from hf_fsdp_plugin.backends.shard import Place, place_of
from hf_fsdp_plugin.integrations.gathered import gathered, part_of
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.modules import is_fsdp_managed

FIX = (
    "Call `state = accelerator.get_state_dict(model)` on all ranks, before `if accelerator.is_main_process:`; then "
    "save `state` on the main process."
)


def state_dict(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return a complete state dict, if the module belongs to a sharded model. Collective under FSDP1."""
    if args or kwargs.get("destination") is not None or not is_fsdp_managed(module):  # an inner call has a destination
        return original(*args, **kwargs)
    prefix = kwargs.get("prefix", "")
    answer = gathered.state_of(module)
    if answer is not None:
        return OrderedDict((prefix + name, tensor) for name, tensor in answer.items())
    place = place_of(module)
    if place is None or place.plan.backend != "fsdp1" or place.plan.pre_sharded:
        return original(**kwargs)
    if not STRATEGIES[place.plan.strategy].is_sharded:
        for unit in place.root.modules():
            if isinstance(unit, FSDP):
                fsdp1.register_parameters(unit)
        return _fsdp1_state_dict(original, module, place, kwargs)
    with together(f"state_dict of {type(module).__name__}", fix=FIX):
        return _fsdp1_state_dict(original, module, place, kwargs)


def _fsdp1_state_dict(original: Callable[..., Any], module: nn.Module, place: Place, kwargs: dict[str, Any]) -> Any:
    if module is place.root:
        return original(**kwargs)
    prefix = kwargs.pop("prefix", "")
    state = part_of(place.root.state_dict(**kwargs), place)
    return OrderedDict((prefix + name, tensor) for name, tensor in state.items())


def load_state_dict(
    original: Callable[..., Any], module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Load through FSDP1's root if ``module`` is the module in it: its own parameters are flat shards.

    Under FSDP2, each rank loads its shards of whole tensors, which all ranks pass.
    """
    place = place_of(module) if is_fsdp_managed(module) else None
    if place is not None and place.plan.backend == "fsdp2":
        reshard(place.root)
        state_dict = _as_shards(module, state_dict)
    if place is None or place.plan.backend != "fsdp1" or place.name or module is place.root:
        return original(state_dict, *args, **kwargs)
    return place.root.load_state_dict(state_dict, *args, **kwargs)


def _as_shards(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict with shards instead of whole tensors. No communication."""
    own, given = module.state_dict(), copy.copy(state_dict)  # a copy, because torch keeps versions as an attribute
    for name, value in state_dict.items():
        shard, is_whole = own.get(name), isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if isinstance(shard, DTensor) and is_whole and value.shape == shard.shape:  # torch reports other shapes
            given[name] = shard_like(shard, value.detach())  # type: ignore[index]
    return given


def has_shards(model: nn.Module) -> bool:
    """Return whether a module has parameters that FSDP shards, by a plan or not."""
    return any(isinstance(module, FSDP) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
