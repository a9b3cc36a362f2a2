"""One FSDP unit of either version, as :mod:`fsdp1` and :mod:`fsdp2` read it from a live model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from hf_fsdp_plugin.contracts import Contract, ContractError, missing_attribute_error


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LiveUnit:
    """One group of parameters that torch gathers and frees together.

    Reading an attribute that the installed torch does not show raises :class:`ContractError`.

    Attributes:
        modules: the wrapped modules, in torch's order; FSDP1 has exactly one, the wrapper itself.
        device: device on which the unit is computed; offloaded shards are in CPU memory.
        num_params: elements of the whole unit, padding excluded.
        num_local_params: elements of this rank's shard, padding excluded.
        num_frozen: number of elements of ``num_params`` that need no gradient.
        num_local_trainable: number of elements of ``num_local_params`` that need a gradient.
        master_dtypes: dtypes of the trainable shards (of all shards if none is trainable).
        compute_dtype: dtype of the gathered parameters; ``None`` if the unit has no parameters.
        compute_dtypes: dtype of each gathered parameter under FSDP2, in the order of ``places``.
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
        coordinates: for each of ``shards``, which part of the parameter this rank has; empty under FSDP1.
        reduces: whether the next backward reduces gradients over the shard group.
        all_reduces: whether the next backward reduces gradients over the replicas.
        unreduced: whether there are gradients that were computed but not reduced, so that the optimizer misses them.
        places: the module, the attribute name and ``requires_grad`` of each parameter.
        casting: the module and the attribute name of each parameter that casts itself in FSDP2's all-gather.
        lazy: whether torch has not initialized the unit yet. It does so in the first forward.
        shards: memory of this rank's parameters.
        parts: this rank's part of each parameter, without padding.
        gathered: memory of gathered parameters that are not freed.
        gradients: the gradients that are not ``None``.
        parameter_ids: ``id`` of every parameter object that can represent the unit in the module tree.
        copy_ids: ``id`` of the gathered parameters among them. An optimizer must not have these.
        source: the object of torch that stands for the unit: a flat parameter's handle, or a group of parameters.
        unknown: attribute that could not be read -> why.
    """

    version: Literal[1, 2]
    modules: tuple[nn.Module, ...] = ()
    is_root: bool
    device: torch.device | None = None
    num_params: int = 0
    num_local_params: int = 0
    num_frozen: int = 0
    num_local_trainable: int = 0
    master_dtypes: tuple[torch.dtype, ...] = ()
    compute_dtype: torch.dtype | None = None
    compute_dtypes: tuple[torch.dtype, ...] = ()
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts: bool = False
    strategy: str | None = None
    shard_size: int = 1
    shard_rank: int = 0
    shard_ranks: tuple[int, ...] = ()
    replicate_size: int = 1
    axes: Mapping[str, int] = field(default_factory=dict)
    coordinates: tuple[tuple[int, ...], ...] = ()
    reduces: bool = True
    all_reduces: bool = True
    unreduced: bool = False
    hybrid: bool = False
    reshard_asked: bool | None = None
    reshards: bool = False
    reshards_after_backward: bool = True
    offloaded: bool = False
    backward_prefetch: str = "pre"
    forward_prefetch: bool = False
    prefetched: tuple[nn.Module, ...] = ()
    limit_all_gathers: bool = True
    use_orig: bool = True
    lazy: bool = False
    shards: tuple[torch.Tensor, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    gathered: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    places: tuple[tuple[nn.Module, str, bool], ...] = ()
    casting: tuple[tuple[nn.Module, str], ...] = ()
    parameter_ids: frozenset[int] = frozenset()
    copy_ids: frozenset[int] = frozenset()
    source: Any = None
    unknown: Mapping[str, ContractError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.unknown:
            object.__delattr__(self, name)

    def known(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or ``default`` if it could not be read."""
        return default if name in self.unknown else getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        """Raise the error of an attribute that could not be read."""
        unknown = object.__getattribute__(self, "unknown")
        raise unknown[name] if name in unknown else AttributeError(name)


Facts = Mapping[str, Callable[[Any], Any]]
"""Attribute of :class:`LiveUnit` -> the function that reads it off an object of torch."""


def read_facts(parts: Sequence[tuple[Any, Facts]], rows: tuple[Contract, ...]) -> dict[str, Any]:
    """Read the facts of a unit off objects of torch. Later ones replace earlier ones, unless they cannot be read.

    Args:
        parts: each object, and the facts that are read off it.
        rows: the contracts of the file that defines the facts.

    Returns:
        Arguments of :class:`LiveUnit`. Its source is the last object, and its ``unknown`` has the facts for which torch
        lacks an attribute.
    """
    found: dict[str, Any] = {}
    unknown: dict[str, ContractError] = {}
    for fact, read, source in ((fact, read, source) for source, facts in parts for fact, read in facts.items()):
        try:
            found[fact] = read(source)
        except ContractError as error:
            unknown[fact] = error
        except AttributeError as error:
            missing = missing_attribute_error(error, rows)
            if missing is None:
                raise
            unknown[fact] = missing
    return {
        **found,
        "source": parts[-1][0],
        "unknown": {fact: error for fact, error in unknown.items() if fact not in found},
    }


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
