"""The state dicts of a sharded model are whole, and whole tensors can be loaded into it.

FSDP1: the state dict of a wrapper is complete. That of the module in the root's wrapper, which ``unwrap_model``
returns, or of a module inside, would contain flat shards and empty tensors for the parameters of the units around it.
It is a part of the root's state dict instead, which all ranks have to request. A state dict is loaded by the root.

FSDP2: a state dict contains ``DTensor`` objects, as ``torch.distributed.checkpoint`` needs them, without communication.
Each rank loads its shards of whole tensors, which all ranks pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.ranks.agreement import collective_call
from hf_fsdp_plugin.backends.sharding.script_access import free_gathered
from hf_fsdp_plugin.backends.torch_types import shard_like
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import below, canonical_name, unwrapped
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.modules import parameters

STATE_FIX: Final = (
    "Call `state = accelerator.get_state_dict(model)` on all ranks, before `if accelerator.is_main_process:`; then "
    "save `state` on the main process."
)


def support_state_dicts(plan: FsdpPlan, root: nn.Module) -> None:
    """Let the modules of a sharded model return and load whole weights."""
    if plan.backend == "fsdp2":
        for module in root.modules():
            if parameters(module):
                module.register_load_state_dict_pre_hook(partial(_load_shards, root))
        return
    is_sharded = STRATEGIES[plan.strategy].is_sharded
    for name, module in root.named_modules():
        place = "" if module is root else canonical_name(name)
        if not plan.pre_sharded:
            whole = partial(_whole_state_dict, root, is_sharded, f"{place}." if place else "")
            module.state_dict = MethodType(whole, module)
        if module is not root and not place:
            module.load_state_dict = root.load_state_dict


def _whole_state_dict(
    root: nn.Module, is_sharded: bool, place: str, module: nn.Module, *args: Any, **kwargs: Any
) -> Mapping[str, Any]:
    """Return the state dict of a module under FSDP1 as a part of the root's. Collective if the module is sharded.

    Args:
        place: the prefix of the module's names in the root.
    """
    original: Any = type(module).state_dict
    # torch calls state_dict of the modules inside with a destination, which old scripts pass by position.
    if args or kwargs.get("destination") is not None:
        return original(module, *args, **kwargs)
    if not is_sharded:
        for unit in FSDP.fsdp_modules(root):
            fsdp1.register_parameters(unit)
    call = f"state_dict of {type(unwrapped(module)).__name__}"
    with collective_call(call, fix=STATE_FIX) if is_sharded else nullcontext():
        if module is root:
            return original(module, **kwargs)
        state = type(root).state_dict(root, **{**kwargs, "prefix": ""})
    return OrderedDict((kwargs.get("prefix", "") + name, value) for name, value in below(state, place).items())


def _load_shards(root: nn.Module, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors by this rank's shards of them before a module under FSDP2 loads them. No communication."""
    if not all(isinstance(parameter, DTensor) for parameter in parameters(module).values() if parameter is not None):
        free_gathered(root)
    for name, shard in parameters(module).items():
        value = state_dict.get(prefix + name)
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if isinstance(shard, DTensor) and is_whole and value.shape == shard.shape:  # torch reports other shapes
            state_dict[prefix + name] = shard_like(shard, value.detach())
