"""FSDP1's flat parameters (``torch/distributed/fsdp/_flat_param.py``, ``_init_utils.py``, ``_runtime_utils.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel

from hf_fsdp_plugin.contracts import contracts_in, guard_functions, import_target
from hf_fsdp_plugin.strategies import BY_TORCH_NAME, Strategy
from hf_fsdp_plugin.torch_private.functions import in_backward, num_changes, runs_in_backward
from hf_fsdp_plugin.torch_private.live_unit import Facts, Held, LiveUnit, attribute_or
from hf_fsdp_plugin.torch_private.modules import Inputs
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

CONTRACTS = contracts_in(__file__)

_common = import_target("torch.distributed.fsdp._common_utils", CONTRACTS)
_runtime = import_target("torch.distributed.fsdp._runtime_utils", CONTRACTS)
_unit_module = import_target("torch.distributed.fsdp.fully_sharded_data_parallel", CONTRACTS)

Registration = tuple[nn.Module, str]
"""A module, and the attribute name of a parameter that is registered in it."""
_BACKWARD_PREFETCH_NAMES = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One original parameter inside a unit's flat parameter.

    Attributes:
        name: name relative to the unit's module. It may contain names of wrappers.
        module, attribute: where the parameter is registered.
        shape: shape of the whole parameter.
        requires_grad: whether it requires a gradient; without ``use_orig_params``, the value of the flat parameter.
        parameter: the object in the module tree; ``None`` without ``use_orig_params``.
        start, stop: range of elements of the flattened parameter in this rank's shard; equal if the shard has none.
        offset: index of element ``start`` in this rank's shard.
    """

    name: str
    module: nn.Module
    attribute: str
    shape: torch.Size
    requires_grad: bool
    parameter: nn.Parameter | None
    start: int
    stop: int
    offset: int


def strategy_of_unit(unit: Any) -> Strategy:
    return BY_TORCH_NAME[unit.sharding_strategy.name]


def flat_parameter(unit: Any) -> Any | None:
    """Return the unit's flat parameter; ``None`` for a unit without parameters."""
    return unit._handle.flat_param if unit._handle is not None else None


def flat_units(root: nn.Module) -> list[tuple[Any, Any]]:
    """Return the units of a model that have parameters, with their flat parameters."""
    units = [(unit, flat_parameter(unit)) for unit in FullyShardedDataParallel.fsdp_modules(root)]
    return [(unit, flat) for unit, flat in units if flat is not None]


def flat_shapes(root: nn.Module) -> Iterator[tuple[torch.Size, ...]]:
    """Yield the shapes of the parameters in each flat parameter of a model."""
    for _, flat in flat_units(root):
        yield flat._shapes


def original_parameters(flat: Any) -> list[Member]:
    """Return the original parameters in a flat parameter, in order."""
    parameters = flat._params if flat._params is not None else [None] * len(flat._fqns)
    columns = zip(flat._fqns, flat._param_infos, flat._shapes, flat._shard_param_infos, parameters, strict=True)
    return [
        Member(
            name=name,
            module=info.module,
            attribute=info.param_name,
            shape=shape,
            requires_grad=bool((flat if parameter is None else parameter).requires_grad),
            parameter=parameter,
            start=shard.intra_param_start_idx if shard.in_shard else 0,
            stop=shard.intra_param_end_idx + 1 if shard.in_shard else 0,
            offset=shard.offset_in_shard if shard.in_shard else 0,
        )
        for name, info, shape, shard, parameter in columns
    ]


def original_views(unit: Any, whole: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the unit's gathered shards with the original shapes, in the order of the members."""
    size = unit._handle.flat_param._unpadded_unsharded_size.numel()
    return list(unit._handle._get_unflat_views(whole[:size]))


def tied_places(flat: Any) -> list[tuple[Registration, Registration]]:
    """Return each further registration of a tied parameter, with the registration in its :class:`Member`."""
    infos = flat._shared_param_infos
    return [((info.module, info.param_name), (info.prim_module, info.prim_param_name)) for info in infos]


def names_in(flat: Any, name: str) -> list[str]:
    """Return the names of all original parameters in a flat parameter, tied names included.

    The names may contain names of wrappers.

    Args:
        name: the name of the flat parameter in ``named_parameters``.
    """
    prefix = name.removesuffix(_unit_module.FLAT_PARAM)
    shared = [f"{path}.{attribute}" if path else attribute for attribute, _, path, *_ in flat._shared_param_infos]
    return [prefix + relative for relative in [*flat._fqns, *shared]]


def parameter_objects(flat: Any) -> list[nn.Parameter]:
    """Return all objects that can represent a part of a flat parameter in the module tree."""
    return [flat, *(flat._params or ()), *(flat._shared_params or ())]


def allow_gradients_of_compute_dtype(root: nn.Module) -> None:
    """Let tied parameters of replicated units have gradients of another dtype than their own.

    Without synchronization, such a unit keeps gradients in the dtype of the computation. torch assigns them to the
    first name of a parameter through ``.data``, but to the other names without it, which raises for fp32 parameters.
    """
    for _, flat in flat_units(root):
        for parameter in flat._shared_params or ():
            if parameter.requires_grad and hasattr(parameter, "grad_dtype"):
                parameter.grad_dtype = None


def reduce_after_any_forward(root: nn.Module) -> None:
    """Reduce gradients in mixed precision, and of offloaded shards, also if a forward before has had no backward.

    torch registers the reduction in the first forward, on the node that accumulates its gradients. If the gathered
    parameters have another dtype or device than the shards, each forward has its own node. So the reduction would not
    run if the graph of the first forward is not used, as for a loss that is only logged or skipped. It must run once,
    after the last accumulation, which is that of the first forward in the graph.
    """
    for unit, _ in flat_units(root):
        if unit.mixed_precision.param_dtype is not None or unit.cpu_offload.offload_params:
            unit.module.register_forward_pre_hook(partial(_follow_accumulation, unit, []))


@torch.compiler.disable
def _follow_accumulation(unit: Any, nodes: list[Any], *_: Any) -> None:
    """Register the reduction on the node of this forward too. A forward pre-hook of the gathered module of a unit.

    Args:
        nodes: the nodes of the forwards since the last backward.
    """
    handle = unit._handle
    registered = _attribute(handle.flat_param, "_post_backward_hook_state")
    if registered is None or not handle.flat_param.requires_grad or not torch.is_grad_enabled() or in_backward():
        return
    node = handle.flat_param.expand_as(handle.flat_param).grad_fn.next_functions[0][0]
    if node is registered[0]:
        nodes[:] = [node]
        return
    earlier = tuple(nodes)

    def reduce(*_: Any) -> None:
        if not any(map(runs_in_backward, earlier)):
            _runtime._post_backward_hook(unit, handle, None)

    node.register_hook(reduce)
    nodes.append(node)


def is_flattened(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a flat parameter or a part of one."""
    return _common._is_fsdp_flattened(parameter) or isinstance(parameter, FlatParameter)


def _attribute(flat: Any, name: str) -> Any:
    """Return an attribute of a flat parameter, which is a plain ``Parameter``; ``None`` before torch has set it."""
    return attribute_or(flat, name, None, FlatParameter)


def local_shard(flat: Any) -> torch.Tensor:
    """Return this rank's shard. Before the first forward, the flat parameter itself is the shard."""
    shard = _attribute(flat, "_local_shard")
    return flat.data if shard is None else shard


def compute_device(unit: Any) -> Any:
    """Return the device on which the unit is computed; offloaded shards are in CPU memory."""
    return unit.compute_device


def shard_group(unit: Any) -> dist.ProcessGroup | None:
    """Return the group over which the unit's parameters are sharded; ``None`` if each rank has all of them."""
    return unit.process_group if strategy_of_unit(unit).is_sharded else None


def replicate_group(unit: Any) -> dist.ProcessGroup | None:
    """Return the group of ranks with the same shard; ``None`` if this rank is the only one."""
    strategy = strategy_of_unit(unit)
    if not strategy.is_sharded:
        return unit.process_group
    return unit._inter_node_pg if strategy.hybrid else None


def free_gathered(unit: Any) -> None:
    """Free the copies of parameters that are still gathered or in low precision after an evaluation.

    Otherwise the next forward would ignore values that are loaded into the shards, and the shapes of parameters would
    differ from those of their optimizer state.
    """
    if is_gathered(unit):
        handle = unit._handle
        whole = handle.uses_sharded_strategy and not handle.needs_unshard()
        _runtime._reshard(unit, handle, free_unsharded_flat_param=whole)


def is_gathered(unit: Any) -> bool:
    """Whether the unit has copies of its parameters that are gathered or in low precision."""
    handle = unit._handle
    if handle is None or _attribute(handle.flat_param, "_local_shard") is None:  # before the first forward
        return False
    if handle.uses_sharded_strategy and not handle.needs_unshard():
        return True
    return bool(handle.flat_param.data_ptr() != handle.flat_param._local_shard.data_ptr())


def num_unit_changes(unit: Any) -> tuple[int, int]:
    """Return how often a unit's shards and its gathered copies were changed in place, while it stays gathered."""
    flat = unit._handle.flat_param
    if flat._params is None:  # the flat parameter is that of the optimizer
        return num_changes(flat), 0
    # The gathered copies are views of the flat parameter.
    return sum(map(num_changes, flat._params)), num_changes(flat)


def has_freed(root: Any) -> bool:
    """Return whether the gathered parameters of any unit are freed."""
    return any(unit._handle.needs_unshard() for unit, _ in flat_units(root))


def register_parameters(unit: Any) -> None:
    """Register the parameters of an unsharded unit (``NO_SHARD``) again, if its last forward replaced them by tensors.

    torch does so at the end of the backward, but not for a unit without trainable parameters. Its ``state_dict`` then
    raises ``AssertionError``, because the parameters are not in it.
    """
    handle = unit._handle
    if handle is None or handle.uses_sharded_strategy or not handle._use_orig_params or not is_idle(unit):
        return
    if any(info.param_name not in own_parameters(info.module) for info in handle.flat_param._param_infos):
        _runtime._reshard(unit, handle, free_unsharded_flat_param=False)


def is_idle(unit: Any) -> bool:
    """Whether the unit is neither in a forward nor in a backward, and its parameters are not summoned."""
    return bool(unit.training_state is _common.TrainingState.IDLE)


def is_summoned(unit: Any) -> bool:
    """Whether the unit is inside ``summon_full_params``."""
    return bool(unit.training_state is _common.TrainingState.SUMMON_FULL_PARAMS)


def before_forward(root: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Do what ``root.forward`` does before it calls the wrapped module. Return the inputs to pass on. Collective."""
    args, kwargs = _runtime._root_pre_forward(root, root, args, kwargs)
    return _runtime._pre_forward(root, root._handle, _runtime._pre_forward_unshard, module, args, kwargs)


def after_forward(root: Any, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Do what ``root.forward`` does after it has called the wrapped module. Return the output to pass on."""
    return _runtime._post_forward(root, root._handle, _runtime._post_forward_reshard, root, None, output)


def backward_has_failed(root: Any) -> bool:
    """Whether a backward of the root has started and not ended, although none is running."""
    # Only the root has it, from the end of its first forward with gradients on, so it cannot be probed before.
    return bool(vars(root).get("_post_backward_callback_queued")) and not in_backward()


@torch.no_grad()  # otherwise some units would keep their gathered parameters
def discard_call(root: Any, *, backward: bool) -> bool:
    """Discard a forward or a backward that has raised an error, so that the next forward is a first one.

    Args:
        backward: whether to discard all gradients too, of which some units have none.

    Returns:
        Whether this version of torch can do so.
    """
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    synchronizes: list[Any] = [unit._sync_gradients for unit in units]
    for unit in units:
        unit._sync_gradients = False  # then gradients are left as they are
    try:
        _runtime._post_backward_final_callback(root, root)
    finally:
        for unit, value in zip(units, synchronizes, strict=True):
            unit._sync_gradients = value
    for unit, flat in flat_units(root):
        free_gathered(unit)
        if backward:
            flat._post_backward_called = False
            for parameter in parameter_objects(flat):
                parameter.grad = None
            if _attribute(flat, "_saved_grad_shard") is not None:
                del flat._saved_grad_shard
    return True


def start_backward_at(unit: Any, tensors: list[torch.Tensor]) -> None:
    """Start the unit's backward at these tensors too. They require gradients, and the unit has left its forward."""
    if is_idle(unit):  # otherwise a checkpointed module computes its output again inside backward
        _runtime._register_pre_backward_hooks(unit, unit, tensors, unit._handle)


class FlatGradients:
    """The parameters of a unit without a gradient of this rank, in the backwards up to one that is reduced.

    The parameters in a forward are views of one flat parameter: outputs of ``torch.split``. In the backward, the node
    of that split receives a gradient for each view, or ``None``, for which autograd fills in zeros.
    """

    def __init__(self, name: str, unit: Any) -> None:
        self._name, self._unit, self._flat = name, unit, unit._handle.flat_param
        self.num_parameters = len(self._flat._param_infos)
        self._outputs: list[int] = []
        self.reset()
        handle = unit._handle
        original = handle._use_unsharded_views

        def use_unsharded_views(as_params: bool) -> None:
            original(as_params)
            if not as_params:
                self._watch_views()

        handle._use_unsharded_views = use_unsharded_views

    def reset(self) -> None:
        """Begin anew, after gradients were reduced."""
        self._used: set[int] = set()
        self._had_gradient: list[bool] = []

    @property
    def reduces(self) -> bool:
        """Whether the current backward reduces gradients."""
        return bool(self._unit._sync_gradients)

    def unused(self) -> list[int]:
        """Return the positions of the parameters that had no gradient before, and got none of this rank."""
        if len(self._used) == self.num_parameters:
            return []
        return [
            position
            for position, had_gradient in enumerate(self._had_gradient)
            if not had_gradient and position not in self._used and self._parameters[position].requires_grad
        ]

    def remove(self, positions: list[int]) -> list[str]:
        """Remove the reduced gradients of these parameters. Return the names of those of which it is not possible."""
        flat = self._flat
        if flat._params is None:
            return [f"{self._name}.{flat._fqns[position]}".lstrip(".") for position in positions]
        removed = {flat._param_infos[position][:2] for position in positions}
        for position in positions:
            flat._params[position].grad = None
            flat._is_grad_none_mask[position] = True  # otherwise torch may show the gradient again
        for shared, info in zip(flat._shared_params, flat._shared_param_infos, strict=True):
            if (info.prim_param_name, info.prim_module) in removed:
                shared.grad = None
        return []

    @property
    def _parameters(self) -> list[nn.Parameter]:
        parameters: list[nn.Parameter] = self._flat._params or [self._flat] * self.num_parameters
        return parameters

    def _watch_views(self) -> None:
        infos = self._flat._param_infos
        view = getattr(infos[0].module, infos[0].param_name)
        if view.grad_fn is None:  # nothing is trained
            return
        split = view.grad_fn.next_functions[0][0]
        if not self._outputs:
            views = [getattr(info.module, info.param_name) for info in infos]
            origins = [view.grad_fn.next_functions[0] for view in views]
            if any(node is not split for node, _ in origins):
                self._used.update(range(self.num_parameters))
                return
            self._outputs = [output for _, output in origins]
        split.register_prehook(self._record)

    def _record(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        used = [index for index, output in enumerate(self._outputs) if gradients[output] is not None]
        self._used.update(used)
        if not self._had_gradient and len(used) < self.num_parameters:
            self._had_gradient = [parameter.grad is not None for parameter in self._parameters]


def watch_gradients(model: nn.Module) -> list[FlatGradients]:
    """Watch the gradients of the units of a model."""
    named = ((name, unit) for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel))
    return [FlatGradients(name, unit) for name, unit in named if flat_parameter(unit) is not None]


def reduce_earlier_gradients(root: Any) -> None:
    """Reduce the gradients of units that earlier micro-batches have used, but not this one. At the end of its backward.

    torch reduces them only in a backward through the unit, and raises at the end of another one.
    """
    if not root._sync_gradients:
        return
    states = _common.HandleTrainingState
    for unit, flat in reversed(flat_units(root)):
        was_used = _attribute(flat, "_post_backward_called") and flat.grad is not None
        if was_used and unit._handle._training_state is not states.BACKWARD_POST:
            unit.training_state = _common.TrainingState.FORWARD_BACKWARD
            unit._handle._training_state = states.BACKWARD_PRE
            _runtime._post_backward_hook(unit, unit._handle, flat)


def original_dtype(unit: Any) -> torch.dtype | None:
    """Return the dtype of the unit's shards; ``None`` for a unit without parameters."""
    return unit._handle._orig_param_dtype if unit._handle is not None else None


def read_unit(unit: Any, *, is_root: bool) -> LiveUnit:
    """Return the unit of one ``FullyShardedDataParallel`` module."""
    # _post_forward keeps the root's parameters under every strategy.
    own: Facts = {"reshards": lambda unit: strategy_of_unit(unit).reshards_after_forward and not is_root}
    parts = [(unit, {**_UNIT_FACTS, **own})] + ([(unit._handle, _HANDLE_FACTS)] if unit._handle is not None else [])
    return LiveUnit(1, is_root=is_root, parts=parts, rows=CONTRACTS)


def _gradients(handle: Any) -> tuple[torch.Tensor, ...]:
    flat = handle.flat_param
    found = [flat.grad, _attribute(flat, "_saved_grad_shard"), _attribute(flat, "_cpu_grad")]
    found += [member.parameter.grad for member in original_parameters(flat) if member.parameter is not None]
    return tuple(tensor for tensor in found if tensor is not None)


def _held(handle: Any) -> tuple[Held, ...]:
    shard, members = local_shard(handle.flat_param), original_parameters(handle.flat_param)
    parts = [shard.narrow(0, each.offset, each.stop - each.start) for each in members]
    found = zip(members, parts, strict=True)
    return tuple(Held(m.module, m.attribute, m.requires_grad, m.shape.numel(), part) for m, part in found)


def _is_unreduced(handle: Any) -> bool:
    """Whether the flat gradient belongs to the gathered parameters, as after a backward under ``no_sync``."""
    flat = handle.flat_param
    return flat.grad is not None and handle.uses_sharded_strategy and flat.grad.shape != local_shard(flat).shape


_UNIT_FACTS: Facts = {
    "modules": lambda unit: (unit,),
    "device": compute_device,
    "strategy": lambda unit: strategy_of_unit(unit).name,
    "shard_size": lambda unit: group.size() if (group := shard_group(unit)) is not None else 1,
    "coordinates": lambda unit: ((group.rank() if (group := shard_group(unit)) is not None else 0,),),
    "shard_ranks": lambda unit: tuple(dist.get_process_group_ranks(g)) if (g := shard_group(unit)) is not None else (),
    "replicate_size": lambda unit: group.size() if (group := replicate_group(unit)) is not None else 1,
    "hybrid": lambda unit: strategy_of_unit(unit).hybrid,
    "reduces": lambda unit: bool(unit._sync_gradients),
    "all_reduces": lambda unit: bool(unit._sync_gradients),
    "reshard_asked": lambda unit: strategy_of_unit(unit).reshards_after_forward,
    "offloaded": lambda unit: bool(unit.cpu_offload.offload_params),
    "backward_prefetch": lambda unit: _BACKWARD_PREFETCH_NAMES.get(getattr(unit.backward_prefetch, "name", ""), "none"),
    "forward_prefetch": lambda unit: bool(unit.forward_prefetch),
    "limit_all_gathers": lambda unit: bool(unit.limit_all_gathers),
    "use_orig": lambda unit: bool(unit._use_orig_params),
    # _lazy_init sets _is_root in the first forward.
    "lazy": lambda unit: unit._is_root is None,
}
_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
_HANDLE_FACTS: Facts = {
    "held": _held,
    "master_dtypes": lambda handle: (handle._orig_param_dtype,),
    "compute_dtype": lambda handle: handle._fwd_bwd_param_dtype,
    "reduce_dtype": lambda handle: (
        handle._reduce_dtype if any(member.requires_grad for member in original_parameters(handle.flat_param)) else None
    ),
    "casts": lambda handle: handle._low_prec_param_dtype_specified,
    "shards": lambda handle: (local_shard(handle.flat_param),),
    "gathered": lambda handle: tuple(
        tensor for name in _GATHERED if (tensor := _attribute(handle.flat_param, name)) is not None
    ),
    "gradients": _gradients,
    "unreduced": _is_unreduced,
    "parameter_ids": lambda handle: frozenset(id(parameter) for parameter in parameter_objects(handle.flat_param)),
}

_OFF: dict[str, Any] = {"watch_gradients": [], "reduce_earlier_gradients": None, "backward_has_failed": False}
guard_functions(globals(), CONTRACTS, off={**_OFF, "discard_call": False})
