"""The private APIs of torchao that this package uses; read from torchao 0.18.

torchao is never imported here: an optimizer of it is recognized by its methods.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_fsdp_plugin.contracts import contracts_of, guard

CONTRACTS = contracts_of("torchao.optim.adam:_AdamBase", "refused", "state of torchao's optimizers", "_new_buffer")


def can_create_state(optimizer: Any) -> bool:
    """Whether ``create_state`` works for the optimizer: it is an 8-bit, 4-bit or fp8 Adam of torchao."""
    return hasattr(optimizer, "_new_buffer") and type(optimizer).__module__.startswith("torchao.")


def create_state(optimizer: Any, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """Return the state tensor ``key`` of a parameter as in the first step: zeros, quantized if the shard is large."""
    state: torch.Tensor = optimizer._new_buffer(parameter, key == "exp_avg")
    return state


guard(globals(), CONTRACTS)
