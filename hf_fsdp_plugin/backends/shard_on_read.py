"""Shards FSDP2 parameters without a whole copy of any of them: each rank takes its own part from the whole weights.

While a unit is sharded, meta tensors stand for its parameters, so that ``fully_shard`` moves nothing to the device.
Then this rank's part of each whole weight, mostly of a mapped file, is copied to the device and cast to the dtype in
which the optimizer updates it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.load import WeightLoader, master_dtype
from hf_fsdp_plugin.backends.torch_types import dtensor_like
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.fsdp2 import own_shards
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

_Places = list[tuple[dict[str, Any], str]]
"""Where a parameter is registered: dicts attribute -> parameter of modules, and the attributes in them."""


class ShardsOnRead:
    """The parameters of one model that are sharded in this way.

    Args:
        device: where the shards are computed on. Offloaded shards stay in host memory.
    """

    def __init__(self, plan: FsdpPlan, model: nn.Module, loader: WeightLoader, device: torch.device) -> None:
        self._plan = plan
        self._loader = loader
        self._device = torch.device("cpu") if plan.offload_params else device
        self._places: dict[int, _Places] = {}
        self._whole: list[tuple[nn.Parameter, _Places]] = []
        for module in model.modules():
            registered = own_parameters(module)
            for attribute, parameter in registered.items():
                if parameter is not None and parameter.dim() > 0 and loader.can_read_parts(parameter):
                    self._places.setdefault(id(parameter), []).append((registered, attribute))

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
    def attach(self, state: Any) -> None:
        """Give the unit its shards. ``state`` is the state of the ``fully_shard`` call."""
        for parameter, places in self._whole:
            registered, attribute = places[0]
            sharded: DTensor = registered[attribute]
            part = _part(parameter.detach(), sharded)
            local = self._loader.shard_of(parameter, part, sharded.dtype, self._device)
            new = nn.Parameter(dtensor_like(local, sharded), requires_grad=parameter.requires_grad)
            for registered, attribute in places:
                registered[attribute] = new
        if self._whole:
            own_shards(state)
        self._whole = []


def _part(whole: torch.Tensor, sharded: DTensor) -> torch.Tensor:
    """Return this rank's part of ``whole``, which ``fully_shard`` splits as ``torch.chunk`` does."""
    for axis, placement in enumerate(sharded.placements):
        if placement.is_shard():
            dim: int = placement.dim  # type: ignore[attr-defined]
            chunks = torch.chunk(whole, sharded.device_mesh.size(axis), dim)
            rank = sharded.device_mesh.get_local_rank(axis)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
    return whole
