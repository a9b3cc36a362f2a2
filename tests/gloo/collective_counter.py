"""Counts the collectives that torch runs on this rank, at torch's dispatcher, which every call of them passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Operator of the namespaces ``c10d`` and ``_c10d_functional`` -> kind of collective."""


class CollectiveCounter(TorchDispatchMode):
    """Counts calls by kind, ranks, bytes of the larger side of the call, and phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.calls: Counter[tuple[str, tuple[int, ...], int, str]] = Counter()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types):
            return NotImplemented  # they call operators on the memory of this rank
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" or (func.namespace == "_c10d_functional" and name in _KINDS):
            groups = [_group(arg) for arg in args]
            ranks = next(tuple(dist.get_process_group_ranks(group)) for group in groups if group is not None)
            sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in (*args, out)]
            self.calls[_KINDS.get(name, name), ranks, max(sides), self.phase] += 1
        return out


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group in an operator's argument; ``None`` for other arguments."""
    if isinstance(argument, str) and argument.isdigit():  # the names of groups are numbers
        return _resolve_process_group(argument)
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # another class, such as the reduction
        return None
