"""Adds handlers for the attention operators of the CPU to torch's ring attention, which has only those of GPUs.

``torch.distributed.tensor.experimental.context_parallel`` replaces ``scaled_dot_product_attention``. Its inputs become
``DTensor`` objects that are sharded over the sequence, and torch calls a handler for the operator that it chooses for
them. The handlers here have the interface of torch's own, and use the same ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.contracts import contracts_in, guard_functions, import_target
from hf_fsdp_plugin.torch_private.modules import local_tensor

_MODULE: Final = "torch.distributed.tensor.experimental._context_parallel._attention"
_FORWARD: Final = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD: Final = "_scaled_dot_product_flash_attention_for_cpu_backward"
CONTRACTS = contracts_in(__file__)
_SEQUENCE_DIM: Final = 2
"""Dimension of the sequence in queries, keys and values: (batch, heads, sequence, head size)."""


@dataclass(frozen=True, slots=True)
class ContextMesh:
    """The mesh of the ranks that divide each sequence. Part of the state of a model whose attention is divided."""

    mesh: DeviceMesh


def add_cpu_attention() -> None:
    """Let ``context_parallel`` run on the CPU. A second call, and a torch that has own handlers, change nothing."""
    handlers = import_target(f"{_MODULE}:custom_ops", CONTRACTS)
    own: dict[str, Callable[..., Any]] = {_FORWARD: _attention, _BACKWARD: _attention_backward}
    for name, handler in own.items():
        handlers.setdefault(import_target(f"torch:ops.aten.{name}.default", CONTRACTS), handler)


def context_exchange() -> str:
    """Return how the ranks of a context axis exchange keys and values: ``allgather`` or ``alltoall``."""
    method = import_target(f"{_MODULE}:_cp_options", CONTRACTS).rotate_method
    return str(method.name.lower().replace("_", ""))


def set_context_exchange(method: str) -> None:
    """Set how the ranks of a context axis exchange keys and values: ``allgather`` or ``alltoall``."""
    import_target(f"{_MODULE}:set_rotate_method", CONTRACTS)(method)


def _attention(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, DTensor]:
    given = _arguments(operator, args, kwargs)
    query: DTensor = given["query"]
    ring = import_target(f"{_MODULE}:_templated_ring_attention", CONTRACTS)
    out, logsumexp = ring(query.device_mesh.get_group(), _SEQUENCE_DIM, operator, **_local(given))
    return _like(query, out), _like(query, logsumexp)


def _attention_backward(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DTensor, ...]:
    given = _arguments(operator, args, kwargs)
    query: DTensor = given["query"]
    ring = import_target(f"{_MODULE}:_templated_ring_attention_backward", CONTRACTS)
    gradients = ring(query.device_mesh.get_group(), _SEQUENCE_DIM, operator, grad_out_name="grad_out", **_local(given))
    return tuple(_like(query, gradient) for gradient in gradients)


def _arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, without those that have their defaults."""
    names = (argument.name for argument in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _local(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: local_tensor(value) for name, value in given.items()}


def _like(query: DTensor, local: torch.Tensor) -> DTensor:
    """Return a tensor that is sharded over the sequence like the query."""
    return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)


guard_functions(globals(), CONTRACTS)
