"""Replacements of functions of torch, and of functions that write files, for the weights of sharded models.

``torch.save`` and safetensors refuse shards: a call that torch or pickle makes never waits for other ranks.
``Accelerator.save``, which all ranks call, gathers the state dict of a model that FSDP2 has sharded, as it already is
under FSDP1. Optimizer state, modules and flat shards are refused. Objects without shards are written as before.
``torch.distributed.checkpoint`` and the checkpoints of this package write plain tensors, so they are not affected.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.loading.deferred_weights import explain
from hf_fsdp_plugin.backends.optimizers.clipping import check_whole_gradients, clip_grad_norm
from hf_fsdp_plugin.backends.ranks.agreement import collective_call
from hf_fsdp_plugin.backends.sharding.script_access import gathers_root_itself
from hf_fsdp_plugin.backends.sharding.shard import sharded_models, sharded_optimizers
from hf_fsdp_plugin.backends.sharding.state_dicts import STATE_FIX
from hf_fsdp_plugin.backends.sharding.unused_parameters import backward_ended
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private import fsdp1


def finish_backward(original: Callable[..., None], state: FSDP, *args: Any) -> None:
    """Finish a backward of FSDP1, with the gradients of units and parameters that some micro-batches do not use."""
    fsdp1.reduce_earlier_gradients(state)
    original(state, *args)
    backward_ended(state)


_OPTIMIZER_FIX = "call `accelerator.save_state(folder)` on all ranks."


def torch_save(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Write an object, unless it contains shards."""
    _check_no_shards("torch.save", obj)
    return original(obj, *args, **kwargs)


def find_shared_tensors(original: Callable[..., Any], state_dict: Mapping[str, Any]) -> Any:
    """Check the tensors that safetensors is about to write. Each of its functions that writes calls this one."""
    _check_no_shards("safetensors", state_dict, dtensors=True)
    return original(state_dict)


def accelerator_save(original: Callable[..., Any], accelerator: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather and check on every rank, although only the main process writes: no rank continues without the file."""
    obj = _with_gathered_weights(obj, keep=accelerator.is_local_main_process)
    _check_no_shards("Accelerator.save", obj, dtensors=bool(kwargs.get("safe_serialization")))
    return original(obj, *args, **kwargs)


def _with_gathered_weights(obj: Any, *, keep: bool) -> Any:
    """Return an object with whole tensors on the CPU instead of the ``DTensor`` weights of sharded models.

    Collective if the object contains any. The state dicts of optimizers and modules are not gathered.

    Args:
        keep: whether this rank writes the object. Otherwise its tensors are empty.
    """
    tensors = (tensor for _, tensor in _named_tensors(obj, _is_written_as_it_is))
    has_dtensors = bool(sharded_models()) and any(isinstance(tensor, DTensor) for tensor in tensors)
    meshes = {
        parameter.device_mesh
        for model in (sharded_models() if has_dtensors else ())
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    }
    written: dict[object, torch.Tensor] = {}

    def gather(tensor: Any) -> Any:
        # The mesh distinguishes weights of a model from tensors of the script, also on a rank whose shard is empty.
        if not isinstance(tensor, DTensor) or tensor.device_mesh not in meshes:
            return tensor
        whole = tensor.full_tensor().detach()
        if not keep:
            return whole.new_empty(0)
        local = tensor.to_local()
        if not local.numel():
            return whole.cpu()
        # Tied weights share the memory of their shards, and are written once.
        shard = local.untyped_storage().data_ptr(), local.storage_offset(), local.stride(), tensor.shape
        return written.setdefault(shard, whole.cpu())

    if not meshes:
        return obj
    with collective_call("Accelerator.save of the weights of a model", fix=STATE_FIX):
        return _replace_leaves(obj, gather)


def _replace_leaves(obj: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of nested containers with other values, except what :func:`_is_written_as_it_is`."""
    if _is_written_as_it_is(obj):
        return obj
    if isinstance(obj, MutableMapping):
        copied: Any = copy.copy(obj)  # it keeps the class, and the versions that torch stores as an attribute
        for key, value in obj.items():
            copied[key] = _replace_leaves(value, replace)
        return copied
    if isinstance(obj, list | tuple):
        values = [_replace_leaves(value, replace) for value in obj]
        return type(obj)(*values) if hasattr(obj, "_fields") else type(obj)(values)
    return replace(obj)


def _is_written_as_it_is(obj: Any) -> bool:
    """Whether an object is a module or the state dict of an optimizer, in which tensors cannot be exchanged."""
    return isinstance(obj, nn.Module) or (isinstance(obj, Mapping) and obj.keys() >= {"state", "param_groups"})


def _check_no_shards(function: str, obj: Any, *, dtensors: bool = False) -> None:
    """Raise ``SpecError`` if ``obj`` contains shards, while there is a sharded model in this process.

    Args:
        dtensors: whether to refuse the ``DTensor`` objects of a single rank too.
    """
    # The models are searched only if necessary: pickle calls torch.save for each tensor that ranks send each other.
    tensors = [*_named_tensors(obj)] if sharded_models() else []
    storages = flat_storages() if tensors else set()
    if found := [
        name for name, tensor in tensors if is_shard(tensor, storages) or (dtensors and isinstance(tensor, DTensor))
    ]:
        shards = f"one rank's part of {plural(len(found), 'tensor')}"
        message = f"{function} would write {shards} instead of the whole tensors: {format_names(found, 3)}."
        raise SpecError(
            [Problem(code="FSDP-E672", message=message, fix=f"{STATE_FIX} For optimizers: {_OPTIMIZER_FIX}")]
        )


def is_shard(tensor: torch.Tensor, flat_storages: set[int]) -> bool:
    """Return whether a tensor is a part of a whole one, or a ``DTensor``, which only the same ranks can read.

    Args:
        flat_storages: addresses of the memory of FSDP1's flat shards, and of their optimizer state.
    """
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.size() > 1
    if not flat_storages or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in flat_storages


def _flat_units() -> list[tuple[Any, Any]]:
    """Return the units of FSDP1 that have parameters, in all sharded models, with their flat parameters."""
    return [pair for model in sharded_models() for pair in fsdp1.flat_units(model)]


def flat_storages() -> set[int]:
    """Return the addresses of the memory of all flat shards of FSDP1, and of their optimizer state."""
    storages: set[int] = set()
    parameters: set[int] = set()
    for unit, flat in _flat_units():
        group = fsdp1.shard_group(unit)
        if group is not None and group.size() > 1:
            storages.add(fsdp1.local_shard(flat).untyped_storage().data_ptr())
            parameters.update(map(id, fsdp1.parameter_objects(flat)))
    for optimizer in sharded_optimizers() if parameters else ():
        for state in (state for parameter, state in optimizer.state.items() if id(parameter) in parameters):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
                    storages.add(value.untyped_storage().data_ptr())
    return storages


def _named_tensors(
    obj: Any, skip: Callable[[Any], bool] = lambda _: False, *, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers and modules, with names for messages, except in objects that ``skip``."""
    seen, containers = set() if seen is None else seen, Mapping | list | tuple | set | frozenset | nn.Module
    if isinstance(obj, torch.Tensor):
        yield name or "a tensor", obj
    elif isinstance(obj, containers) and id(obj) not in seen and not skip(obj):
        seen.add(id(obj))
        if isinstance(obj, nn.Module):
            items: Any = obj.named_parameters()
        else:
            items = obj.items() if isinstance(obj, Mapping) else enumerate(obj)
        for key, child in items:
            yield from _named_tensors(child, skip, name=f"{name}.{key}" if name else str(key), seen=seen)


def clip_grad_norm_(
    original: Callable[..., torch.Tensor],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip by the norm of all shards if FSDP1 has sharded a parameter. Collective in this case.

    Raises:
        SpecError: FSDP1 has sharded a parameter of a model that is not prepared.
        RuntimeError: the norm is not finite, if ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(fsdp1.is_flattened(parameter) for parameter in parameters):
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite:
        total = clip_grad_norm(sharded_models(), parameters, float("inf"), float(norm_type))
        if not torch.isfinite(total):
            raise RuntimeError(f"the norm of the gradients is {total.item()}, and error_if_nonfinite=True.")
    return clip_grad_norm(sharded_models(), parameters, float(max_norm), float(norm_type))


def get_total_norm(original: Callable[..., torch.Tensor], tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Refuse gradients of FSDP1's shards. An empty list on this rank may be a list of gradients on another one.

    Raises:
        SpecError: the result would be the norm of one rank's shards.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    check_whole_gradients(sharded_models(), tensors)
    return original(tensors, *args, **kwargs)


def register_forward_method(original: Callable[..., None], module: Any, method_name: str) -> None:
    """Leave a method that gathers the root itself: torch's gather around it would precede its wait for all ranks."""
    if not gathers_root_itself(getattr(module, method_name, None)):
        original(module, method_name)


_TORCH: Final = str(Path(torch.__file__).parent)


def add_remedy(error: BaseException) -> None:
    """Add a problem with its remedy to an error that torch raises because whole tensors meet shards.

    Python prints it after the error. The tensors are found in the frames of the traceback.
    """
    if not isinstance(error, RuntimeError) or getattr(error, "__notes__", None):
        return
    if (problem := explain(error)) is not None:
        error.add_note(str(problem))
    if not sharded_models():
        return
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [frame.f_locals.get("self") for frame in frames]
    modules = [caller for caller in callers if isinstance(caller, nn.Module)]
    if modules and (unit := _unit_not_called(modules)) is not None:
        inner, outer = (type(unwrapped(module)).__name__ for module in (modules[-1], unit))
        message = f"{inner}, a module inside a unit of FSDP ({outer}), was called outside of the unit's forward, where "
        message += "its parameters are shards."
        fix = f"Call it in the forward of {outer}, or let no {outer} be a unit: fsdp_auto_wrap_policy: NO_WRAP, or "
        fix += "another fsdp_transformer_layer_cls_to_wrap."
        error.add_note(str(Problem(code="FSDP-E642", message=message, fix=fix)))
    elif _has_shards(frames):
        message = "a whole tensor, such as a copy of a weight from before prepare(), was combined with a shard."
        fix = "For averages of the weights (EMAModel, AveragedModel), use hfp.ExponentialMovingAverage. To read or "
        fix += "change whole weights, use hfp.full_parameters."
        error.add_note(str(Problem(code="FSDP-E627", message=message, fix=fix)))


def _unit_not_called(callers: list[nn.Module]) -> nn.Module | None:
    """Return the unit of the innermost module that was called, if the unit was not called itself.

    The root unit is gathered in any call.
    """
    module = callers[-1]
    root = next((model for model in sharded_models() if any(inner is module for inner in model.modules())), None)
    inner_units = [unit for unit in root.modules() if unit is not root] if root is not None else []
    units = [unit for unit in inner_units if isinstance(unit, (FSDP, FSDPModule)) and module in set(unit.modules())]
    return units[-1] if units and not any(unit in callers for unit in units) else None


def _has_shards(frames: list[FrameType]) -> bool:
    """Return whether the innermost frame outside of torch has a shard among its variables, or in a list of them."""
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_TORCH)]
    values = list(own[-1].f_locals.values()) if own else []
    tensors = [tensor for value in values for tensor in (value if isinstance(value, list | tuple) else [value])]
    storages = flat_storages()
    return any(isinstance(tensor, torch.Tensor) and is_shard(tensor, storages) for tensor in tensors)
