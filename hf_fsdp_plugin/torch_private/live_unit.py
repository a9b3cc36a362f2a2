"""One FSDP unit of either version, as :mod:`fsdp1` and :mod:`fsdp2` read it from a live model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from hf_fsdp_plugin.contracts import Contract, ContractError, missing_attribute_error

Facts = Mapping[str, Callable[[Any], Any]]
"""Attribute of :class:`LiveUnit` -> the function that reads it off an object of torch."""


class Held(NamedTuple):
    """A parameter of a unit: where it is registered, and this rank's part of it, without padding."""

    module: nn.Module
    attribute: str
    requires_grad: bool
    numel: int
    part: torch.Tensor


class LiveUnit:
    """One group of parameters that torch gathers and frees together. Its facts are read when they are asked for.

    Reading a fact that the installed torch does not show raises :class:`ContractError`.

    Args:
        parts: objects of torch, and the facts that are read off each. Later ones replace earlier ones, unless they
            cannot be read.
        rows: the contracts of the file that defines the facts.

    Attributes:
        modules: the wrapped modules, in torch's order; FSDP1 has exactly one, the wrapper itself.
        device: device on which the unit is computed; offloaded shards are in CPU memory.
        num_params: elements of the whole unit, padding excluded.
        num_local_params: elements of this rank's shard, padding excluded.
        num_frozen: number of elements of ``num_params`` that need no gradient.
        num_local_trainable: number of elements of ``num_local_params`` that need a gradient.
        master_dtypes: dtypes of the trainable shards (of all shards if none is trainable).
        compute_dtype: dtype of the gathered parameters; ``None`` if the unit has no parameters.
        compute_dtypes: dtype of each gathered parameter under FSDP2, in the order of ``held``.
        reduce_dtype: dtype of the gradient reduction; ``None`` if nothing is reduced.
        output_dtype: dtype to which FSDP2 casts outputs; ``None`` for no cast.
        casts: whether a compute dtype was set explicitly.
        strategy: FSDP1's strategy; ``None`` under FSDP2, which has a mesh and a reshard flag instead.
        hybrid: whether the mesh has a replicate axis and a shard axis.
        reshard_asked: the reshard flag that was passed to FSDP2; ``None`` if FSDP2 selects it.
        reshards_after_backward: whether the gathered parameters are freed after the backward.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: whether another unit is gathered before this unit's forward.
        prefetched: the modules of the units that FSDP2 gathers before this unit's forward.
        shard_ranks: the ranks that have the unit's shards, in the order of the shards; empty if it is not sharded.
        axes: name and size of the axes of the mesh, as torch has them: ``cp``, ``tp`` and ``ep`` among others.
        coordinates: for each of ``shards``, which part this rank has: its position on each axis that divides it.
        reduces: whether the next backward reduces gradients over the shard group.
        all_reduces: whether the next backward reduces gradients over the replicas.
        unreduced: whether there are gradients that were computed but not reduced, so that the optimizer misses them.
        held: each parameter.
        casting: the attribute name of each parameter that casts itself in FSDP2's all-gather.
        lazy: whether torch has not initialized the unit yet. It does so in the first forward.
        shards: memory of this rank's parameters.
        gathered: memory of gathered parameters that are not freed.
        gradients: the gradients that are not ``None``.
        parameter_ids: ``id`` of every parameter object that can represent the unit in the module tree.
        copy_ids: ``id`` of the gathered parameters among them. An optimizer must not have these.
        source: the object of torch that stands for the unit: a flat parameter's handle, or a group of parameters.
    """

    def __init__(
        self, version: Literal[1, 2], *, is_root: bool, parts: Sequence[tuple[Any, Facts]], rows: tuple[Contract, ...]
    ) -> None:
        self.version, self.is_root, self.source = version, is_root, parts[-1][0]
        self._parts, self._rows = parts, rows

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFAULTS:
            raise AttributeError(name)
        error: ContractError | None = None
        # Without a reference to itself, the tensors are freed with the last reference, not by the garbage collector.
        for source, facts in reversed([(self, _OF_HELD), *self._parts]):
            if name in facts:
                try:
                    vars(self)[name] = value = facts[name](source)
                    return value
                except ContractError as broken:
                    error = broken
                except AttributeError as lacking:
                    if (error := missing_attribute_error(lacking, self._rows)) is None:
                        raise RuntimeError(f"the fact {name} of a unit cannot be read") from lacking
        if error is not None:
            raise error
        return _DEFAULTS[name]

    def known(self, name: str, default: Any = None) -> Any:
        """Return a fact, or ``default`` if it cannot be read."""
        try:
            return getattr(self, name)
        except ContractError:
            return default

    def unknown(self) -> Iterator[ContractError]:
        """Yield the error of each fact that cannot be read."""
        for name in _DEFAULTS:
            try:
                getattr(self, name)
            except ContractError as error:
                yield error


_OF_HELD: Final[Facts] = {
    "num_params": lambda unit: sum(each.numel for each in unit.held),
    "num_local_params": lambda unit: sum(each.part.numel() for each in unit.held),
    "num_frozen": lambda unit: sum(each.numel for each in unit.held if not each.requires_grad),
    "num_local_trainable": lambda unit: sum(each.part.numel() for each in unit.held if each.requires_grad),
}
"""The facts that follow from the parameters."""
_EMPTY: Final = (
    "modules", "master_dtypes", "compute_dtypes", "shard_ranks", "coordinates", "prefetched", "shards", "gathered",
    "gradients", "held", "casting", "parameter_ids", "copy_ids",
)  # fmt: skip
_DEFAULTS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("num_params", "num_local_params", "num_frozen", "num_local_trainable"), 0),
    **dict.fromkeys(("shard_size", "replicate_size"), 1),
    **dict.fromkeys(("casts", "unreduced", "hybrid", "reshards", "offloaded", "forward_prefetch", "lazy"), False),
    **dict.fromkeys(("reduces", "all_reduces", "reshards_after_backward", "limit_all_gathers", "use_orig"), True),
    **dict.fromkeys(("device", "compute_dtype", "reduce_dtype", "output_dtype", "strategy", "reshard_asked")),
    **dict.fromkeys(_EMPTY, ()),
    "axes": {},
    "backward_prefetch": "pre",
}
"""Fact -> its value in units of which no part has it, such as units without parameters."""


def attribute_or(source: Any, name: str, default: Any, declared_by: type | None = None) -> Any:
    """Return an attribute that torch sets later than in the constructor, or ``default`` before that.

    Args:
        declared_by: the class that declares it; by default that of ``source``.

    Raises:
        AttributeError: the class does not declare such an attribute, so it has another name in the installed torch.
    """
    try:
        return getattr(source, name)
    except AttributeError:
        if any(name in vars(cls).get("__annotations__", {}) for cls in (declared_by or type(source)).__mro__):
            return default
        raise
