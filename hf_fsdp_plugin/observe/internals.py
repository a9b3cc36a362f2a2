"""The only file of this room that reads torch's private attributes.

Read from torch 2.13.0 (``torch/distributed/fsdp/_flat_param.py``, ``_init_utils.py`` and ``_fully_shard/``).
torch 2.11 differs in one place, an FSDP2 state's parameter groups: see :func:`_parameter_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.strategies import BY_TORCH_NAME

# Put on a unit by the FSDP2 backend when its own hooks start the next all-gather after backward, or nobody does.
BACKWARD_PREFETCH_MARK = "_hf_fsdp_backward_prefetch"

_BACKWARD_PREFETCH_NAMES = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveUnit:
    """One group of parameters that torch gathers and frees together, as it is now on this rank.

    Attributes:
        device: where it computes; offloaded shards lie elsewhere.
        modules: the wrapped modules, in torch's order; FSDP1 has exactly one, and it is the wrapper itself.
        num_params: elements of the whole unit, padding left out.
        num_local_params: elements of this rank's shard, padding left out.
        num_frozen: those of ``num_params`` that need no gradient.
        num_local_trainable: those of ``num_local_params`` that need a gradient.
        master_dtypes: dtypes of the trainable shards (of all shards where nothing is trainable).
        compute_dtype: dtype of the gathered parameters; ``None`` where the unit owns none.
        reduce_dtype: dtype of the gradient reduction; ``None`` where nothing is reduced.
        output_dtype: dtype to which outputs are cast; ``None`` for no cast, or where FSDP1 has no such thing.
        casts: whether a compute dtype was set at all (as against left as the parameters are).
        strategy: FSDP1's own word; ``None`` under FSDP2, where mesh and reshard flag tell it.
        hybrid: whether the mesh has a replicate axis beside its shard axis.
        reshard_asked: the flag as set; ``None`` where FSDP2 was left to choose.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: whether it fetches another unit ahead in forward.
        lazy: torch has not yet initialised it, which it does in the first forward.
        shards: this rank's parameter memory; ``gathered``: whole parameters not freed; ``gradients``: those alive.
        parameter_ids: ``id`` of every parameter object that can stand for it in the module tree.
    """

    version: Literal[1, 2]
    modules: tuple[nn.Module, ...]
    is_root: bool
    device: torch.device | None = None
    num_params: int = 0
    num_local_params: int = 0
    num_frozen: int = 0
    num_local_trainable: int = 0
    master_dtypes: tuple[torch.dtype, ...] = ()
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    casts: bool = False
    strategy: str | None = None
    shard_size: int = 1
    shard_rank: int = 0
    replicate_size: int = 1
    hybrid: bool = False
    reshard_asked: bool | None = None
    reshards: bool = False
    offloaded: bool = False
    backward_prefetch: str = "pre"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig: bool = True
    lazy: bool = False
    shards: tuple[torch.Tensor, ...] = ()
    gathered: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()
    parameter_ids: frozenset[int] = frozenset()


def live_units(model: nn.Module) -> Iterator[LiveUnit]:
    """Every FSDP1 and FSDP2 unit in the module tree's order, the outermost first. Parameterless units are included."""
    seen: set[int] = set()
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDP):
            unit_modules: tuple[nn.Module, ...] = (module,)
            units = [_fsdp1_unit(module, is_root=id(module) not in inside)]
        elif isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if id(state) in seen:
                continue
            seen.add(id(state))
            unit_modules = tuple(state._modules)
            units = list(_fsdp2_units(state, is_root=all(id(m) not in inside for m in unit_modules)))
        else:
            continue
        inside.update(id(inner) for outer in unit_modules for inner in outer.modules())
        yield from units


def _fsdp1_unit(module: Any, *, is_root: bool) -> LiveUnit:
    strategy = BY_TORCH_NAME[module.sharding_strategy.name]
    group_size = module.process_group.size()
    hybrid, sharded, reshards = strategy.hybrid, strategy.is_sharded, strategy.reshards_after_forward
    facts: dict[str, Any] = {
        "version": 1,
        "modules": (module,),
        "is_root": is_root,
        "device": module.compute_device,
        "strategy": strategy.name,
        "shard_size": group_size if sharded else 1,
        "shard_rank": module.process_group.rank() if sharded else 0,
        "replicate_size": module._inter_node_pg.size() if hybrid else (1 if sharded else group_size),
        "hybrid": hybrid,
        "reshard_asked": reshards,
        # _post_forward keeps the root's parameters, whatever the strategy says.
        "reshards": reshards and not is_root,
        "offloaded": bool(module.cpu_offload.offload_params),
        "backward_prefetch": _BACKWARD_PREFETCH_NAMES.get(getattr(module.backward_prefetch, "name", ""), "none"),
        "forward_prefetch": bool(module.forward_prefetch),
        "limit_all_gathers": bool(module.limit_all_gathers),
        "use_orig": bool(module._use_orig_params),
        # Set in the first forward (_lazy_init); until then nobody knows which unit is the root.
        "lazy": module._is_root is None,
    }
    handle = module._handle
    if handle is None:
        return LiveUnit(**facts)
    return LiveUnit(**facts, **_flat_parameter_facts(handle))


def _flat_parameter_facts(handle: Any) -> dict[str, Any]:
    flat = handle.flat_param
    whole = [shape.numel() for shape in flat._shapes]
    local = [info.numel_in_shard if info.in_shard else 0 for info in flat._shard_param_infos]
    # Without use_orig_params there is one parameter, and one requires_grad for all of it.
    originals = list(flat._params) if flat._params is not None else [flat] * len(whole)
    trains = [bool(parameter.requires_grad) for parameter in originals]
    # _local_shard appears in the first forward; before it the flat parameter itself is the shard.
    shard = getattr(flat, "_local_shard", None)
    gathered = [
        getattr(flat, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
    ]
    gradients = [getattr(flat, name, None) for name in ("grad", "_saved_grad_shard", "_cpu_grad")]
    if flat._params is not None:
        gradients += [parameter.grad for parameter in flat._params]
    shared = list(flat._shared_params or ())
    return {
        "num_params": sum(whole),
        "num_local_params": sum(local),
        "num_frozen": sum(n for n, train in zip(whole, trains, strict=True) if not train),
        "num_local_trainable": sum(n for n, train in zip(local, trains, strict=True) if train),
        "master_dtypes": (handle._orig_param_dtype,),
        "compute_dtype": handle._fwd_bwd_param_dtype,
        "reduce_dtype": handle._reduce_dtype if any(trains) else None,
        "casts": handle._low_prec_param_dtype_specified,
        "shards": (shard if shard is not None else flat.data,),
        "gathered": tuple(tensor for tensor in gathered if tensor is not None),
        "gradients": tuple(tensor for tensor in gradients if tensor is not None),
        "parameter_ids": frozenset(id(parameter) for parameter in [flat, *(flat._params or ()), *shared]),
    }


def _fsdp2_units(state: Any, *, is_root: bool) -> Iterator[LiveUnit]:
    modules = tuple(state._modules)
    ahead = [other for other in state._states_to_backward_prefetch if other is not state]
    backward = "pre"
    if state._states_to_backward_prefetch and not ahead:
        # A list that names only the unit itself switches implicit prefetch off; the mark says what came in its place.
        backward = next(
            (getattr(m, BACKWARD_PREFETCH_MARK) for m in modules if hasattr(m, BACKWARD_PREFETCH_MARK)), "none"
        )
    auto = state._auto_reshard_after_forward
    common: dict[str, Any] = {
        "version": 2,
        "is_root": is_root,
        "device": state._device,
        "output_dtype": state._mp_policy.output_dtype,
        "backward_prefetch": backward,
        "forward_prefetch": any(other is not state for other in state._states_to_forward_prefetch),
        "lazy": state._is_root is None,
    }
    groups = _parameter_groups(state)
    if not groups:
        yield LiveUnit(modules=modules, **common)
    for group in groups:
        reshards = group.post_forward_mesh_info is not None
        yield LiveUnit(
            modules=tuple(group.modules),
            # Left to itself, FSDP2 keeps the root's parameters from the first forward on.
            reshards=reshards and not (is_root and auto),
            reshard_asked=None if auto else reshards,
            **common,
            **_parameter_group_facts(group),
        )


def _parameter_groups(state: Any) -> list[Any]:
    """torch 2.13 has a list (one group a mesh); 2.11 one group or ``None``."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameter_group_facts(group: Any) -> dict[str, Any]:
    mesh, policy, managed = group.mesh_info, group.mp_policy, list(group.fsdp_params)
    parameters = [p.sharded_param for p in managed]
    local = [p.to_local() for p in parameters]
    trainable = [p for p in parameters if p.requires_grad]
    master = sorted({p.dtype for p in (trainable or parameters)}, key=str)
    compute = policy.param_dtype or master[0]
    shards, gathered, gradients, ids = [], [], [], []
    for item, parameter in zip(managed, parameters, strict=True):
        ids.append(id(parameter))
        shards.append(item._sharded_param_data)
        gathered += item.all_gather_outputs
        if getattr(item, "_sharded_post_forward_param_data", None) is not None:
            gathered.append(item._sharded_post_forward_param_data)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        if item.unsharded_accumulated_grad is not None:
            gradients.append(item.unsharded_accumulated_grad)
        whole = getattr(item, "_unsharded_param", None)
        if whole is not None:
            ids.append(id(whole))
            if whole.grad is not None:
                gradients.append(whole.grad)
    return {
        "num_params": sum(p.numel() for p in parameters),
        "num_local_params": sum(t.numel() for t in local),
        "num_frozen": sum(p.numel() for p in parameters if not p.requires_grad),
        "num_local_trainable": sum(t.numel() for t, p in zip(local, parameters, strict=True) if p.requires_grad),
        "master_dtypes": tuple(master),
        "compute_dtype": compute,
        # foreach_reduce takes the gradients' own dtype, the compute dtype, where no reduce dtype is set.
        "reduce_dtype": (policy.reduce_dtype or compute) if trainable else None,
        "casts": policy.param_dtype is not None,
        "shard_size": getattr(mesh, "shard_mesh_size", 1),
        "shard_rank": getattr(mesh, "shard_mesh_rank", 0),
        "replicate_size": getattr(mesh, "replicate_mesh_size", 1),
        "hybrid": hasattr(mesh, "shard_mesh_size") and hasattr(mesh, "replicate_mesh_size"),
        "offloaded": isinstance(group.offload_policy, CPUOffloadPolicy),
        "shards": tuple(shards),
        "gathered": tuple(gathered),
        "gradients": tuple(gradients),
        "parameter_ids": frozenset(ids),
    }


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` stands before any module's forward (a wrapper module, or ``module.compile()``)."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def non_persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers outside the state dict: no checkpoint ever fills them."""
    for name, module in model.named_modules():
        for attribute in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(attribute)
            if buffer is not None:
                yield f"{name}.{attribute}".lstrip("."), buffer
