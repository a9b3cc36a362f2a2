"""Process groups of ranks that do not exist, and the collectives that a dispatch mode sees.

torch's backend ``fake`` communicates nothing. Its private module registers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.contracts import contracts_in, guard_functions, import_target
from hf_fsdp_plugin.torch_private.functions import operator_name, resolve_group, tree_leaves

CONTRACTS = contracts_in(__file__)
FakeTensor = import_target("torch._subclasses.fake_tensor:FakeTensor", CONTRACTS)
WRAP = import_target("torch:ops._c10d_functional._wrap_tensor_autograd.default", CONTRACTS)
"""The operator after a functional collective, which returns the tensor for autograd."""
AsyncCollectiveTensor = import_target("torch.distributed._functional_collectives:AsyncCollectiveTensor", CONTRACTS)
KINDS: Final = {
    "all_gather_into_tensor": "all_gather", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce", "allreduce_": "all_reduce",
    "all_to_all_single": "all_to_all", "alltoall_base_": "all_to_all",
}  # fmt: skip
"""Operator of the namespaces ``c10d`` and ``_c10d_functional`` -> kind of collective."""


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a world whose collectives do nothing.

    Args:
        world_size: number of ranks, which do not exist.
    """
    store = import_target("torch.testing._internal.distributed.fake_pg:FakeStore", CONTRACTS)()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def transformers_mesh(dense: dist.DeviceMesh, experts: dist.DeviceMesh) -> Any:
    """Return the meshes of the dense layers and of the experts as ``maybe_distribute_model`` takes them."""
    return import_target("transformers.distributed.utils:TransformersDeviceMesh", CONTRACTS)(dense, experts)


def runs_on_local_tensors(types: Iterable[type]) -> bool:
    """Return whether an operator has arguments that are divided, and calls operators on the memory of a rank."""
    return any(issubclass(each, DTensor | AsyncCollectiveTensor) for each in types)


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor only stands for a shape, while ``DTensor`` computes the layout of a result."""
    return isinstance(tensor, FakeTensor)


def collective_of(func: Any, args: Any, out: Any) -> tuple[str, str, int] | None:
    """Return the kind, the name of the group and the bytes of the larger side of a collective that has run."""
    kind = KINDS.get(operator_name(func)) if "c10d" in func.namespace else None
    if kind is None:
        return None
    group = resolve_group(args[-1]) or next(filter(None, map(_unboxed, args)))
    sides = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, torch.Tensor)) for arg in (*args, out)]
    return kind, group.group_name, max(sides)


def run_in_place(func: Any, args: Any) -> Any:
    """Return the result of a collective of the namespace ``c10d``, which has no kernel for meta tensors."""
    work = import_target("torch._C._distributed_c10d:FakeWork", CONTRACTS)().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _unboxed(argument: Any) -> dist.ProcessGroup | None:
    """Return the process group in an operator's argument; ``None`` for other arguments."""
    try:
        return dist.ProcessGroup.unbox(argument) if isinstance(argument, torch.ScriptObject) else None
    except RuntimeError:  # another class, such as the reduction
        return None


guard_functions(globals(), CONTRACTS)
