"""Counts what a model allocates, frees and computes while it runs on the meta device.

A tensor on ``meta`` has a storage with a size but without memory. Autograd keeps and frees these storages as it keeps
and frees real ones, so the count is what the operators of the model really save, for any architecture.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import torch

from hf_fsdp_plugin.plan.fsdp_plan import DTYPES
from hf_fsdp_plugin.tools.plan.estimate.machines import OpKind
from hf_fsdp_plugin.tools.plan.estimate.memory.step import AxisCall, OpCost, Usage
from hf_fsdp_plugin.tools.plan.estimate.types import Axis
from hf_fsdp_plugin.torch_private import fake_ranks, functions
from hf_fsdp_plugin.torch_private.modules import local_tensor

_FUNCTIONS: Final = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "gelu", "gelu_backward",
        "silu", "silu_backward", "tanh", "tanh_backward", "exp", "sigmoid", "sigmoid_backward", "pow", "rsqrt", "cos",
        "sin", "native_dropout", "bernoulli_",
    }
)  # fmt: skip
"""Operators that compute exponentials and the like for each element."""
_DTYPES: Final = {torch.float64: "fp64", **{dtype: name for name, dtype in DTYPES.items()}}


_START: Final = OpCost(kind="memory", flops=0, bytes=0, dtype="fp32")
"""An operation that only takes the time to start it."""


@cache
def _attention_operators() -> dict[str, int]:
    """Return operator -> where ``is_causal`` is in its arguments."""
    forwards = {functions.flash_attention: 4, functions.cpu_attention: 4, functions.efficient_attention: 6}
    backwards = {functions.flash_attention: 11, functions.cpu_attention: 7, functions.efficient_attention: 11}
    found = {operator.__name__: index for operator, index in forwards.items()}
    return found | {f"{operator.__name__}_backward": index for operator, index in backwards.items()}


def op_cost(func: Any, args: Any, kwargs: Any, out: Any) -> OpCost | None:
    """Return the cost of an operator that has run; ``None`` if it neither computes nor starts anything.

    Attention is one operation that does not write the scores to memory: two products in the forward, and five in the
    backward; half of them if it is causal.
    """
    name = functions.operator_name(func)
    if (causal := _attention_operators().get(name)) is not None:
        is_backward = name.endswith("_backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        flops, num_bytes = 4 * query.numel() * key.shape[-2], 2 * query.nbytes + key.nbytes + value.nbytes
        if len(args) > causal and args[causal]:
            flops //= 2
        if is_backward:
            flops, num_bytes = flops * 5 // 2, num_bytes * 2
        dtype = _DTYPES.get(query.dtype, "fp32")
        return OpCost(kind="attention", flops=flops, bytes=num_bytes, dtype=dtype, length=key.shape[-2])
    if functions.is_view(func):
        return _START
    leaves = functions.tree_leaves((args, out))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"]
    num_bytes, flops = sum(tensor.nbytes for tensor in tensors), functions.flops_of(func, args, kwargs, out)
    if not num_bytes and not flops:
        return None
    if name == "embedding":
        num_bytes = 2 * out.nbytes  # only the rows that are looked up
    kind: OpKind = "matmul" if flops else "function" if name in _FUNCTIONS else "memory"
    dtype = next((_DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _DTYPES), "fp32")
    return OpCost(kind=kind, flops=flops, bytes=num_bytes, dtype=dtype)


class Tracker(functions.TorchDispatchMode):
    """Follows the storages that operators allocate, and counts the operators.

    Attributes:
        live: bytes in use now.
        host_bytes: bytes that activation offload keeps in CPU memory now.
        peak: the usage with the largest total since :meth:`restart`.
        most_activations: the largest number of bytes of activations since then.
        ops: operations since then, and how often each ran, without those that run while `counts_ops` is not set.
        calls: collectives since then, and how often each ran.
    """

    peak: Usage
    most_activations: int
    ops: Counter[OpCost]
    calls: Counter[AxisCall]

    def __init__(self, ignored: Iterable[torch.Tensor], axes: Mapping[str, Axis], device_type: str) -> None:
        """Begin with no memory in use.

        Args:
            ignored: tensors that are not counted.
            axes: name of a process group -> its axis.
        """
        super().__init__()
        self._axes, self._copies_collectives = axes, device_type == "cpu"
        self.live = Usage()
        self.host_bytes = 0
        self.restart()
        self.counts_ops = True
        self._known: dict[int, Any] = {functions.storage_key(local_tensor(tensor)): None for tensor in ignored}
        self._grads: set[int] = set()
        self._last_op: str = ""
        self._num_counted = 0

    def restart(self) -> None:
        """Begin another stage."""
        self._start, self._start_host_bytes = self.live, self.host_bytes
        self.peak = self.live
        self.most_activations = self.live.activations
        self.ops, self.calls = Counter(), Counter()

    def usage_since_start(self) -> tuple[Usage, Usage, int, int, Counter[OpCost], Counter[AxisCall]]:
        """Return the last fields of a :class:`Stage` for what has run since :meth:`restart`."""
        self.update_peak()
        start, host_bytes = self._start, self.host_bytes - self._start_host_bytes
        most_activations = self.most_activations - start.activations
        return self.peak.minus(start), self.live.minus(start), host_bytes, most_activations, self.ops, self.calls

    def count_gradient(self, parameter: torch.Tensor) -> None:
        """Count the storage of a parameter's gradient, which was allocated as an activation, as a gradient."""
        if parameter.grad is None:
            return
        gradient = local_tensor(parameter.grad)
        key, size = functions.storage_key(gradient), gradient.untyped_storage().nbytes()
        if key in self._known and key not in self._grads and self._known[key] is not None:
            self._grads.add(key)
            self.live = Usage(self.live.activations - size, self.live.grads + size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fake_ranks.runs_on_local_tensors(types):
            return NotImplemented
        if func is functions.READ_VALUE:
            return self._value(args[0])
        kwargs = kwargs or {}
        if func is functions.TO_COPY and self._num_counted and args[0].is_meta and str(kwargs.get("device")) == "cpu":
            return self._counts(args[0])
        if func.namespace == "c10d":
            out: Any = fake_ranks.run_in_place(func, args)
        elif func is fake_ranks.WRAP:
            out = args[0].view_as(args[0])  # on meta tensors, torch's operator returns a copy
        else:
            out = (_grouped_product if func is functions.GROUPED_MM else func)(*args, **kwargs)
        if (call := fake_ranks.collective_of(func, args, out)) is not None:
            self._count_call(*call)
        elif self.counts_ops and (cost := op_cost(func, args, kwargs, out)) is not None:
            self.ops[cost] += 1
        self._last_op = str(func)
        if self._last_op == "aten.scatter_add_.default":
            self._num_counted = args[2].numel()
        for tensor in functions.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not fake_ranks.is_fake(tensor):
                self._see(tensor)
        # Autograd adds a gradient to another one in place if nothing else refers to it. With a dispatch mode it adds
        # out of place (torch/csrc/autograd/input_buffer.cpp), and frees the operand at once.
        is_sum = func is torch.ops.aten.add.Tensor and functions.in_backward()
        if not (is_sum and functions.called_by_engine(1)):
            self.update_peak()
        return out

    def update_peak(self) -> None:
        if sum(self.live) > sum(self.peak):
            self.peak = self.live
        self.most_activations = max(self.most_activations, self.live.activations)

    def _count_call(self, kind: Any, group: str, size: int) -> None:
        """Count a collective. Gloo copies the output of an all-gather, and the input of a reduce-scatter."""
        self.calls[AxisCall(kind, self._axes[group], size)] += 1
        if self._copies_collectives and kind in ("all_gather", "reduce_scatter"):
            before, self.live = self.live, Usage(self.live.activations + size, self.live.grads)
            self.update_peak()
            self.live = before

    def _value(self, tensor: torch.Tensor) -> Any:
        """Return a value for ``item()``, which meta tensors do not have.

        Transformers asks whether all tokens are attended to and in one sequence: yes. Other conditions are false.
        """
        if tensor.dtype is torch.bool:
            return self._last_op == "aten.all.default"
        return 1.0 if tensor.is_floating_point() else 0

    def _counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return how many of the rows that were counted last each rank of an expert axis sends or gets: equal parts."""
        num, rest = divmod(self._num_counted, counts.shape[-1])
        row = [num + (rank < rest) for rank in range(counts.shape[-1])]
        return torch.tensor(row).expand(counts.shape).clone()

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = functions.storage_key(tensor)
        if key not in self._known and storage.nbytes():
            size = storage.nbytes()
            self._known[key] = weakref.ref(storage, lambda _: self._freed(key, size))
            self.live = Usage(self.live.activations + size, self.live.grads)

    def _freed(self, key: int, size: int) -> None:
        del self._known[key]
        if key in self._grads:
            self._grads.remove(key)
            self.live = Usage(self.live.activations, self.live.grads - size)
        else:
            self.live = Usage(self.live.activations - size, self.live.grads)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, **_: Any) -> Any:
    """Return the result of a product of groups of rows, in any dtype: torch's own function for meta accepts bf16 only.

    With two matrices, the groups are parts of the summed dim, and each group has a result.
    """
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None
        return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
    if left.dim() == 2 or right.dim() == 2:
        return left.new_empty(left.shape[-2], right.shape[-1])
    return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
