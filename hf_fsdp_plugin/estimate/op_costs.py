"""FLOPs and memory traffic of each unit's forward and backward, from one pass of the model on the meta device."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from hf_fsdp_plugin.backends.sharding.module_forwards import compute_in_fp32, fp32_ids
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.estimate.machines import OpKind
from hf_fsdp_plugin.estimate.memory.meta_model import (
    EqualLayers,
    equal_layers,
    filled,
    hidden_of,
    meta_batch,
    template_of,
    with_border,
)
from hf_fsdp_plugin.estimate.memory.meta_model import cast as cast_floats
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import ancestors, parent_of
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import tree_leaves
from hf_fsdp_plugin.torch_private.tracing import READ_VALUE, TorchDispatchMode, flops_of, is_view, operator_name

_FUNCTIONS = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "gelu", "gelu_backward",
        "silu", "silu_backward", "tanh", "tanh_backward", "exp", "sigmoid", "sigmoid_backward", "pow", "rsqrt", "cos",
        "sin", "native_dropout", "bernoulli_",
    }
)  # fmt: skip
"""Operators that compute exponentials and the like for each element."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """One operation: FLOPs, bytes read and written, dtype of the computation, and tokens per sample of attention."""

    kind: OpKind
    flops: int
    bytes: int
    dtype: str
    length: int = 0


@dataclass(slots=True)
class UnitCosts:
    """Operations of one unit and how often each runs."""

    forward: Counter[OpCost]
    backward: Counter[OpCost]


def unit_costs(plan: FsdpPlan, model: nn.Module, workload: Workload) -> dict[str, UnitCosts]:
    """Return unit name -> operations of one micro-batch, the root's with the loss.

    The model runs on the meta device with parameters in the dtype of the computation; attention is counted as one
    fused operation (causal: half of the products).

    Args:
        model: the model that was planned, on any device. It is not changed.

    Raises:
        SpecError: no batch can be made for the model, or its code depends on values (FSDP-E832).
    """
    meta = _meta_copy(plan, model)
    names = {name: unit.name for unit in plan.units for name in unit.modules}
    groups = equal_layers(meta)
    recorder = _Recorder(names | {g.representative: g.representative for g in groups}, type(meta).__name__)
    for group in groups:
        _run_once(meta, group)
    try:
        with recorder.tracker, recorder, _FusedAttention(recorder):
            batch = meta_batch(model, micro_batch=workload.micro_batch, seq_len=workload.seq_len)
            output = meta(**cast_floats(torch_dtype(plan.precision.param), batch))
            cast(torch.Tensor, output["loss"] if isinstance(output, dict) else output[0]).backward()
    except Exception as error:
        raise SpecError([_not_counted(model, error)]) from error
    _copy_costs(recorder.costs, groups, names)
    return {unit.name: recorder.costs[unit.name] for unit in plan.units} | {"": recorder.costs[""]}


def _copy_costs(costs: defaultdict[str, UnitCosts], groups: list[EqualLayers], names: Mapping[str, str]) -> None:
    """Give each layer that did not run the costs of its representative: its units, or the unit that contains it."""
    for group in groups:
        layer = group.representative
        for name in [name for name in names if name.startswith(f"{layer}.")]:
            for copied in group.copies:
                costs[names[copied + name.removeprefix(layer)]] = costs[names[name]]
        if layer in names:
            costs.update(dict.fromkeys(group.copies, costs[layer]))
            continue
        around = costs[names[next((path for path in ancestors(parent_of(layer)) if path in names), "")]]
        own = costs.pop(layer, UnitCosts(Counter(), Counter()))
        for _ in range(1 + len(group.copies)):
            around.forward.update(own.forward)
            around.backward.update(own.backward)


def _not_counted(model: nn.Module, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Problem(
        code="FSDP-E832",
        message=f"cannot count the operations of {type(model).__name__}, which failed without data: {reason}",
        fix="Predict the time of a Transformers model with labels, or omit --machine.",
    )


def _meta_copy(plan: FsdpPlan, model: nn.Module) -> nn.Module:
    """Return a copy on the meta device that computes in the plan's dtypes."""
    dtype = torch_dtype(plan.precision.param)
    memo: dict[int, Any] = {}
    fp32 = fp32_ids(plan, model)
    for parameter in model.parameters():
        kept = parameter.dtype if dtype is None or not parameter.is_floating_point() else dtype
        if id(parameter) in fp32:
            kept = torch.float32
        empty = torch.empty(parameter.shape, dtype=kept, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo).train()
    compute_in_fp32(plan, copied)
    return copied


def _run_once(model: nn.Module, group: EqualLayers) -> None:
    """Let the layers that are equal to a representative return their input in the form of its output."""
    templates: list[Any] = []

    def read(module: nn.Module, args: Any, output: Any) -> None:
        templates.append(template_of(output))

    def imitate(*args: Any, **kwargs: Any) -> Any:
        # A new tensor for each layer: the tracker notices the backward of a layer by the gradient of its output.
        args, kwargs = with_border((args, kwargs), lambda: None)
        return filled(templates[-1], hidden_of(args, kwargs), _tensors((args, kwargs)))

    model.get_submodule(group.representative).register_forward_hook(read)
    for name in group.copies:
        model.get_submodule(name).forward = imitate


class _Running(dict[str, None]):
    """Names of the modules that run, in the order in which they began, as ``ModuleTracker`` uses its set."""

    def add(self, name: str) -> None:
        self.pop(name, None)
        self[name] = None

    def remove(self, name: str) -> None:
        for each in [each for each in self if each == name or each.startswith(f"{name}.")]:
            del self[each]

    @property
    def innermost(self) -> str:
        last = next(reversed(self))
        return max((name for name in self if name == last or name.startswith(f"{last}.")), key=len)


class _RunningModule(ModuleTracker):
    """Tracks the module that runs, in forward and backward.

    ``ModuleTracker`` does not notice the end of a backward whose module got its inputs as keyword arguments, as
    attention does. Here, the module whose backward began last is the one that runs.
    """

    @property  # type: ignore[override]
    def parents(self) -> _Running:
        return self._running

    @parents.setter
    def parents(self, names: Iterable[str]) -> None:
        self._running = _Running((name, None) for name in names)


class _Recorder(TorchDispatchMode):
    """Records the cost of each operation for the innermost unit that runs."""

    def __init__(self, names: Mapping[str, str], root: str) -> None:
        super().__init__()
        self.tracker = _RunningModule()
        self.costs: defaultdict[str, UnitCosts] = defaultdict(lambda: UnitCosts(Counter(), Counter()))
        self._names, self._prefix = names, f"{root}."
        self._units: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ_VALUE:
            return True if args[0].dtype is torch.bool else 1  # checks of masks, such as "all positions are regular"
        out = func(*args, **kwargs)
        if is_view(func):
            self.add("memory", 0, 0, "fp32")  # it only takes the time to start it
            return out
        tensors = [tensor for tensor in _tensors((args, out)) if tensor.device.type == "meta"]
        num_bytes = sum(t.nbytes for t in tensors)
        if func is torch.ops.aten.embedding.default:
            num_bytes = 2 * out.nbytes  # only the rows that are looked up
        flops = flops_of(func, args, kwargs, out)
        if num_bytes or flops:
            is_function = operator_name(func) in _FUNCTIONS
            self.add("matmul" if flops else "function" if is_function else "memory", flops, num_bytes, _dtype(tensors))
        return out

    def add(self, kind: OpKind, flops: int, num_bytes: int, dtype: str, length: int = 0) -> None:
        costs = self.costs[self._unit()]
        cost = OpCost(kind=kind, flops=flops, bytes=num_bytes, dtype=dtype, length=length)
        (costs.backward if self.tracker.is_bw else costs.forward)[cost] += 1

    def _unit(self) -> str:
        deepest = self.tracker.parents.innermost
        if deepest not in self._units:
            path = deepest.removeprefix(self._prefix) if deepest.startswith(self._prefix) else ""
            found = next((p for p in ancestors(path) if p in self._names), "")
            self._units[deepest] = self._names.get(found, "")
        return self._units[deepest]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _dtype(tensors: list[torch.Tensor]) -> str:
    return next((_DTYPES[t.dtype] for t in tensors if t.dtype in _DTYPES), "fp32")


class _Counted(torch.autograd.Function):
    """Attention that is only counted: calls ``record`` in forward and backward, and returns empty tensors."""

    @staticmethod
    def forward(ctx: Any, record: Callable[[bool], None], shape: tuple[int, ...], *inputs: torch.Tensor) -> Any:
        ctx.record, ctx.inputs = record, inputs
        record(False)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.record(True)
        return (None, None, *map(torch.empty_like, ctx.inputs))


class _FusedAttention(TorchFunctionMode):
    """Counts ``scaled_dot_product_attention`` as one operation that does not write the scores to memory."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        products = 4 * query.numel() * key.shape[-2]  # two products of the forward, five of the backward
        if given.get("is_causal"):
            products //= 2
        num_bytes = 2 * query.nbytes + key.nbytes + value.nbytes
        dtype = _DTYPES.get(query.dtype, "fp32")

        def record(backward: bool) -> None:
            flops = products * 5 // 2 if backward else products
            self._recorder.add("attention", flops, num_bytes * (2 if backward else 1), dtype, key.shape[-2])

        return _Counted.apply(record, (*query.shape[:-1], value.shape[-1]), query, key, value)
