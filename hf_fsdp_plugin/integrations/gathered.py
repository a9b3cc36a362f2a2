"""Whole state of sharded models, from which their ``state_dict`` and ``save_pretrained`` answer for a while.

A library's own saving code, such as ``SentenceTransformer.save``, runs on rank 0 and asks the modules of the model for
their weights. All ranks gather the model first, and then rank 0 runs that code in :meth:`GatheredModels.answering`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.shard import Place, place_of
from hf_fsdp_plugin.checkpoint import ModelShards, gathered_state, model_shards, shards_below


class GatheredModels:
    """The gathered states that are in use.

    Attributes:
        paused: whether ``save_pretrained`` is not replaced, for calls of this package that write no weights.
    """

    def __init__(self) -> None:
        self._states: list[tuple[nn.Module, Mapping[str, torch.Tensor]]] = []
        self.paused = False

    @contextmanager
    def answering(self, root: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Answer from ``state``, the whole tensors of the sharded model ``root`` by canonical names.

        A forward of the model raises ``RuntimeError`` in the block, because only this rank is in it. For example, a
        SentenceTransformer computes examples for its model card, and continues without them.
        """
        self._states.append((root, state))
        hooks = [module.register_forward_pre_hook(_refuse_forward, prepend=True) for module in root.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._states.pop()

    @contextmanager
    def on_rank_0(self, place: Place) -> Iterator[bool]:
        """Gather the module at ``place``, and answer from its state on rank 0. Collective.

        Returns:
            Whether this is rank 0.
        """
        state = state_at(place)
        if dist.get_rank() != 0:
            yield False
            return
        with self.answering(place.root, {place.prefix + name: tensor for name, tensor in state.items()}):
            yield True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Call the original ``save_pretrained`` in the block."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def state_of(self, module: nn.Module) -> OrderedDict[str, torch.Tensor] | None:
        """Return the gathered state of a module by its own names; ``None`` if its model is not being answered."""
        place = place_of(module) if self._states else None
        if place is None:
            return None
        for root, state in reversed(self._states):
            if root is place.root:
                return part_of(state, place)
        return None


gathered = GatheredModels()
"""The gathered states of this process."""


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise RuntimeError("a sharded model cannot run on one rank, while this rank writes its files.")


def part_of(state: Mapping[str, Any], place: Place) -> OrderedDict[str, Any]:
    """Return the part of the root's state dict that belongs to the module at ``place``, by the module's names."""
    prefix = place.prefix
    return OrderedDict((name.removeprefix(prefix), value) for name, value in state.items() if name.startswith(prefix))


def shards_at(place: Place) -> ModelShards:
    """Return this rank's shards of the module at ``place``, by the module's names."""
    return shards_below(model_shards(place.root), place.prefix)


def state_at(place: Place) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the module at ``place`` on the CPU of rank 0; empty on other ranks. Collective."""
    return gathered_state(shards_at(place))
