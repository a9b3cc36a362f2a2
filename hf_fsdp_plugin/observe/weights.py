"""Compares weights across the ranks, where they must be equal, and over the steps, which must change them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.equal_weights import ParameterMemory, hash_bits, read_together
from hf_fsdp_plugin.backends.loading.weight_loader import BROADCAST_ATTRIBUTE, BroadcastRecord
from hf_fsdp_plugin.backends.ranks.agreement import gather_objects, on_all_ranks
from hf_fsdp_plugin.observe.units import UnitObservation, unmanaged_parameters
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.modules import buffers, non_persistent_buffers

_TOLERANCE = 1e-6
_PART = 1 << 22
"""Number of elements that are added at a time. Two copies of them in double precision have 64 MiB."""
_Checksum = list[float]
"""The sum of the elements, and the sum of their magnitudes."""
_Key = tuple[str, str, int]
"""Kind of a tensor (unit, parameter or buffer), its name, and the number of its shard."""

ShardHashes = dict[tuple[int, int], torch.Tensor | None]
"""Number of the unit and of the parameter in it -> hash of this rank's part; ``None`` if the rank has no part of it."""


@dataclass(frozen=True, kw_only=True)
class WeightComparison:
    """The result over all ranks.

    Attributes:
        num_on_meta: number of tensors on the meta device, which are not loaded; maximum over the ranks.
        differing: names of the units, parameters and buffers that differ between ranks but must be equal.
        diverged: names of the units among them whose replicas differ.
        replicated: whether any shard is on more than one rank, so that replicas were compared.
        num_broadcast: number of tensors that all ranks received from rank 0 before sharding, bit-identical; ``None`` if
            no rank recorded a broadcast.
        changed: whether the weights were changed between the broadcast and the first forward; ``None`` if unknown.
        num_filled: number of these tensors that a rank had not loaded; maximum over the ranks.
        num_from_files: number of parameters that all ranks had mapped from equal files, which were not broadcast.
        before: which memory the parameters were in before the broadcast, on the rank with the most private memory.
        num_shared_ranks: number of ranks on which a parameter was mapped, shared or not loaded.
    """

    num_on_meta: int
    differing: tuple[str, ...]
    replicated: bool
    diverged: tuple[str, ...] = ()
    num_broadcast: int | None = None
    changed: bool | None = None
    num_filled: int = 0
    num_from_files: int = 0
    before: ParameterMemory | None = None
    num_shared_ranks: int = 0


def compare_weights(
    model: nn.Module, units: Sequence[UnitObservation], first_bit_sum: torch.Tensor | None = None
) -> WeightComparison:
    """Compare checksums of replicas, unsharded parameters and non-persistent buffers across ranks. Collective.

    Buffers in the state dict are not compared, because running statistics may differ between ranks.

    Args:
        first_bit_sum: the sum of the bits of this rank's shards at the first forward.
    """
    record: BroadcastRecord | None = model.__dict__.get(BROADCAST_ATTRIBUTE)
    with on_all_ranks("computing checksums of the weights"):
        own = _checksums(model, units)
        bit_sum = None if first_bit_sum is None else int(first_bit_sum)
        received_here = None if record is None else record.read()
    gathered = gather_objects((own, received_here, bit_sum))
    broadcasts: list[Any] = [broadcast for _, broadcast, _ in gathered]
    if None in broadcasts:
        broadcasts = []
    found: dict[_Key, list[_Checksum | None]] = {}
    for checksums, _, _ in gathered:
        for key, checksum in checksums.items():
            found.setdefault(key, []).append(checksum)
    differing = {key[:2] for key, (first, *others) in found.items() if not all(_close(first, each) for each in others)}
    memories = [broadcast.before for broadcast in broadcasts if broadcast.before is not None]
    received = {(broadcast.num_tensors, broadcast.checksum) for broadcast in broadcasts}
    if len(received) > 1:
        differing.add(("weights", "received from rank 0"))
    changed = None
    found_sums = [bit_sum for _, _, bit_sum in gathered if bit_sum is not None]
    taken = [broadcast.shard_bit_sum for broadcast in broadcasts if broadcast.shard_bit_sum is not None]
    if taken and len(taken) == len(broadcasts) == len(found_sums) and broadcasts[0].bit_sum is not None:
        # The sum over the shards of all ranks, and the sum of what was broadcast or taken from files.
        replicas = max((unit.live.known("replicate_size", 1) for unit in units), default=1)
        changed = (sum(found_sums) - sum(taken) - replicas * broadcasts[0].bit_sum) % (1 << 64) != 0
    return WeightComparison(
        num_on_meta=max(list(checksums.values()).count(None) for checksums, _, _ in gathered),
        differing=tuple(sorted(map(" ".join, differing))),
        diverged=tuple(sorted(name for kind, name in differing if kind == "unit")),
        replicated=any(kind == "unit" and len(sums) > 1 for (kind, _, _), sums in found.items()),
        num_broadcast=min((broadcast.num_tensors for broadcast in broadcasts), default=None),
        changed=changed,
        num_filled=max((broadcast.num_filled for broadcast in broadcasts), default=0),
        num_from_files=min((broadcast.num_from_files for broadcast in broadcasts), default=0),
        before=max(memories, key=lambda memory: memory.private_bytes, default=None),
        num_shared_ranks=sum(memory.num_not_private > 0 for memory in memories),
    )


def _checksums(model: nn.Module, units: Sequence[UnitObservation]) -> dict[_Key, _Checksum | None]:
    found: dict[_Key, torch.Tensor | None] = {}
    for unit in units:
        if unit.live.shards:
            found["unit", unit.name or "root", unit.live.shard_rank] = _checksum(unit.live.shards)
    unmanaged = {id(parameter) for parameter in unmanaged_parameters(model, units)}
    for name, parameter in model.named_parameters():
        if id(parameter) in unmanaged:
            found["parameter", canonical_name(name), 0] = _checksum([parameter])
    for name, module in model.named_modules():
        for attribute in sorted(non_persistent_buffers(module)):
            if (buffer := buffers(module).get(attribute)) is not None:
                found["buffer", canonical_name(f"{name}.{attribute}".lstrip(".")), 0] = _checksum([buffer])
    sums = {key: checksum for key, checksum in found.items() if checksum is not None}
    return {**dict.fromkeys(found), **read_together(sums)}


@torch.no_grad()
def _checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum and the sum of magnitudes in double precision, on the tensors' device; ``None`` on meta."""
    if any(tensor.is_meta for tensor in tensors):
        return None
    total = torch.zeros(2, dtype=torch.float64, device=next((each.device for each in tensors), None))
    for tensor in tensors:
        # In parts, because a copy of a whole unit in double precision may exceed the memory of the device.
        for part in tensor.reshape(-1).split(_PART) if tensor.numel() else ():
            doubles = part.double()
            total += torch.stack([doubles.sum(), doubles.abs().sum()])
    return total


def _close(one: _Checksum | None, other: _Checksum | None) -> bool:
    if one is None or other is None:
        return one is other
    scale = max(one[1], other[1], 1e-30)
    return all(abs(a - b) <= _TOLERANCE * scale for a, b in zip(one, other, strict=True))


def unchanged_parameters(
    before: ShardHashes | None, later: Sequence[ShardHashes], units: Sequence[UnitObservation]
) -> frozenset[tuple[int, int]] | None:
    """Return the trained parameters whose part on this rank is as before the first step; ``None`` if this is unknown.

    The weights after the examined steps and those at the end of the run are compared. A parameter without a part on
    this rank counts as unchanged. The keys are those of ``ShardHashes``.

    Args:
        before, later: hashes before the first step, and after the steps that are examined.
    """
    if not before:
        return None
    unchanged = frozenset(before)
    parts = {key: value for key, value in before.items() if value is not None}
    for hashes in (*later, hash_parts(units, only=before)):
        pairs = {key: (first, second) for key, first in parts.items() if (second := hashes.get(key)) is not None}
        one = read_together({key: first for key, (first, _) in pairs.items()})
        other = read_together({key: second for key, (_, second) in pairs.items()})
        unchanged -= {key for key in parts if key not in pairs or one[key] != other[key]}
    return unchanged


def hash_parts(units: Iterable[UnitObservation], only: Collection[tuple[int, int]] | None = None) -> ShardHashes:
    """Return hashes of the bits of this rank's part of each trained parameter, on the parameters' devices.

    Args:
        only: hash the parameters with these keys instead of the trained ones.
    """
    return {
        (number, index): hash_bits(part) if part.numel() else None
        for number, unit in enumerate(units)
        for index, (part, (_, _, trained)) in enumerate(zip(unit.live.parts, unit.live.places, strict=False))
        if (trained if only is None else (number, index) in only)
        and type(part.detach()) is torch.Tensor
        and not part.is_meta
    }
