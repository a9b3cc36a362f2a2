"""Norms, extremes and histograms of whole weights and gradients, from the parts that the ranks have.

Nothing is gathered: three small reductions are enough for all parameters together. Replicas are counted once, and
padding is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import collective_call, on_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import check_idle, check_not_sharded, locate_module
from hf_fsdp_plugin.checkpoint.saved_state import ModelShards, parameter_shards
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.functions import supports_cpu
from hf_fsdp_plugin.torch_private.modules import local_tensor

_PART = 1 << 22
"""Number of elements that are read at a time. Two copies of them in double precision have 64 MiB."""
_Parts = Mapping[str, Sequence[torch.Tensor]]
"""Name of a parameter or a unit -> this rank's part of it; the same names on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorStatistics:
    """Statistics of a whole tensor, or of all tensors of a unit.

    Attributes:
        norm, mean: over all elements. The norm is the 2-norm.
        minimum, maximum: of the finite elements; infinite if there is none.
        num_nonfinite: number of elements that are infinite or not a number.
        counts: number of finite elements in each bin. The bins have equal widths.
    """

    num_elements: int
    num_nonfinite: int
    norm: float
    mean: float
    minimum: float
    maximum: float
    counts: tuple[int, ...] = ()

    @property
    def edges(self) -> list[float]:
        """The edges of the bins: one more than there are bins."""
        low, high = _bounds(self.minimum, self.maximum)
        return [low + (high - low) * number / len(self.counts) for number in range(len(self.counts) + 1)]


def weight_statistics(
    model: nn.Module, *, gradients: bool = False, bins: int = 64, by_unit: bool = False
) -> dict[str, TensorStatistics]:
    """Return statistics of the whole parameters of a model, or of their gradients. Collective.

    The results are the same on all ranks, and those of one process: counts and extremes exactly, sums up to the
    rounding of double precision. Gradients are there between a backward and the optimizer's step: in
    ``on_pre_optimizer_step`` of a callback, or before ``optimizer.step()``.

    Args:
        model: a model that ``accelerator.prepare`` or the Trainer has prepared, or one that is not sharded.
        gradients: of the gradients. Parameters without a gradient on any rank are left out.
        bins: number of bins of each histogram; 0 for none.
        by_unit: one entry for each FSDP unit instead of one for each parameter.

    Returns:
        Name of a parameter, or of a unit -> its statistics. A tied parameter occurs once.

    Raises:
        SpecError: the model is in a forward or a backward, or is sharded but not by this package; or some ranks do not
            make the call.
    """
    place = locate_module(model)
    if place is None:
        check_not_sharded(model)
    root, plan = (model, None) if place is None else (place.root, place.plan)
    with collective_call(
        f"weight_statistics of {type(unwrapped(root)).__name__} with {gradients=}, {bins=}, {by_unit=}"
    ):
        check_idle(root, "weight_statistics")
        with on_all_ranks("reading the weights"):
            parts = _parts(root, plan, gradients=gradients, by_unit=by_unit)
            sums, extremes = _sums(parts)
        sums, extremes = _reduced(sums, "sum", plan), _reduced(extremes, "min", plan)
        bounds = {name: _bounds(low, -high) for name, (low, high) in zip(parts, extremes.tolist(), strict=True)}
        counts = _reduced(_counts(parts, bounds, bins), "sum", plan) if bins else torch.zeros(len(parts), 0)
    found = {}
    for name, (num, nonfinite, total, squares), (low, high), row in zip(
        parts, sums.tolist(), extremes.tolist(), counts.long().tolist(), strict=True
    ):
        if num:
            found[name] = TensorStatistics(
                num_elements=int(num), num_nonfinite=int(nonfinite), norm=math.sqrt(squares), mean=total / num,
                minimum=low, maximum=-high, counts=tuple(row),
            )  # fmt: skip
    return found


def _parts(root: nn.Module, plan: FsdpPlan | None, *, gradients: bool, by_unit: bool) -> dict[str, list[torch.Tensor]]:
    """Return this rank's part of each parameter or unit; of replicas, the first one has it, and the others nothing."""
    shards = parameter_shards(root)
    unit_of = (
        {name: unit.name or "(root)" for unit in plan.units for name in unit.parameters} if plan and by_unit else {}
    )
    given = (
        _gradients(root, shards)
        if gradients
        else {each.name: [p.tensor for p in each.pieces] for each in shards.tensors}
    )
    parts: dict[str, list[torch.Tensor]] = {}
    for shard in shards.tensors:
        if shard.dtype.is_floating_point:
            own = given.get(shard.name, []) if plan is None or shard.replica == 0 else []
            parts.setdefault(unit_of.get(shard.name, shard.name), []).extend(own)
    return parts


def _gradients(root: nn.Module, shards: ModelShards) -> dict[str, list[torch.Tensor]]:
    """Return this rank's part of each gradient, without the padding of FSDP1's flat parameters."""
    return {
        shard.name: [piece.tensor for piece in shard.like(shard.name, local_tensor(parameter.grad)).pieces]
        for parameter in root.parameters()
        if parameter.grad is not None
        for shard in shards.by_id.get(id(parameter), ())
    }


def doubles(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the elements in double precision, some at a time: a copy of a whole unit may exceed a device's memory."""
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_PART) if tensor.numel() else ():
            yield part.double()


@torch.no_grad()
def _sums(parts: _Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each name: elements, elements that are not finite, sum, sum of squares; minimum and -maximum."""
    sums = torch.zeros(len(parts), 4, dtype=torch.float64, device="cpu")
    extremes = torch.full((len(parts), 2), math.inf, dtype=torch.float64, device="cpu")
    for row, tensors in enumerate(parts.values()):
        for values in doubles(tensors):
            finite = values[values.isfinite()]
            num, num_lost = values.numel(), values.numel() - finite.numel()
            sums[row] += torch.tensor([num, num_lost, values.sum(), values.square().sum()], dtype=torch.float64)
            if num_lost < num:
                low, high = finite.aminmax()
                extremes[row] = torch.minimum(extremes[row], torch.stack([low, -high]).cpu())
    return sums, extremes


@torch.no_grad()
def _counts(parts: _Parts, bounds: Mapping[str, tuple[float, float]], bins: int) -> torch.Tensor:
    counts = torch.zeros(len(parts), bins, dtype=torch.float64, device="cpu")
    for row, (name, tensors) in enumerate(parts.items()):
        for values in doubles(tensors):
            low, high = bounds[name]
            counts[row] += torch.histc(values[values.isfinite()], bins, low, high).cpu()
    return counts


def _bounds(low: float, high: float) -> tuple[float, float]:
    """Return the first and the last edge of a histogram. Equal elements are in its middle, as in that of numpy."""
    return (low, high) if low < high else (low - 0.5, high + 0.5) if low == high else (0.0, 1.0)


def _reduced(own: torch.Tensor, operation: str, plan: FsdpPlan | None) -> torch.Tensor:
    """Return the sum or the minimum over all ranks, in host memory. Collective, for a sharded model."""
    group = dist.group.WORLD
    if group is None or plan is None:
        return own
    sent = own if supports_cpu(group) else own.to(plan.device_type)
    dist.all_reduce(sent, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MIN, group=group)
    return sent.cpu()
