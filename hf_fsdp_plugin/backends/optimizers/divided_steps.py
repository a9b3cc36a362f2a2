"""Steps of an optimizer whose matrices the ranks divide: each matrix is whole on one rank only, and only in the step.

Shards are sent to the owner of a matrix, and shards of the result come back, both for many matrices in one all-to-all
of the shard group. A rank sends each shard to one rank, and as many bytes of updates: less than in one all-gather, in
which it sends its shards to all ranks. Replicas have different owners, and exchange the shards of their results.

Why replicas divide the work too: for a matrix with the smaller side m, one element costs at least 30·m FLOPs in five
iterations, and 2 bytes between the replicas. From m = 1000 on, a link with 50 GB/s needs less time than 400 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from hf_fsdp_plugin.backends.optimizers.division import ExchangeRound, Stack, divide
from hf_fsdp_plugin.backends.optimizers.matrix_rules import MatrixRule
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import is_sharded, with_local_tensor
from hf_fsdp_plugin.torch_private.modules import local_tensor

_Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """The ranks that divide matrices: those of one shard group, and its replicas. ``None``: a single rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    device_type: str

    @property
    def num_shards(self) -> int:
        return self.shards.size() if self.shards is not None else 1

    @property
    def num_replicas(self) -> int:
        return self.replicas.size() if self.replicas is not None else 1

    @property
    def worker(self) -> int:
        """The number of this rank among the workers of :mod:`hf_fsdp_plugin.backends.optimizers.division`."""
        replica = self.replicas.rank() if self.replicas is not None else 0
        return replica * self.num_shards + (self.shards.rank() if self.shards is not None else 0)


def ranks_of(parameter: torch.Tensor) -> _Ranks | None:
    """Return the ranks that divide a parameter's matrices; ``None`` for several sharded axes, or a plain tensor."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = {axis: place for axis, place in enumerate(parameter.placements) if mesh.size(axis) > 1}
    sharded = [axis for axis, place in axes.items() if is_sharded(place)]
    replicated = [axis for axis, place in axes.items() if place.is_replicate()]
    is_plain = all(type(axes[axis]) is Shard for axis in sharded)
    if len(sharded) > 1 or not is_plain or len(sharded) + len(replicated) < len(axes):
        return None
    return _Ranks(
        shards=mesh.get_group(sharded[0]) if sharded else None,
        replicas=mesh.get_group(max(replicated, key=mesh.size)) if replicated else None,
        device_type=mesh.device_type,
    )


class DividedSteps:
    """Hooks of an optimizer's step. They take the divided parameters out of its groups, and update them after it."""

    def __init__(self, rule: MatrixRule) -> None:
        self._rule = rule
        self._groups: list[list[torch.Tensor]] = []
        self._taken: list[tuple[Any, _Group, _Ranks, float]] = []
        self._rounds: dict[tuple[Any, ...], list[ExchangeRound]] = {}

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)  # the last step may have raised an error, without its hook at the end
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._taken = list(divided_parameters(self._rule, optimizer))
        taken = {id(parameter) for parameter, *_ in self._taken}
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in taken]

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Update the divided parameters. They are not updated before the step, because hooks of it wait for readers."""
        self._restore(optimizer)
        together: dict[_Ranks, list[tuple[Any, _Group, float]]] = {}
        for parameter, group, ranks, cost in self._taken:
            if parameter.grad is not None:
                together.setdefault(ranks, []).append((parameter, group, cost))
        self._taken = []
        rounds = {}
        for ranks, members in together.items():
            key = (ranks, *((id(parameter), cost) for parameter, _, cost in members))
            rounds[key] = self._rounds.get(key) or _divide(members, ranks)
            for each in rounds[key]:
                self._update([(*members[number][:2], owners) for number, owners in each], ranks)
        self._rounds = rounds

    def _restore(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = parameters
        self._groups = []

    def _update(self, members: Sequence[tuple[Any, _Group, list[int]]], ranks: _Ranks) -> None:
        """Update the parameters of one round."""
        pieces: list[_Piece] = []
        outputs: list[list[DTensor]] = []
        for number, (parameter, group, owners) in enumerate(members):
            outputs.append([])
            for position, found in enumerate(self._rule.matrix_inputs(parameter, group)):
                each = _checked_input(self._rule, parameter, found)
                into = torch.empty_like(local_tensor(each))
                outputs[-1].append(with_local_tensor(each, into))
                pieces += _pieces(number, position, each, into, owners, ranks)
        own = [piece for piece in pieces if piece.owner == ranks.worker]
        _gather(pieces, own, ranks)
        for number, (_, group, _) in enumerate(members):
            of_parameter = [piece for piece in own if piece.number == number]
            if of_parameter:
                self._update_matrices(of_parameter, group)
        _scatter(pieces, own, ranks)
        for (parameter, group, _), results in zip(members, outputs, strict=True):
            self._rule.apply_update(parameter, results, group)

    def _update_matrices(self, pieces: Sequence[_Piece], group: _Group) -> None:
        """Replace the whole inputs of a parameter's matrices that this rank owns by the outputs."""
        num_inputs = 1 + max(piece.position for piece in pieces)
        own = [[piece for piece in pieces if piece.position == position] for position in range(num_inputs)]
        is_stack = own[0][0].is_stack
        inputs = [torch.stack([p.whole for p in each]) if is_stack else each[0].whole for each in own]
        shapes = [each.shape for each in inputs]
        results = self._rule.matrix_update(inputs, group)
        if (found := [result.shape for result in results]) != shapes:
            raise _invalid_rule(f"matrix_update of {type(self._rule).__name__} returned {found} for inputs {shapes}.")
        for each, result in zip(own, results, strict=True):
            for piece, whole in zip(each, result if is_stack else [result], strict=True):
                piece.whole = whole.to(piece.dtype).contiguous()  # the iteration transposes tall matrices


def divided_parameters(rule: MatrixRule, optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, _Group, _Ranks, float]]:
    """Yield each parameter whose matrices are divided, with its group, the ranks and the cost."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ranks = ranks_of(parameter) if parameter.dim() in (2, 3) else None
            cost = rule.matrix_cost(parameter.shape, group) if ranks is not None else 0
            if ranks is not None and cost > 0:
                yield parameter, group, ranks, cost


def _divide(members: Sequence[tuple[Any, _Group, float]], ranks: _Ranks) -> list[ExchangeRound]:
    stacks = []
    for parameter, _, cost in members:
        is_whole = parameter.dim() == 3 and _dim(parameter) == 0 and parameter.shape[0] % ranks.num_shards == 0
        stacks.append(Stack(shape=tuple(parameter.shape), cost=cost, is_whole_on_holders=is_whole))
    return divide(stacks, ranks.num_shards, ranks.num_replicas)


def _dim(tensor: DTensor) -> int:
    """Return the sharded dimension; 0 if one rank has the whole tensor."""
    places = [place for axis, place in enumerate(tensor.placements) if tensor.device_mesh.size(axis) > 1]
    return next((place.dim for place in places if isinstance(place, Shard)), 0)


@dataclass(kw_only=True, slots=True)
class _Piece:
    """One input of one matrix, of which each rank of the shard group has a part.

    Attributes:
        number: number of the parameter in the round.
        position: which input of the parameter.
        owner: the worker that updates the matrix.
        is_stack: whether the parameter has three dimensions.
        dim: the dimension of the matrix that is sharded.
        chunk: what each rank has of the sharded dimension of the input, the last ones less or nothing.
        index: number of the matrix in a stack whose matrices are whole on one rank each; otherwise ``None``.
        local: this rank's part.
        into: where this rank's part of the output goes.
        whole: the matrix on its owner; empty on other ranks.
    """

    number: int
    position: int
    owner: int
    is_stack: bool
    dim: int
    shape: torch.Size
    chunk: int
    index: int | None
    local: torch.Tensor
    into: torch.Tensor
    whole: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def part_of(self, rank: int) -> torch.Tensor:
        """Return the part of a rank of the shard group in ``whole``."""
        begin, end = self._range(rank)
        return self.whole.narrow(self.dim, begin, end - begin)

    def num_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's part."""
        begin, end = self._range(rank)
        return self.shape[1 - self.dim] * (end - begin) * self.dtype.itemsize

    def _range(self, rank: int) -> tuple[int, int]:
        size = self.shape[self.dim]
        if self.index is not None:
            return (0, size) if self.index // self.chunk == rank else (0, 0)
        return min(size, rank * self.chunk), min(size, (rank + 1) * self.chunk)


def _pieces(
    number: int, position: int, tensor: DTensor, into: torch.Tensor, owners: Sequence[int], ranks: _Ranks
) -> Iterator[_Piece]:
    """Yield the matrices of an input."""
    local, dim, is_stack = local_tensor(tensor), _dim(tensor), tensor.dim() == 3
    shape, are_whole = tensor.shape[-2:], is_stack and dim == 0
    chunk = -(-tensor.shape[dim] // ranks.num_shards)  # as torch.chunk, and FSDP2, divide a dimension
    for index, owner in enumerate(owners):
        own, result = (local[index], into[index]) if is_stack and not are_whole else (local, into)
        if are_whole:
            holder, place = divmod(index, chunk)
            here = holder == ranks.worker % ranks.num_shards
            own = local[place] if here else local.new_empty(0, shape[1])
            result = into[place] if here else own
        yield _Piece(
            number=number, position=position, owner=owner, is_stack=is_stack, dim=max(0, dim - is_stack), shape=shape,
            chunk=chunk, index=index if are_whole else None, local=own, into=result, whole=local.new_empty(0),
        )  # fmt: skip


def _gather(pieces: Sequence[_Piece], own: Sequence[_Piece], ranks: _Ranks) -> None:
    """Fill the whole matrices of this rank from the parts of its shard group. Collective."""
    replica, device = ranks.worker // ranks.num_shards, torch.device(ranks.device_type)
    received = _exchange(
        [[piece.local for piece in each] for each in _by_owner(pieces, ranks)[replica]],
        [sum(piece.num_bytes(rank) for piece in own) for rank in range(ranks.num_shards)], ranks, device,
    )  # fmt: skip
    for piece in own:
        piece.whole = torch.empty(piece.shape, dtype=piece.dtype, device=device)
    for rank, data in enumerate(received):
        _unpack(data, [piece.part_of(rank) for piece in own])


def _scatter(pieces: Sequence[_Piece], own: Sequence[_Piece], ranks: _Ranks) -> None:
    """Fill this rank's parts of all outputs from their owners. Collective."""
    (replica, me), device = divmod(ranks.worker, ranks.num_shards), torch.device(ranks.device_type)
    by_owner = _by_owner(pieces, ranks)
    received = _exchange(
        [[piece.part_of(rank) for piece in own] for rank in range(ranks.num_shards)],
        [sum(piece.num_bytes(me) for piece in each) for each in by_owner[replica]], ranks, device,
    )  # fmt: skip
    ordered = [[piece for each in of_replica for piece in each] for of_replica in by_owner]
    data = torch.cat(received)
    every = [data]
    if ranks.replicas is not None:
        sizes = [sum(piece.num_bytes(me) for piece in each) for each in ordered]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        padded[: data.numel()] = data
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=ranks.replicas)
        every = [each[:size] for each, size in zip(gathered, sizes, strict=True)]
    for each, of_replica in zip(every, ordered, strict=True):
        if of_replica:
            _unpack(each.to(of_replica[0].into.device), [piece.into for piece in of_replica])


def _by_owner(pieces: Sequence[_Piece], ranks: _Ranks) -> list[list[list[_Piece]]]:
    """Return the pieces of each owner, by replica and rank in its shard group."""
    found: list[list[list[_Piece]]] = [[[] for _ in range(ranks.num_shards)] for _ in range(ranks.num_replicas)]
    for piece in pieces:
        replica, rank = divmod(piece.owner, ranks.num_shards)
        found[replica][rank].append(piece)
    return found


def _exchange(
    parts: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], ranks: _Ranks, device: torch.device
) -> list[torch.Tensor]:
    """Send a list of tensors to each rank of the shard group, and return the bytes from each. Collective.

    Args:
        sizes: number of bytes from each rank.
    """
    packed = [[part.reshape(-1).view(torch.uint8) for part in each] for each in parts]
    flat = [part for each in packed for part in each]
    sent = torch.cat(flat).to(device) if flat else torch.empty(0, dtype=torch.uint8, device=device)
    if ranks.shards is None:
        return [sent]
    received = sent.new_empty(sum(sizes))
    of_ranks = [sum(part.numel() for part in each) for each in packed]
    dist.all_to_all_single(received, sent, list(sizes), of_ranks, group=ranks.shards)
    return list(received.split(list(sizes)))


def _unpack(data: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    """Copy packed bytes to tensors."""
    for part, own in zip(data.split([part.nbytes for part in into]), into, strict=True):
        if own.numel():  # a view in another dtype must begin at a multiple of its size
            own.copy_(part.clone().view(own.dtype).view(own.shape))


def _checked_input(rule: MatrixRule, parameter: DTensor, tensor: Any) -> DTensor:
    """Return an input of a rule. Raises ``SpecError`` if it is not laid out like its parameter."""
    found = str(type(tensor))
    if isinstance(tensor, DTensor):
        is_like = tensor.device_mesh == parameter.device_mesh and tensor.placements == parameter.placements
        if is_like and tensor.dim() == parameter.dim() and tensor.shape[:-2] == parameter.shape[:-2]:
            return tensor
        found = f"a DTensor {tuple(tensor.shape)} with {tensor.placements}"
    expected = f"a parameter {tuple(parameter.shape)} with {parameter.placements}"
    raise _invalid_rule(f"matrix_inputs of {type(rule).__name__} returned {found} for {expected}.")


def _invalid_rule(message: str) -> SpecError:
    fix = "Return one tensor per input, with the input's shape, from matrix_update, and DTensors with the mesh and the "
    fix += "placements of the parameter from matrix_inputs."
    return SpecError([Problem(code="FSDP-E330", message=message, fix=fix)])
