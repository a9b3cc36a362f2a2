"""Functions and classes that torch provides only with private names: for tracing, process groups, states."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from hf_fsdp_plugin.contracts import contracts_in, guard_functions, import_target

if TYPE_CHECKING:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper as ActivationWrapper
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_LAYOUT = "torch.distributed.tensor._utils"
_TREE = "torch.utils._pytree"
_ATTENTION = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
)
CONTRACTS = contracts_in(__file__)
CALLS_FORWARD = "_hf_fsdp_calls_forward"
"""Attribute of a function that replaces the ``forward`` of a module and calls it."""
_NO_HOOKS: Mapping[int, Any] = {}

if not TYPE_CHECKING:
    ActivationWrapper = import_target(f"{_CHECKPOINT}:ActivationWrapper", CONTRACTS)
    CheckpointWrapper = import_target(f"{_CHECKPOINT}:CheckpointWrapper", CONTRACTS)
    TorchDispatchMode = import_target("torch.utils._python_dispatch:TorchDispatchMode", CONTRACTS)
checkpoint_wrapper = import_target(f"{_CHECKPOINT}:checkpoint_wrapper", CONTRACTS)
StorageInfo = import_target("torch.distributed.checkpoint.filesystem:_StorageInfo", CONTRACTS)
default_store = import_target("torch.distributed.distributed_c10d:_get_default_store", CONTRACTS)
compute_local_shape_and_global_offset = import_target(f"{_LAYOUT}:compute_local_shape_and_global_offset", CONTRACTS)
tree_leaves = import_target(f"{_TREE}:tree_leaves", CONTRACTS)
tree_map = import_target(f"{_TREE}:tree_map", CONTRACTS)
tree_map_only = import_target(f"{_TREE}:tree_map_only", CONTRACTS)
scale_tensors = import_target("torch:_foreach_mul_", CONTRACTS)
"""(tensors, factor): multiplies all tensors in place, in one kernel launch if possible."""
tensor_norms = import_target("torch:_foreach_norm", CONTRACTS)
"""(tensors, p, dtype=...): the p-norm of each tensor, computed in a dtype that is not narrower than its own."""

_MUON = "torch.optim._muon"
orthogonalize = import_target(f"{_MUON}:_zeropower_via_newtonschulz", CONTRACTS)
"""(matrix, coefficients, steps, eps): the Newton-Schulz iteration of Muon, in bf16. It may change the matrix."""
adjusted_muon_lr = import_target(f"{_MUON}:_adjust_lr", CONTRACTS)
"""(lr, adjust_lr_fn, shape): the learning rate of Muon for a matrix."""

ATTENTION_OPS = tuple(import_target(f"torch:ops.aten.{name}.default", CONTRACTS) for name in _ATTENTION)
"""The operators that ``scaled_dot_product_attention`` calls."""
GROUPED_MM = import_target("torch:ops.aten._grouped_mm.default", CONTRACTS)
"""The operator that ``torch.nn.functional.grouped_mm`` calls."""
SCALED_MM = import_target("torch:ops.aten._scaled_mm.default", CONTRACTS)
"""The operator of matrix products in fp8."""
READ_VALUE = import_target("torch:ops.aten._local_scalar_dense.default", CONTRACTS)
"""The operator of ``Tensor.item()``."""
TO_COPY = import_target("torch:ops.aten._to_copy.default", CONTRACTS)
"""The operator of ``Tensor.to`` and, for tensors that are not in host memory, of ``Tensor.tolist``."""
cpu_attention = import_target("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", CONTRACTS)
flash_attention = import_target("torch:ops.aten._scaled_dot_product_flash_attention", CONTRACTS)
efficient_attention = import_target("torch:ops.aten._scaled_dot_product_efficient_attention", CONTRACTS)


def can_divide_muon() -> bool:
    """Whether torch has the parts of Muon from which its steps are divided."""
    return bool(orthogonalize.__name__ and adjusted_muon_lr.__name__)  # a missing name raises


def is_sharded(placement: Placement) -> bool:
    """Return whether an axis of a mesh divides a tensor, also after another axis has (``_StridedShard``)."""
    return not (placement.is_replicate() or placement.is_partial())


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the axes of a mesh as one axis, which the mesh of all ranks then has under this name, too. Collective."""
    return mesh._flatten(name)


def with_local_tensor(layout: DTensor, local: torch.Tensor) -> DTensor:
    """Return a ``DTensor`` with the layout of another one and the shard ``local``, which stays on its device."""
    return DTensor(local, layout._spec, requires_grad=False)


def num_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return int(tensor._version)


def current_backward() -> int | None:
    """Return the number of the backward that autograd runs on this thread; ``None`` outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return current_backward() is not None


def runs_in_backward(node: torch.autograd.graph.Node) -> bool:
    """Return whether the backward on this thread executes a node. Outside of a backward it raises."""
    return bool(torch._C._will_engine_execute_node(node))


def uses_torch_checkpoint(wrapper: CheckpointWrapper) -> bool:
    """Return whether the wrapper still calls torch's ``checkpoint``."""
    function = getattr(wrapper.checkpoint_fn, "func", None)
    return function is torch.utils.checkpoint.checkpoint and calls_own_forward(wrapper)


def calls_own_forward(module: nn.Module) -> bool:
    """Return whether calls of a module run the ``forward`` of its class."""
    forward = vars(module).get("forward")
    return forward is None or hasattr(forward, CALLS_FORWARD)


def checkpoint_keywords(wrapper: CheckpointWrapper) -> dict[str, Any]:
    """Return the keyword arguments that the wrapper passes to torch's ``checkpoint``."""
    return getattr(wrapper.checkpoint_fn, "keywords", {})


def profiler_is_running() -> bool:
    """Whether this thread has a profiler of torch. A second one takes its events, and crashes when it is exported."""
    return bool(torch.autograd._profiler_enabled())


def compilation_is_disabled() -> bool:
    """Whether torch.compile is switched off, as with ``TORCHDYNAMO_DISABLE=1``: compiled modules run uncompiled."""
    import torch._dynamo.config as dynamo  # only compiled models need it

    return bool(dynamo.disable)


def allow_checkpointed_graphs() -> None:
    """Let torch.compile trace layers that checkpoint themselves, or read numbers, as experts do, in one graph.

    Accelerate sets the same for the layers that it compiles.
    """
    import torch._dynamo.config as dynamo  # only compiled modules need it

    for name in ("capture_scalar_outputs", "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        getattr(dynamo, name)  # torch raises if it is set and does not exist
        setattr(dynamo, name, True)


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the hooks of ``register_hook`` by their numbers. A removed hook leaves the mapping."""
    return _NO_HOOKS if tensor._backward_hooks is None else tensor._backward_hooks


def runs_after_accumulation(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has hooks of ``register_post_accumulate_grad_hook``."""
    return bool(tensor._post_accumulate_grad_hooks)


def storage_key(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a number that identifies a storage, or the storage of a tensor, while it exists. Views have equal keys."""
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return int(storage._cdata)


def operator_name(func: Any) -> str:
    """Return the name of a dispatched operator without namespace: ``mm``."""
    return str(func._schema.name).partition("::")[2]


def is_view(func: Any) -> bool:
    """Whether a dispatched operator returns a view of an argument."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a dispatched operator; 0 if torch does not count it."""
    from torch.utils.flop_counter import flop_registry  # it imports torch's decompositions

    count = flop_registry.get(func._overloadpacket)
    if count is None and operator_name(func) == "_grouped_mm":  # each row is multiplied by the matrix of its group
        return 2 * int(args[0].shape[0] * args[0].shape[1] * args[1].shape[-1])
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def called_by_engine(depth: int) -> bool:
    """Return whether the autograd engine has called a function without Python in between.

    Args:
        depth: number of frames between the caller and that function's own.
    """
    return sys._getframe(depth + 1).f_code.co_name == "_engine_run_backward"


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the time-out of a process group, by default that of all ranks; ``None`` if its backend reports none."""
    group = dist.group.WORLD if group is None else group
    backends: list[Any] = [group._get_backend(device) for device in group._device_types] if group is not None else []
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return max((timeout for timeout in found if timeout is not None), default=None)


def supports_cpu(group: dist.ProcessGroup) -> bool:
    """Whether collectives of a process group accept tensors in host memory."""
    return any(device.type == "cpu" for device in group._device_types)


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of a process group, by default of all ranks. Collectives that have started keep theirs."""
    # torch 2.14 and older have only the private function, which 2.15 deprecates.
    public = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    public(timeout, group)


def flight_record() -> bytes:
    """Return what torch has recorded of the collectives on accelerators, as JSON. Asks CUDA for events.

    Empty without an accelerator: the collectives of CPU ranks are recorded by ``hangs.calls``, also when they end.
    """
    if torch.accelerator.current_accelerator() is None:
        return b""
    module: Any = torch._C._distributed_c10d
    dump = getattr(module, "_dump_nccl_trace_json", None) or module._dump_fr_trace_json
    return bytes(dump(includeCollectives=True, onlyActive=False))


def resolve_group(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a functional collective, which accepts several forms; ``None`` for lists of ranks."""
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple):
        return group[0].get_group(group[1]) if isinstance(group[0], DeviceMesh) else None
    if isinstance(group, str):
        return distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else None


def can_create_state(optimizer: Any) -> bool:
    """Whether ``create_state`` works: the optimizer is an 8-bit, 4-bit or fp8 Adam of torchao (read from 0.18)."""
    return hasattr(optimizer, "_new_buffer") and type(optimizer).__module__.startswith("torchao.")


def create_state(optimizer: Any, parameter: torch.Tensor, key: str) -> Any:
    """Return the state tensor ``key`` of a parameter as in the first step: zeros, quantized if the shard is large."""
    return optimizer._new_buffer(parameter, key == "exp_avg")


_NONE_WITHOUT = ("allow_checkpointed_graphs", "current_backward", "timeout_of", "set_timeout", "resolve_group")
_FALSE_WITHOUT = (
    "can_divide_muon", "in_backward", "runs_after_accumulation", "profiler_is_running", "compilation_is_disabled",
    "supports_cpu",
)  # fmt: skip
_OFF = {**dict.fromkeys(_NONE_WITHOUT), **dict.fromkeys(_FALSE_WITHOUT, False)}
_OTHERS = {"num_changes": 0, "flight_record": b"", "runs_in_backward": True, "gradient_hooks": _NO_HOOKS}
guard_functions(globals(), CONTRACTS, off={**_OFF, **_OTHERS})
