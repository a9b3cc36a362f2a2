"""Access to FSDP2's states and parameter groups (``torch/distributed/fsdp/_fully_shard/``).

Versions of torch differ in how FSDP2 handles dtypes and frees gradients: :func:`is_since_2_15`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.contracts import contracts_in, guard_functions, import_target, release_of
from hf_fsdp_plugin.torch_private.functions import in_backward, is_sharded, num_changes, runs_after_accumulation
from hf_fsdp_plugin.torch_private.live_unit import Facts, Held, LiveUnit, attribute_or
from hf_fsdp_plugin.torch_private.modules import Inputs, casts_itself, forward_pre_hooks, local_tensor, unconverted

CONTRACTS = contracts_in(__file__)

_UNSHARDED = import_target("torch.distributed.fsdp._fully_shard._fsdp_param:ShardedState.UNSHARDED", CONTRACTS)
_common = import_target("torch.distributed.fsdp._fully_shard._fsdp_common", CONTRACTS)
_BACKWARD_PREFETCH_MARK = "_hf_fsdp_backward_prefetch"


SINCE_2_15: Final = "2.15"
"""The release since which each parameter of a unit has its own dtype (``param_dtype_override_fn``), autograd adds each
gradient to the one of earlier micro-batches as soon as it is computed, instead of FSDP2 after the backward of the unit,
and ``foreach_reduce`` keeps no whole gradient until it returns. 2.14.1 behaves as 2.11."""


def is_since_2_15() -> bool:
    """Whether FSDP2 of the installed torch behaves as :data:`SINCE_2_15` describes."""
    return release_of(torch.__version__)[:2] >= release_of(SINCE_2_15)


def state_of(module: FSDPModule) -> Any:
    """Return the state object that the modules of one ``fully_shard`` call share."""
    return module._get_fsdp_state()


def states_in(model: nn.Module) -> list[Any]:
    """Return the state of each ``fully_shard`` call in a model, in the order of the module tree."""
    return list(dict.fromkeys(state_of(module) for module in model.modules() if isinstance(module, FSDPModule)))


def modules_of(state: Any) -> tuple[nn.Module, ...]:
    """Return the modules of one ``fully_shard`` call, in the order of the call."""
    return tuple(state._modules)


def set_mixed_precision(state: Any, policy: MixedPrecisionPolicy) -> None:
    """Replace the policy of one ``fully_shard`` call. The units must not be gathered."""
    state._mp_policy = policy
    for group in _parameter_groups(state):
        if hasattr(group, "mp_policy"):
            group.mp_policy = policy
        else:  # torch 2.15: each parameter has a policy
            for managed in group.fsdp_params:
                managed.mp_policy = _policy_of(policy, managed.sharded_param)
        if state._is_root is not None:
            group._init_mp_dtypes()  # otherwise the first forward does this


def _policy_of(policy: MixedPrecisionPolicy, parameter: nn.Parameter) -> MixedPrecisionPolicy:
    """Return the policy of one parameter, as ``fully_shard`` resolves it from torch 2.15 on."""
    if (override := getattr(policy, "param_dtype_override_fn", None)) is None:
        return policy
    values: dict[str, Any] = {"param_dtype_override_fn": None}
    return replace(policy, param_dtype=override(parameter) or policy.param_dtype, **values)


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
                parameter._local_tensor = local.detach().clone()
            item.reset_sharded_param()


def convert_shards(model: nn.Module, wrapper_of: Callable[[nn.Module, str], Callable[..., Any] | None]) -> None:
    """Replace shards by tensors that convert themselves in the all-gather, which have ``fsdp_pre_all_gather``.

    Args:
        wrapper_of: takes a module and an attribute; returns the function that makes such a tensor of the shard, or
            ``None`` to keep the shard.
    """
    groups = (group for state in states_in(model) for group in _parameter_groups(state))
    for item in (item for group in groups for item in group.fsdp_params):
        if (wrap := wrapper_of(item._module_info.module, item._module_info.param_name)) is not None:
            item.sharded_param._local_tensor = wrapped = wrap(item.sharded_param._local_tensor)
            item._sharded_param_data = wrapped.view(-1)
            item._init_extensions()


def local_changes(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return how often parameters and their shards were changed in place. Called before each forward."""
    found: list[int] = []
    for parameter in parameters:
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        found += (parameter._version, local._version, unconverted(local)._version)
    return found


def mark_backward_prefetch(hook: Any, kind: str) -> None:
    """Mark a forward pre-hook of a unit as a replacement of torch's implicit backward prefetch."""
    setattr(hook, _BACKWARD_PREFETCH_MARK, kind)


def keep_requires_grad(root: Any) -> None:
    """Copy ``requires_grad`` of gathered parameters to their shards.

    A script sets it on the parameters in the module tree, as PEFT does when an adapter is disabled. If these are
    gathered, torch overwrites the value with that of the shard in the next all-gather. A unit without trainable
    parameters in its first forward has no dtype for gradients.
    """
    state = state_of(root)
    for group in (group for other in state._state_ctx.all_states for group in _parameter_groups(other)):
        for managed in group.fsdp_params:
            if managed.sharded_state is _UNSHARDED:
                needs_gradient = managed._unsharded_param.requires_grad
                if managed.sharded_param.requires_grad != needs_gradient:
                    managed.sharded_param.requires_grad_(needs_gradient)
        # Before torch 2.15, which has no such attribute, it is None if no parameter was trained in the first forward.
        has_dtype = getattr(group, "_orig_dtype", torch.float32) is not None
        if not has_dtype and any(managed.sharded_param.requires_grad for managed in group.fsdp_params):
            group._init_mp_dtypes()


def is_gathered(module: FSDPModule) -> bool:
    """Whether the parameters of a unit are gathered."""
    groups = _parameter_groups(state_of(module))
    return any(item.sharded_state is _UNSHARDED for group in groups for item in group.fsdp_params[:1])


def num_unit_changes(module: FSDPModule) -> tuple[int, int]:
    """Return how often a unit's shards and its gathered copies were changed in place, while it stays gathered."""
    items = [item for group in _parameter_groups(state_of(module)) for item in group.fsdp_params]
    shards = sum(local_changes(item.sharded_param for item in items))
    return shards, sum(num_changes(item._unsharded_param) for item in items if item.sharded_state is _UNSHARDED)


def compute_device(root: FSDPModule) -> torch.device:
    """Return the device on which the root is computed; offloaded shards are in CPU memory."""
    return state_of(root)._device


def is_idle(root: FSDPModule) -> bool:
    """Whether the root is neither in a forward nor in a backward."""
    state = state_of(root)
    return state._training_state is _common.TrainingState.IDLE and state._state_ctx.iter_forward_root is None


def is_outside_of_call(module: FSDPModule) -> bool:
    """Whether the hooks of a unit have not run: it is neither in a forward nor computed again in a backward."""
    return bool(state_of(module)._training_state is _common.TrainingState.IDLE)


def before_forward(root: FSDPModule, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Run the hook that runs before the root's forward. Return the inputs to pass on. Collective."""
    return state_of(root)._pre_forward(module, args, kwargs)


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


def backward_has_failed(root: FSDPModule) -> bool:
    """Whether a backward of the root has started and not ended, although none is running."""
    return bool(state_of(root)._state_ctx.post_backward_final_callback_queued) and not in_backward()


def discard_call(root: FSDPModule, *, backward: bool) -> bool:
    """Discard a forward or a backward that has raised an error, so that the next forward is a first one.

    Args:
        backward: whether to discard all gradients too, of which some units have none.

    Returns:
        Whether this version of torch can do so.
    """
    if (reset := getattr(root, "reset_iter_state", None)) is None:
        return False
    reset()
    for group in (group for other in state_of(root)._state_ctx.all_states for group in _parameter_groups(other)):
        for parameter in (*_parameters(group), *_wholes(group)) if backward else ():
            parameter.grad = None
        for item in group.fsdp_params if backward else ():
            if item.unsharded_accumulated_grad is not None:
                item.unsharded_accumulated_grad = None
    return True


def start_backward_at(module: FSDPModule, tensors: list[torch.Tensor]) -> None:
    """Start the unit's backward at these tensors too. They require gradients, and the unit has left its forward."""
    state = state_of(module)
    # Otherwise a checkpointed module is computed again in backward.
    if state._training_state is _common.TrainingState.IDLE:
        state._register_pre_backward_hook(tensors)


class GroupGradients:
    """The parameters of a unit without a gradient of this rank, in the backwards up to one that is reduced.

    The ranks reduce the same parameters of a unit whose backward has begun: those that this rank has not used with
    zeros. Parameters with hooks of ``register_post_accumulate_grad_hook`` are excepted: such a gradient would run them.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.num_parameters = len(group.fsdp_params)
        self.reset()
        group.pre_backward, group.post_backward = self._pre_backward, self._post_backward

    def reset(self) -> None:
        """Begin anew, after gradients were reduced."""
        self._has_begun = False
        self._used: set[int] = set()
        self._filled: set[int] = set()

    @property
    def reduces(self) -> bool:
        """Whether the current backward reduces gradients, and over the replicas, too."""
        group = self._group
        return bool(group.reduce_grads and (group.all_reduce_grads or not _is_replicated(group)))

    def unused(self) -> list[int]:
        """Return the positions of the parameters that had no gradient before, and got zeros of this rank."""
        return sorted(self._filled - self._used)

    def remove(self, positions: list[int]) -> list[str]:
        """Remove the reduced gradients of these parameters. Return the names of those of which it is not possible."""
        for position in positions:
            self._group.fsdp_params[position].sharded_param.grad = None
        return []

    def _pre_backward(self, *args: Any) -> Any:
        self._has_begun = True
        return type(self._group).pre_backward(self._group, *args)

    def _post_backward(self, *args: Any) -> Any:
        # torch calls it at the end of each backward for all units, and reads gradients of what was never gathered.
        if wholes := _wholes(self._group):
            for whole in wholes:
                if whole.numel() == 0:
                    whole.grad = None  # torch cannot reduce a gradient without elements
            if self._has_begun and self._group.reduce_grads:
                self._complete()
            type(self._group).post_backward(self._group, *args)

    def _complete(self) -> None:
        """Add the missing gradients of zeros, and give all gradients one dtype, as the reduce-scatter needs it.

        Gradients of earlier micro-batches have the dtype of the reduction, those of the last one that of the
        computation. torch casts them if they are added up.
        """
        items = self._group.fsdp_params
        for position, item in enumerate(items):
            whole, shard = item._unsharded_param, item.sharded_param
            if item.unsharded_accumulated_grad is not None or whole.grad is not None:
                self._used.add(position)
            elif shard.requires_grad and whole.numel() and not runs_after_accumulation(shard):
                if shard.grad is None:
                    self._filled.add(position)
                whole.grad = _zeros_like(whole)
        latest = [item for item in items if item.unsharded_accumulated_grad is None]
        dtype = attribute_or(self._group, "_reduce_dtype", None)  # from torch 2.15 on, all gradients have one dtype
        if len(latest) < len(items) and dtype is not None:
            for item in latest:
                gradient = item._unsharded_param.grad
                if gradient is not None and gradient.dtype != dtype:
                    item._unsharded_param.grad = None
                    item.unsharded_accumulated_grad = gradient.to(dtype)


def _zeros_like(whole: torch.Tensor) -> torch.Tensor:
    """Return a gradient of zeros of a gathered parameter, whose memory may be freed."""
    dtype = getattr(whole, "grad_dtype", None) or whole.dtype
    if isinstance(whole, DTensor):
        return torch.zeros_like(whole, dtype=dtype)
    return torch.zeros(whole.shape, dtype=dtype, device=whole.device)


def watch_gradients(model: nn.Module, after_backward: Callable[[], None]) -> list[GroupGradients]:
    """Watch the gradients of the units of a model.

    Args:
        after_backward: called at the end of each backward, when FSDP2 has finished it.
    """
    states = states_in(model)
    for state in states:
        own = state._root_post_backward_final_callback
        state._root_post_backward_final_callback = partial(_call_both, own, after_backward)
    return [GroupGradients(group) for state in states for group in _parameter_groups(state)]


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def read_units(state: Any, *, is_root: bool) -> Iterator[LiveUnit]:
    """Return the units of one ``fully_shard`` call: one per mesh, or one empty unit if there are no parameters."""
    # If the root's flag is unset, the root keeps its parameters from the first forward on.
    reshard: Facts = {
        "reshard_asked": lambda group: None if state._auto_reshard_after_forward else _reshards(group),
        "reshards": lambda group: _reshards(group) and not (is_root and state._auto_reshard_after_forward),
    }
    of_state = (state, _STATE_FACTS)
    of_groups = [[(group, {**_GROUP_FACTS, **reshard})] for group in _parameter_groups(state)]
    for of_group in of_groups or [[]]:
        yield LiveUnit(2, is_root=is_root, parts=[of_state, *of_group], rows=CONTRACTS)


def _reshards(group: Any) -> bool:
    return group.post_forward_mesh_info is not None


def _parameter_groups(state: Any) -> list[Any]:
    """Return the parameter groups: torch 2.13 has a list with one group per mesh, torch 2.11 one group or ``None``."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [group] if group is not None else []


def _backward_prefetch(state: Any) -> str:
    ahead = [other for other in state._states_to_backward_prefetch if other is not state]
    if not state._states_to_backward_prefetch or ahead:
        return "pre"
    # A list that contains only the unit itself disables implicit prefetch; a marked hook replaces it.
    hooks = (hook for module in modules_of(state) for hook in forward_pre_hooks(module))
    marks = (getattr(hook, _BACKWARD_PREFETCH_MARK, None) for hook in hooks)
    return next((mark for mark in marks if mark is not None), "none")


def _held(item: Any) -> Held:
    info, shard = item._module_info, item.sharded_param
    return Held(info.module, info.param_name, shard.requires_grad, shard.numel(), local_tensor(shard))


def _parameters(group: Any) -> list[DTensor]:
    return [item.sharded_param for item in group.fsdp_params]


def _wholes(group: Any) -> list[nn.Parameter]:
    """Return the gathered parameters, which exist from the first all-gather on."""
    wholes = (attribute_or(item, "_unsharded_param", None) for item in group.fsdp_params)
    return [whole for whole in wholes if whole is not None]


def _master_dtypes(group: Any) -> tuple[torch.dtype, ...]:
    parameters = _parameters(group)
    trainable = [p for p in parameters if p.requires_grad]
    return tuple(sorted({p.dtype for p in (trainable or parameters)}, key=str))


def _gathered(group: Any) -> tuple[torch.Tensor, ...]:
    found = [tensor for item in group.fsdp_params for tensor in item.all_gather_outputs]
    found += [attribute_or(item, "_sharded_post_forward_param_data", None) for item in group.fsdp_params]
    return tuple(tensor for tensor in found if tensor is not None)


def _gradients(group: Any) -> tuple[torch.Tensor, ...]:
    found = {id(g): g for p in [*_parameters(group), *_wholes(group)] if (g := p.grad) is not None}
    # From torch 2.15 on, this attribute is the gradient of the gathered parameter.
    found |= {id(g): g for item in group.fsdp_params if (g := item.unsharded_accumulated_grad) is not None}
    return tuple(found.values())


def _is_unreduced(group: Any) -> bool:
    """Whether there are gradients of a backward without synchronization, which an optimizer step ignores."""
    return (
        group._partial_reduce_output is not None
        or any(item.unsharded_accumulated_grad is not None for item in group.fsdp_params)
        or any(whole.grad is not None for whole in _wholes(group))
    )


def _compute_dtypes(group: Any) -> tuple[torch.dtype, ...]:
    """Return the dtype of each gathered parameter. The first forward derives them from the policy."""
    return tuple(
        (item.param_dtype if hasattr(item, "param_dtype") else _policy(group, item).param_dtype)
        or item.sharded_param.dtype
        for item in group.fsdp_params
    )


def _compute_dtype(group: Any) -> torch.dtype:
    """Return the dtype of the gathered parameters; if there are several, the dtype of the policy."""
    dtypes = _compute_dtypes(group)
    if len(set(dtypes)) == 1:
        return dtypes[0]
    if hasattr(group, "mp_policy"):
        return _policy(group).param_dtype or _master_dtypes(group)[0]
    # A parameter that the policy excepts is gathered in the dtype of its shards.
    cast = (dtype for dtype, parameter in zip(dtypes, _parameters(group), strict=True) if dtype != parameter.dtype)
    return next(cast, _master_dtypes(group)[0])


def _reduce_dtype(group: Any) -> torch.dtype | None:
    """Return the dtype in which gradients are reduced; ``None`` if no parameter is trained.

    Without a reduce dtype in the policy, torch before 2.15 reduces in the dtype of the computation; from 2.15 on in
    that of the shards.
    """
    if not any(parameter.requires_grad for parameter in _parameters(group)):
        return None
    asked = attribute_or(group, "_reduce_dtype", None) or _policy(group).reduce_dtype
    return asked or (_compute_dtype(group) if hasattr(group, "mp_policy") else _master_dtypes(group)[0])


def _policy(group: Any, item: Any = None) -> MixedPrecisionPolicy:
    """Return the policy of a group; from torch 2.15 on, of one of its parameters, by default of the first."""
    return group.mp_policy if hasattr(group, "mp_policy") else (item or group.fsdp_params[0]).mp_policy


def _is_sharded(group: Any) -> bool:
    return isinstance(group.mesh_info, _common.FSDPMeshInfo)


def _is_replicated(group: Any) -> bool:
    return isinstance(group.mesh_info, _common.DDPMeshInfo)


def _coordinate(parameter: DTensor) -> tuple[int, ...]:
    """Return which of the shards of a parameter this rank has: its position on each axis that divides the parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(mesh.get_local_rank(axis) for axis, place in enumerate(placements) if is_sharded(place))


def _axes(group: Any) -> Mapping[str, int]:
    """Return the names and sizes of the axes of the meshes of the unit's parameters, such as ``tp``."""
    meshes = {parameter.device_mesh for parameter in _parameters(group)}
    return {name: mesh.size(dim) for mesh in meshes for dim, name in enumerate(mesh.mesh_dim_names or ())}


def _parameter_ids(group: Any) -> frozenset[int]:
    found: list[torch.Tensor] = [*_parameters(group)]
    with suppress(AttributeError):  # the ids of the shards are known also if torch lacks an attribute
        found += _wholes(group)
    return frozenset(map(id, found))


_STATE_FACTS: Facts = {
    "modules": modules_of,
    "device": lambda state: state._device,
    "output_dtype": lambda state: state._mp_policy.output_dtype,
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": lambda state: any(other is not state for other in state._states_to_forward_prefetch),
    "prefetched": lambda state: tuple(
        module for other in state._states_to_forward_prefetch for module in modules_of(other)
    ),
    "lazy": lambda state: state._is_root is None,
}
_GROUP_FACTS: Facts = {
    "modules": lambda group: tuple(group.modules),
    "held": lambda group: tuple(map(_held, group.fsdp_params)),
    "master_dtypes": _master_dtypes,
    "compute_dtype": _compute_dtype,
    "compute_dtypes": _compute_dtypes,
    "reduce_dtype": _reduce_dtype,
    "casts": lambda group: _policy(group).param_dtype is not None,
    "shard_size": lambda group: group.mesh_info.shard_mesh_size if _is_sharded(group) else 1,
    "shard_ranks": lambda group: (
        tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group)) if _is_sharded(group) else ()
    ),
    "axes": _axes,
    "coordinates": lambda group: tuple(map(_coordinate, _parameters(group))),
    "replicate_size": lambda group: group.mesh_info.replicate_mesh_size if _is_replicated(group) else 1,
    "hybrid": lambda group: _is_sharded(group) and _is_replicated(group),
    "reduces": lambda group: bool(group.reduce_grads),
    "all_reduces": lambda group: bool(group.all_reduce_grads),
    "reshards_after_backward": lambda group: bool(group.reshard_after_backward),
    "unreduced": _is_unreduced,
    "offloaded": lambda group: isinstance(group.offload_policy, CPUOffloadPolicy),
    "shards": lambda group: tuple(unconverted(item._sharded_param_data) for item in group.fsdp_params),
    "gathered": _gathered,
    "gradients": _gradients,
    "casting": lambda group: tuple(
        item._module_info.param_name for item in group.fsdp_params if casts_itself(item.sharded_param._local_tensor)
    ),
    "parameter_ids": _parameter_ids,
    "copy_ids": lambda group: frozenset(map(id, _wholes(group))),
}

_OFF: dict[str, Any] = dict.fromkeys(("is_idle", "backward_has_failed", "is_outside_of_call"), False)
guard_functions(globals(), CONTRACTS, off={**_OFF, "keep_requires_grad": None, "watch_gradients": []})
