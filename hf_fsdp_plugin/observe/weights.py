"""Checks of weights and optimizers: across the ranks, where weights must be equal, and over the steps.

Steps must change the weights, and optimizers must have the parameters of the sharded model. Gradients that are never
zeroed add up over all steps. Torch accepts that; here it is an error at the second optimizer step of a run. Nothing of
the gradients is examined after the second step, and nothing waits for the accelerator unless gradients were kept
between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.equal_weights import hash_bits, read_together
from hf_fsdp_plugin.backends.loading.weight_loader import BroadcastRecord
from hf_fsdp_plugin.backends.optimizers.parameters import has_parameters_of, parameters_in
from hf_fsdp_plugin.backends.ranks.agreement import gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.sharding.forwards import float_outputs
from hf_fsdp_plugin.backends.sharding.shard import sharded_models
from hf_fsdp_plugin.observe.units import UnitObservation, unmanaged_parameters
from hf_fsdp_plugin.observe.weight_statistics import doubles
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.torch_private.functions import current_backward
from hf_fsdp_plugin.torch_private.modules import buffers, local_tensor, non_persistent_buffers

_TOLERANCE = 1e-6
_Checksum = list[float]
"""The sum of the elements, and the sum of their magnitudes."""
_Key = tuple[str, str, tuple[int, ...]]
"""Kind of a tensor (unit, parameter or buffer), its name, and the number of its shard."""

ShardHashes = dict[str, torch.Tensor | None]
"""Name of a parameter -> hash of this rank's part; ``None`` if the rank has no part of it."""


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
        num_filled: number of these tensors that a rank had not loaded; maximum over the ranks.
        num_from_files: number of parameters that all ranks had mapped from equal files, which were not broadcast.
        num_shared_ranks: number of ranks on which a parameter was mapped or not loaded before; ``None`` if unknown.
    """

    num_on_meta: int
    differing: tuple[str, ...]
    replicated: bool
    diverged: tuple[str, ...] = ()
    num_broadcast: int | None = None
    num_filled: int = 0
    num_from_files: int = 0
    num_shared_ranks: int | None = None


def compare_weights(model: nn.Module, units: Sequence[UnitObservation]) -> WeightComparison:
    """Compare checksums of replicas, unsharded parameters and non-persistent buffers across ranks. Collective.

    Buffers in the state dict are not compared, because running statistics may differ between ranks.
    """
    record = find_part(model, BroadcastRecord)
    with on_all_ranks("computing checksums of the weights"):
        own = _checksums(model, units)
        received_here = None if record is None else record.read()
    gathered = gather_objects((own, received_here))
    broadcasts: list[Any] = [broadcast for _, broadcast in gathered]
    if None in broadcasts:
        broadcasts = []
    found: dict[_Key, list[_Checksum | None]] = {}
    for checksums, _ in gathered:
        for key, checksum in checksums.items():
            found.setdefault(key, []).append(checksum)
    differing = {key[:2] for key, (first, *others) in found.items() if not all(_close(first, each) for each in others)}
    memories = [broadcast.before for broadcast in broadcasts if broadcast.before is not None]
    received = {(broadcast.num_tensors, broadcast.checksum) for broadcast in broadcasts}
    if len(received) > 1:
        differing.add(("weights", "received from rank 0"))
    return WeightComparison(
        num_on_meta=max(list(checksums.values()).count(None) for checksums, _ in gathered),
        differing=tuple(sorted(map(" ".join, differing))),
        diverged=tuple(sorted(name for kind, name in differing if kind == "unit")),
        replicated=any(kind == "unit" and len(sums) > 1 for (kind, _, _), sums in found.items()),
        num_broadcast=min((broadcast.num_tensors for broadcast in broadcasts), default=None),
        num_filled=max((broadcast.num_filled for broadcast in broadcasts), default=0),
        num_from_files=min((broadcast.num_from_files for broadcast in broadcasts), default=0),
        num_shared_ranks=sum(memory.num_mapped + memory.num_on_meta > 0 for memory in memories) if memories else None,
    )


def _checksums(model: nn.Module, units: Sequence[UnitObservation]) -> dict[_Key, _Checksum | None]:
    found: dict[_Key, torch.Tensor | None] = {}
    for unit in units:
        # The parameters of a unit may be divided over different axes: only ranks with equal parts are compared.
        same_part: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for part, shard in zip(unit.live.coordinates, unit.live.shards, strict=False):
            same_part.setdefault(part, []).append(shard)
        for part, shards in same_part.items():
            found["unit", unit.name or "root", part] = _checksum(shards)
    unmanaged = {id(parameter) for parameter in unmanaged_parameters(model, units)}
    for name, parameter in model.named_parameters():
        if id(parameter) in unmanaged:
            found["parameter", canonical_name(name), ()] = _checksum([parameter])
    for name, module in model.named_modules():
        for attribute in sorted(non_persistent_buffers(module)):
            if (buffer := buffers(module).get(attribute)) is not None:
                found["buffer", canonical_name(f"{name}.{attribute}".lstrip(".")), ()] = _checksum([buffer])
    sums = {key: checksum for key, checksum in found.items() if checksum is not None}
    return {**dict.fromkeys(found), **read_together(sums)}


@torch.no_grad()
def _checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum and the sum of magnitudes in double precision, on the tensors' device; ``None`` on meta."""
    if any(tensor.is_meta for tensor in tensors):
        return None
    total = torch.zeros(2, dtype=torch.float64, device=next((each.device for each in tensors), None))
    for values in doubles(tensors):
        total += torch.stack([values.sum(), values.abs().sum()])
    return total


def _close(one: _Checksum | None, other: _Checksum | None) -> bool:
    if one is None or other is None:
        return one is other
    scale = max(one[1], other[1], 1e-30)
    return all(abs(a - b) <= _TOLERANCE * scale for a, b in zip(one, other, strict=True))


def unchanged_parameters(
    before: ShardHashes | None, later: Sequence[ShardHashes], units: Sequence[UnitObservation]
) -> frozenset[str] | None:
    """Return the trained parameters whose part on this rank is as before the first step; ``None`` if this is unknown.

    The weights after the examined steps and those at the end of the run are compared. A parameter without a part on
    this rank counts as unchanged.

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


def hash_parts(units: Iterable[UnitObservation], only: Collection[str] | None = None) -> ShardHashes:
    """Return hashes of the bits of this rank's part of each trained parameter, on the parameters' devices.

    Args:
        only: names of the parameters to hash instead of the trained ones.
    """
    return {
        name: hash_bits(each.part) if each.part.numel() else None
        for unit in units
        for name, each in zip(unit.parameters, unit.live.held, strict=True)
        if (each.requires_grad if only is None else name in only)
        and type(each.part.detach()) is torch.Tensor
        and not each.part.is_meta
    }


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside Accelerate's ``AcceleratedOptimizer``."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizers_of(model: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that update parameters of this model."""
    return [optimizer for optimizer in optimizers if has_parameters_of(model, optimizer)]


def check_optimizers(
    model: nn.Module,
    units: Sequence[UnitObservation],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    prepared_ids: Collection[int] = (),
) -> list[Problem]:
    """Check that the optimizers together have exactly the trainable parameters of the model.

    An optimizer that was created before wrapping updates the old, unsharded parameters, and the loss stays constant.

    Args:
        prepared_ids: ``id`` of the parameters that the optimizers had when they were prepared.
    """
    if not optimizers:
        return []
    copies = frozenset[int]().union(*(unit.live.known("copy_ids", frozenset()) for unit in units))
    own = {id(parameter) for parameter in model.parameters()}.union(*(unit.live.parameter_ids for unit in units))
    held = {id(parameter) for optimizer in optimizers for parameter in parameters_in(optimizer)}
    problems = []
    for optimizer in optimizers:
        parameters = parameters_in(optimizer)
        of_all = f"of the {len(parameters)} parameters of {type(optimizer).__name__}"
        foreign = [each for each in parameters if id(each) not in own]
        if num_foreign := len(foreign) - num_of_sharded_models(foreign):
            message = f"{num_foreign} {of_all} do not belong to the sharded model. The optimizer was created before "
            message += "wrapping, so it updates parameters that the model does not use."
            fix = "Create the optimizer after preparing the model, or pass both to one prepare() call."
            problems.append(Problem(code="FSDP-E504", message=message, fix=fix))
        if num_copies := sum(id(parameter) in copies for parameter in parameters):
            message = f"{num_copies} {of_all} are gathered copies, which FSDP frees. Updates of them are lost."
            fix = "Create the optimizer before the first forward, or pass model and optimizer to one prepare() call."
            problems.append(Problem(code="FSDP-E504", message=message, fix=fix))
    # A model whose parameters are gathered now, for example after an evaluation, has the shards all the same.
    trained = {id(p) for p in model.parameters() if p.requires_grad and id(p) not in copies}
    left_out = trained - held
    if problems or not left_out:
        return problems
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    if num_removed := len(left_out.intersection(prepared_ids)):
        message = f"{num_removed} of {len(trained)} trainable parameters are no longer in {names}, which had them when "
        message += "it was prepared: they are not updated."
        fix = "Do not change the parameter groups after prepare(). If the parameters are meant to stay constant, set "
        fix += "requires_grad = False before prepare()."
        return [Problem(code="FSDP-E509", message=message, fix=fix)]
    message = f"{len(left_out)} of {len(trained)} trainable parameters are in no parameter group of {names}: "
    message += "they are not updated."
    fix = "Pass all trainable parameters to the optimizer, or set requires_grad = False on the others."
    return [Problem(code="FSDP-W505", message=message, fix=fix)]


def num_of_sharded_models(parameters: Sequence[torch.Tensor]) -> int:
    """Return how many of the parameters belong to any sharded model. This rank may have no gradients of its shards."""
    known = {id(parameter) for model in sharded_models() for parameter in model.parameters()} if parameters else ()
    return sum(id(parameter) in known for parameter in parameters)


@dataclass
class _LastBackward:
    """The number of the last backward that has begun for a model of an optimizer."""

    number: int = -1


class GradientWatch:
    """Looks at the gradients of an optimizer's parameters when backwards begin, between its first and second step.

    A script may zero them at any time before that. If another backward begins with the gradients of the last step, but
    a later one without them, as when a discriminator passes gradients to a generator, they were zeroed, too. Other
    gradients than those of the step are from this backward: a penalty on the weights is differentiated first.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._has_stepped = self._is_done = False
        self._stepped: torch.Tensor | None = None
        """Norms of the gradients of the first step; ``None`` without gradients."""
        self._kept: list[torch.Tensor | None] = []
        """Norms of these gradients when each later backward begins."""
        self._forward_handle = model.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._has_stepped and not torch.compiler.is_compiling():
            first = next((each for each in float_outputs(output) if each.requires_grad), None)
            if first is not None:
                first.register_hook(self._before_backward)

    def _before_backward(self, _: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._is_done:
            return
        backward, last = current_backward(), parts_of(optimizer).get(_LastBackward)
        if backward is not None and last.number == backward:
            # Gradients are being reduced on FSDP's stream: of another model of the optimizer, whose watch is enough.
            if not self._kept:
                self._is_done = True
                self._forward_handle.remove()
            return
        if backward is not None:
            last.number = backward
        self._kept.append(_norms(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._stepped = _norms(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._kept or self._is_done:
            return
        self._is_done = True
        self._forward_handle.remove()
        if all(_is_same(norms, self._stepped) for norms in self._kept):
            message = f"the gradients of the first step of {type(optimizer).__name__} were not set to zero before the "
            message += "second one, which adds those of both steps."
            fix = "Call optimizer.zero_grad() after each optimizer.step()."
            raise SpecError([Problem(code="FSDP-E514", message=message, fix=fix)])


@torch.no_grad()
def _norms(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return the norms of this rank's parts of the gradients."""
    gradients = [p.grad for p in parameters_in(optimizer) if p.grad is not None]
    norms = [torch.linalg.vector_norm(part).float() for part in map(local_tensor, gradients) if part.numel()]
    return torch.stack([norm.to(norms[0].device) for norm in norms]) if norms else None


def _is_same(norms: torch.Tensor | None, stepped: torch.Tensor | None) -> bool:
    """Whether the gradients are those of the step, and not zero."""
    return norms is not None and stepped is not None and bool(norms.any()) and torch.equal(norms, stepped)


def has_gradient(parameters: Any) -> bool:
    """Return whether a parameter has a gradient."""
    return any(parameter.grad is not None for parameter in parameters if parameter.is_leaf)
