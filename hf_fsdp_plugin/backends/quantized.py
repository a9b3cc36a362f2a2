"""4-bit weights of bitsandbytes: the part of a quantized weight that FSDP does not shard.

``Linear4bit`` stores packed bytes in a parameter, which FSDP shards, and scales and codes in a ``QuantState``, of which
each rank keeps a whole one (about 1/8 of the size of the packed bytes, less with double quantization).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.agreement import same_on_all_ranks
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.modules import parameters

_PACKS_ON_CPU = "support_avx512bf16_for_cpu"
"""Attribute of ``Linear4bit``: whether an evaluation on a CPU repacks the weight in place."""


def prepare_quantized(plan: FsdpPlan, model: nn.Module, device: torch.device) -> None:
    """Move the quantization states to ``device``, and overwrite them with rank 0's if the plan broadcasts. Collective.

    The packed bytes of a weight are rank 0's, so its scales must be rank 0's, too.
    """
    modules = {canonical_name(name): module for name, module in model.named_modules() if _is_quantized(module)}
    if not modules:
        return
    states: dict[str, Any] = {name: module.weight.quant_state for name, module in modules.items()}
    present = [name for name, state in states.items() if state is not None]
    same_on_all_ranks("the list of quantized weights", ",".join(present))
    in_flat = plan.backend == "fsdp1" and not plan.use_orig
    for name, module in modules.items():
        if in_flat and f"{name}.weight" not in plan.ignored_parameters:
            module.register_forward_hook(_unregister_view)
        if hasattr(module, _PACKS_ON_CPU):
            # The repacked weight would be a gathered copy, while the repacked state would remain.
            setattr(module, _PACKS_ON_CPU, False)
        if states[name] is not None:
            states[name].to(device)
            module.quant_state = states[name]  # the shards of the weight have no state
    if plan.ram_efficient or plan.sync_module_states:
        for name in present:
            for tensor in _tensors(states[name]):
                dist.broadcast(tensor, src=0)


def _unregister_view(module: nn.Module, args: Any, output: Any) -> None:
    """Make the weight an attribute again, as FSDP1 sets it: bitsandbytes has registered the view as a parameter.

    Its memory is freed after the forward, and a program that reads the parameters of the model would crash.
    """
    view = parameters(module).pop("weight", None)
    if view is not None:
        vars(module)["weight"] = view


def _is_quantized(module: nn.Module) -> bool:
    return hasattr(getattr(module, "weight", None), "quant_state")


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a ``QuantState``. With double quantization, the scales are quantized by a second state."""
    for tensor in (state.absmax, state.code, state.offset):
        if tensor is not None:
            yield tensor
    if state.state2 is not None:
        yield from _tensors(state.state2)
