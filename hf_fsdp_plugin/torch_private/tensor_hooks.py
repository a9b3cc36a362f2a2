"""Private attributes of ``torch.Tensor`` that contain the hooks of a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_fsdp_plugin.contracts import contracts_of, guard

_USE = "hooks of a script on parameters"
CONTRACTS = contracts_of("torch:Tensor", "off", _USE, "_backward_hooks", "_post_accumulate_grad_hooks")
_NO_HOOKS: Mapping[int, Any] = {}


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the hooks of ``register_hook`` by their numbers. A removed hook leaves the mapping."""
    hooks: Mapping[int, Any] | None = tensor._backward_hooks
    return _NO_HOOKS if hooks is None else hooks


def runs_after_accumulation(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has hooks of ``register_post_accumulate_grad_hook``."""
    return bool(tensor._post_accumulate_grad_hooks)


guard(globals(), CONTRACTS, off={"gradient_hooks": _NO_HOOKS, "runs_after_accumulation": False})
