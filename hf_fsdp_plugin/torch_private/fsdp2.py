"""Access to FSDP2's states and parameter groups (``torch/distributed/fsdp/_fully_shard/``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from hf_fsdp_plugin.torch_private.live_unit import LiveUnit
from hf_fsdp_plugin.torch_private.modules import LOCAL_TENSOR_ATTRIBUTE

_BACKWARD_PREFETCH_MARK = "_hf_fsdp_backward_prefetch"


def state_of(module: FSDPModule) -> Any:
    """Return the state object that the modules of one ``fully_shard`` call share."""
    return module._get_fsdp_state()


def modules_of(state: Any) -> tuple[nn.Module, ...]:
    """Return the modules of one ``fully_shard`` call, in the order of the call."""
    return tuple(state._modules)


def set_mixed_precision(state: Any, policy: MixedPrecisionPolicy) -> None:
    """Replace the policy of one ``fully_shard`` call. The units must not be gathered."""
    state._mp_policy = policy
    for group in _parameter_groups(state):
        group.mp_policy = policy
        if state._is_root is not None:
            group._init_mp_dtypes()  # otherwise the first forward does this


def own_shards(state: Any) -> None:
    """Make FSDP2 use the parameters that are in the modules now, and copy shards that are views of a larger storage.

    ``from_pretrained`` replaces the parameters of a sharded model, and a shard may be a view of the whole parameter, so
    that every rank keeps the whole model in memory. FSDP2 itself reads the parameters again in the first forward.
    """
    for group in _parameter_groups(state):
        for item in group.fsdp_params:
            parameter = getattr(item._module_info.module, item._module_info.param_name)
            local = parameter.to_local()
            if local.untyped_storage().nbytes() > item.padded_sharded_param_size.numel() * local.itemsize:
                setattr(parameter, LOCAL_TENSOR_ATTRIBUTE, local.detach().clone())
            item.reset_sharded_param()


def mark_backward_prefetch(hook: Any, kind: str) -> None:
    """Mark a forward pre-hook of a unit as a replacement of torch's implicit backward prefetch."""
    setattr(hook, _BACKWARD_PREFETCH_MARK, kind)


def keep_requires_grad(root: FSDPModule) -> None:
    """Copy ``requires_grad`` of gathered parameters to their shards.

    A script sets it on the parameters in the module tree, as PEFT does when an adapter is disabled. If these are
    gathered, torch overwrites the value with that of the shard in the next all-gather. A unit without trainable
    parameters in its first forward has no dtype for gradients.
    """
    state = state_of(root)
    for group in (group for other in state._state_ctx.all_states for group in _parameter_groups(other)):
        for managed in group.fsdp_params:
            if managed.sharded_state is ShardedState.UNSHARDED:
                needs_gradient = managed._unsharded_param.requires_grad
                if managed.sharded_param.requires_grad != needs_gradient:
                    managed.sharded_param.requires_grad_(needs_gradient)
        has_dtype = getattr(group, "_orig_dtype", torch.float32) is not None  # the first forward sets it
        if not has_dtype and any(managed.sharded_param.requires_grad for managed in group.fsdp_params):
            group._init_mp_dtypes()


def reshards_after_forward(state: Any, *, is_root: bool) -> bool:
    """Whether any parameters are freed after forward. A root's unset flag is decided in the first forward."""
    if is_root and getattr(state, "_auto_reshard_after_forward", False):
        return False
    return any(group.post_forward_mesh_info is not None for group in _parameter_groups(state))


def is_idle(root: FSDPModule) -> bool:
    """Whether the root is neither in a forward nor in a backward."""
    state = state_of(root)
    return state._training_state is TrainingState.IDLE and state._state_ctx.iter_forward_root is None


def before_forward(
    root: FSDPModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the hook that runs before the root's forward. Return the inputs to pass on. Collective."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = state_of(root)._pre_forward(module, args, kwargs)
    return inputs


def after_forward(root: FSDPModule, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Run the hook that runs after the root's forward. Return the output to pass on.

    torch 2.13 completes the groups of modules of which only some were called. Older versions would not gather such a
    group in the next forward, so it is completed here.
    """
    state = state_of(root)
    if not hasattr(state, "_force_complete_incomplete_states"):
        for other in state._state_ctx.all_states:
            if other is not state and other._modules_to_run_forward:
                other._modules_to_run_forward.clear()
                output = other._post_forward(module, args, output)
    return state._post_forward(module, args, output)


def start_backward_at(module: FSDPModule, tensors: list[torch.Tensor]) -> None:
    """Start the unit's backward at these tensors too. They require gradients, and the unit has left its forward."""
    state = state_of(module)
    if state._training_state is TrainingState.IDLE:  # otherwise a checkpointed module is computed again in backward
        state._register_pre_backward_hook(tensors)


def read_units(state: Any, *, is_root: bool) -> Iterator[LiveUnit]:
    """Return the units of one ``fully_shard`` call: one per mesh, or one empty unit if there are no parameters."""
    modules = modules_of(state)
    ahead = [other for other in state._states_to_backward_prefetch if other is not state]
    backward = "pre"
    if state._states_to_backward_prefetch and not ahead:
        # A list that contains only the unit itself disables implicit prefetch; a marked hook replaces it.
        hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
        marks = (getattr(hook, _BACKWARD_PREFETCH_MARK, None) for hook in hooks)
        backward = next((mark for mark in marks if mark is not None), "none")
    auto = state._auto_reshard_after_forward
    common: dict[str, Any] = {
        "version": 2,
        "is_root": is_root,
        "device": state._device,
        "output_dtype": state._mp_policy.output_dtype,
        "backward_prefetch": backward,
        "forward_prefetch": any(other is not state for other in state._states_to_forward_prefetch),
        "prefetched": tuple(module for other in state._states_to_forward_prefetch for module in modules_of(other)),
        "lazy": state._is_root is None,
    }
    groups = _parameter_groups(state)
    if not groups:
        yield LiveUnit(modules=modules, **common)
    for group in groups:
        reshards = group.post_forward_mesh_info is not None
        yield LiveUnit(
            modules=tuple(group.modules),
            # If the root's flag is unset, the root keeps its parameters from the first forward on.
            reshards=reshards and not (is_root and auto),
            reshard_asked=None if auto else reshards,
            **common,
            **_parameter_group_facts(group),
        )


def _parameter_groups(state: Any) -> list[Any]:
    """Return the parameter groups: torch 2.13 has a list with one group per mesh, torch 2.11 one group or ``None``."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group is not None else []


def _parameter_group_facts(group: Any) -> dict[str, Any]:
    mesh, policy, managed = group.mesh_info, group.mp_policy, list(group.fsdp_params)
    parameters = [p.sharded_param for p in managed]
    local = [p.to_local() for p in parameters]
    trainable = [p for p in parameters if p.requires_grad]
    master = sorted({p.dtype for p in (trainable or parameters)}, key=str)
    compute, reduce = _runtime_dtypes(group, master[0])
    wholes = [whole for item in managed if (whole := getattr(item, "_unsharded_param", None)) is not None]
    gathered = [tensor for item in managed for tensor in item.all_gather_outputs]
    gathered += [getattr(item, "_sharded_post_forward_param_data", None) for item in managed]
    gradients = [p.grad for p in [*parameters, *wholes]] + [item.unsharded_accumulated_grad for item in managed]
    return {
        "num_params": sum(p.numel() for p in parameters),
        "num_local_params": sum(t.numel() for t in local),
        "num_frozen": sum(p.numel() for p in parameters if not p.requires_grad),
        "num_local_trainable": sum(t.numel() for t, p in zip(local, parameters, strict=True) if p.requires_grad),
        "master_dtypes": tuple(master),
        "compute_dtype": compute,
        "reduce_dtype": reduce if trainable else None,
        "casts": policy.param_dtype is not None,
        "shard_size": getattr(mesh, "shard_mesh_size", 1),
        "shard_rank": getattr(mesh, "shard_mesh_rank", 0),
        "shard_ranks": _ranks_of(getattr(mesh, "shard_process_group", None)),
        "replicate_size": getattr(mesh, "replicate_mesh_size", 1),
        "hybrid": hasattr(mesh, "shard_mesh_size") and hasattr(mesh, "replicate_mesh_size"),
        "reduces": bool(group.reduce_grads),
        "all_reduces": bool(group.all_reduce_grads),
        # A backward without synchronization leaves these; an optimizer step ignores them.
        "unreduced": group._partial_reduce_output is not None
        or any(item.unsharded_accumulated_grad is not None for item in managed)
        or any(whole.grad is not None for whole in wholes),
        "offloaded": isinstance(group.offload_policy, CPUOffloadPolicy),
        "shards": tuple(item._sharded_param_data for item in managed),
        "parts": tuple(local),
        "gathered": tuple(tensor for tensor in gathered if tensor is not None),
        "gradients": tuple(tensor for tensor in gradients if tensor is not None),
        "places": tuple(
            (item._module_info.module, item._module_info.param_name, item.sharded_param.requires_grad)
            for item in managed
        ),
        "parameter_ids": frozenset(id(p) for p in [*parameters, *wholes]),
        "copy_ids": frozenset(map(id, wholes)),
    }


def _runtime_dtypes(group: Any, master: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which a group computes and reduces. The first forward derives them from the policy."""
    policy = group.mp_policy
    dtypes = {
        getattr(item, "param_dtype", policy.param_dtype) or item.sharded_param.dtype for item in group.fsdp_params
    }
    compute = (policy.param_dtype or master) if len(dtypes) != 1 else dtypes.pop()
    # Without a reduce dtype, foreach_reduce uses the dtype of the gradients, which is the compute dtype.
    return compute, getattr(group, "_reduce_dtype", policy.reduce_dtype) or compute


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()
