"""Shards FSDP2 parameters without a whole copy of any of them: each rank takes its own shard from the whole weights.

While a unit is sharded, meta tensors stand for its parameters, so that ``fully_shard`` moves nothing to the device.
Then this rank's part of each whole weight, mostly of a mapped file, is copied to the device and cast to the dtype in
which the optimizer updates it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.load import BroadcastRecord, master_dtype, sum_bits
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.fsdp2 import own_shards
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

_PART = 1 << 18
"""Elements of a copy on the CPU: what is copied is still in the processor's cache when its bits are added."""


class ShardsOnRead:
    """The parameters of one model that are sharded in this way.

    Args:
        from_files: ids of the parameters that all ranks have mapped from equal files; ``None`` if the plan broadcasts
            nothing, so that every rank takes its shards from its own weights.
        device: where the shards are.
    """

    def __init__(
        self, plan: FsdpPlan, model: nn.Module, from_files: frozenset[int] | None, device: torch.device
    ) -> None:
        self._plan = plan
        self._is_recorded = from_files is not None
        self._device = device
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            registered = own_parameters(module)
            for attribute, parameter in registered.items():
                if parameter is not None and self._is_eligible(parameter, from_files):
                    self._places.setdefault(id(parameter), []).append((registered, attribute))
        self._whole: list[tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]] = []

    @staticmethod
    def _is_eligible(parameter: nn.Parameter, from_files: frozenset[int] | None) -> bool:
        if from_files is not None and id(parameter) not in from_files:
            return False
        is_plain = type(parameter.data) is torch.Tensor and parameter.device.type == "cpu"
        return is_plain and parameter.is_contiguous() and parameter.dim() > 0

    @property
    def parameters(self) -> Collection[int]:
        """The ids of the parameters that are not sharded yet."""
        return self._places.keys()

    def detach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace parameters of the unit that is sharded next by meta tensors. Ties are kept."""
        for parameter in parameters:
            places = self._places.pop(id(parameter))
            empty = torch.empty_like(parameter, dtype=master_dtype(self._plan, parameter), device="meta")
            stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            for registered, attribute in places:
                registered[attribute] = stand_in
            self._whole.append((parameter, places))

    @torch.no_grad()
    def attach(self, state: Any, record: BroadcastRecord) -> None:
        """Give the unit its shards. ``state`` is the state of the ``fully_shard`` call."""
        device = torch.device("cpu") if self._plan.offload_params else self._device
        for parameter, places in self._whole:
            registered, attribute = places[0]
            sharded: DTensor = registered[attribute]
            shard = _shard(parameter.detach(), sharded)
            local = torch.empty(shard.shape, dtype=sharded.dtype, device=device)
            copied = _copy(local, shard)
            if self._is_recorded:
                record.add_shard(sum_bits(copied))
            else:
                deque(copied, maxlen=0)  # runs the copy
            whole = DTensor.from_local(
                local,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            for registered, attribute in places:
                registered[attribute] = new
        if self._whole:
            own_shards(state)
        self._whole = []


def _shard(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, which ``fully_shard`` splits as ``torch.chunk`` does."""
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]
            chunks = torch.chunk(whole, sharded.device_mesh.size(axis), dim)
            rank = sharded.device_mesh.get_local_rank(axis)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def _copy(into: torch.Tensor, source: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copy a shard, and yield each part after it is copied."""
    if into.device.type != "cpu" or not source.is_contiguous():
        yield into.copy_(source)
        return
    flat, flat_source = into.view(-1), source.view(-1)
    for start in range(0, flat.numel(), _PART):
        yield flat[start : start + _PART].copy_(flat_source[start : start + _PART])
