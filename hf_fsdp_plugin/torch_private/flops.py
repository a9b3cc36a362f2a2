"""Counts the FLOPs of one forward, by the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_flop

from hf_fsdp_plugin.contracts import contracts_in, guard_functions
from hf_fsdp_plugin.torch_private.functions import TorchDispatchMode
from hf_fsdp_plugin.torch_private.modules import calls_compiled

CONTRACTS = contracts_in(__file__)


class FlopCount(TorchDispatchMode):
    """The FLOPs of matrix products, convolutions and attention in the block.

    ``FlopCounterMode`` of torch raises for shapes that its formulas do not know. This class counts nothing for them,
    because the block is a step of a training.

    Attributes:
        total: FLOPs so far. Of tensors that ranks divide (``DTensor``), those of all of these ranks.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with suppress(Exception):
            operator = func._overloadpacket
            if operator in flop_registry:
                self.total += flop_registry[operator](*args, **kwargs, out_val=out)
            elif operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch has no formula for it
                self.total += sdpa_flop(*(each.shape for each in args[:3]))
        return out


def can_count(model: nn.Module) -> bool:
    """Whether nothing is compiled: torch would never compile code that runs first while FLOPs are counted."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return not (dynamo and dynamo.counters["frames"]) and not any(map(calls_compiled, model.modules()))


guard_functions(globals(), CONTRACTS, off={"can_count": False})
