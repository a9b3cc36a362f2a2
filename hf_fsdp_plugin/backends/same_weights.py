"""Check that the ranks prepare models with the same weights, if none are broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.agreement import gather_objects
from hf_fsdp_plugin.backends.bits import hash_bits
from hf_fsdp_plugin.backends.file_weights import find_file_weights
from hf_fsdp_plugin.backends.memory_maps import MemoryMaps
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural


def check_same_weights(plan: FsdpPlan, model: nn.Module, device: torch.device) -> Problem | None:
    """Return a warning if the parameters of the model that is to be sharded differ between ranks. Collective.

    Every parameter is read once, except those that all ranks have mapped from equal files. Two numbers are reduced over
    all ranks; names are exchanged only if these differ.
    """
    if plan.pre_sharded or plan.ram_efficient or plan.sync_module_states or plan.world_size == 1:
        return None
    hashes = dict(_hashes(model, find_file_weights(model, device, MemoryMaps.read(private_bytes=True))))
    total = 0
    for bits in hashes.values():
        # Rotate before each XOR: otherwise two equal tensors would leave the checksum unchanged.
        total = (total << 1 ^ total >> 62 ^ bits) & (1 << 63) - 1
    extremes = torch.tensor([total, -total], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negated = extremes.tolist()
    if largest == -negated:
        return None
    of_ranks = gather_objects(hashes)
    differing = [name for name, bits in of_ranks[0].items() if any(other.get(name) != bits for other in of_ranks)]
    replicas = " The replicas will stay different." if plan.mesh.replicate > 1 else ""
    return Problem(
        code="FSDP-W325",
        setting="loading.sync_module_states",
        message=f"the ranks have different weights in {plural(len(differing), 'parameter')} of {plan.model_class}: "
        f"{format_names(differing, 2)}. The sharded model gets a part of each rank's weights.{replicas}",
        fix="Set fsdp_sync_module_states: true to use rank 0's weights, or set the same seed on all ranks before the "
        "model is created.",
    )


def _hashes(model: nn.Module, from_files: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield the names of the other parameters and a hash of their bits, with one transfer for each device."""
    found: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if id(parameter) in from_files:
            continue
        if type(tensor) is torch.Tensor and tensor.numel() and not tensor.is_meta:
            found.setdefault(tensor.device, {})[canonical_name(name)] = hash_bits(tensor)
    for hashes in found.values():
        yield from zip(hashes, torch.stack(list(hashes.values())).tolist(), strict=True)
