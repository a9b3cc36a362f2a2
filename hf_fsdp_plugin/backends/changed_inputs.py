"""Entries that a model adds to a dict of its inputs reach the caller's dict.

FSDP copies the containers of its inputs when it moves or casts tensors. Models and losses of sentence-transformers
exchange values through the dict of features, which each module extends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.plan.names import unwrapped


def return_changed_inputs(model: nn.Module) -> None:
    """Apply what the forward of a sharded model changes in dicts of its inputs to the dicts of the caller.

    Must be called after all other hooks are registered.
    """
    changes, inner = _Changes(), unwrapped(model)
    model.register_forward_pre_hook(changes.called, prepend=True, with_kwargs=True)
    if inner is not model:  # FSDP1; this module may also be called itself
        inner.register_forward_pre_hook(changes.called_inside, prepend=True, with_kwargs=True)
    inner.register_forward_pre_hook(changes.entered, with_kwargs=True)
    inner.register_forward_hook(changes.left, always_call=True)


class _Changes:
    """The dicts of one forward: those of the caller, those of the model, and what these contained before."""

    def __init__(self) -> None:
        self._given: list[dict[Any, Any]] = []
        self._seen: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._given = _dicts(args, kwargs)

    def called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._given:
            self.called(module, args, kwargs)

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen = [(seen, dict(seen)) for seen in _dicts(args, kwargs)] if self._given else []

    def left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given, self._given = self._given, []
        seen, self._seen = self._seen, []
        for caller, (changed, before) in zip(given, seen, strict=False):
            if caller is changed:
                continue
            for key in before.keys() - changed.keys():
                caller.pop(key, None)
            for key, value in changed.items():
                if key not in before or before[key] is not value:
                    caller[key] = value  # outputs of Transformers are dicts that have no update


def _dicts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[Any, Any]]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, dict)]
