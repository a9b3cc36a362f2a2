"""Counts the collectives that torch runs on this rank, at torch's dispatcher, which every call of them passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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
}
"""Operator of the namespace ``c10d`` -> kind of collective."""


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
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs the operator on its shards, and then the collectives are seen here
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            groups = [_group(arg) for arg in args]
            ranks = next(tuple(dist.get_process_group_ranks(group)) for group in groups if group is not None)
            sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in args]
            self.calls[_KINDS.get(name, name), ranks, max(sides), self.phase] += 1
        elif func._schema.name == "_c10d_functional::all_reduce":  # of a DTensor
            ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(args[2])))
            self.calls["all_reduce", ranks, args[0].nbytes, self.phase] += 1
        return func(*args, **(kwargs or {}))


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group in an operator's argument; ``None`` for other arguments."""
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument)
    except RuntimeError:  # another class, such as the reduction
        return None
