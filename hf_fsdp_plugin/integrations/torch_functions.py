"""Replacements of functions of torch, and of functions that write files, for the weights of sharded models.

``torch.save`` and safetensors, and so ``Accelerator.save``, refuse shards: a call that torch or pickle makes never
waits for other ranks. Objects without shards are written as before. ``torch.distributed.checkpoint`` and the
checkpoints of this package write plain tensors, so they are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.loading.deferred_weights import explain
from hf_fsdp_plugin.backends.optimizers.clipping import check_whole_gradients, clip_grad_norm
from hf_fsdp_plugin.backends.sharding.script_access import gathers_root_itself
from hf_fsdp_plugin.backends.sharding.shard import sharded_models, sharded_optimizers
from hf_fsdp_plugin.backends.sharding.state_dicts import STATE_FIX
from hf_fsdp_plugin.backends.sharding.unused_parameters import backward_ended
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.modules import plain_tensors


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
    memory = (plain.untyped_storage().data_ptr() for plain in plain_tensors([tensor]))
    return tensor.numel() > 0 and any(address in flat_storages for address in memory)


def flat_storages() -> set[int]:
    """Return the addresses of the memory of all flat shards of FSDP1, and of their optimizer state."""
    storages: set[int] = set()
    parameters: set[int] = set()
    for unit, flat in (pair for model in sharded_models() for pair in fsdp1.flat_units(model)):
        group = fsdp1.shard_group(unit)
        if group is not None and group.size() > 1:
            storages.add(fsdp1.local_shard(flat).untyped_storage().data_ptr())
            parameters.update(map(id, fsdp1.parameter_objects(flat)))
    for optimizer in sharded_optimizers() if parameters else ():
        for state in (state for parameter, state in optimizer.state.items() if id(parameter) in parameters):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
                    storages.update(plain.untyped_storage().data_ptr() for plain in plain_tensors([value]))
    return storages


def _named_tensors(obj: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers and modules, with names for messages."""
    seen, containers = set() if seen is None else seen, Mapping | list | tuple | set | frozenset | nn.Module
    if isinstance(obj, torch.Tensor):
        yield name or "a tensor", obj
    elif isinstance(obj, containers) and id(obj) not in seen:
        seen.add(id(obj))
        if isinstance(obj, nn.Module):
            items: Any = obj.named_parameters()
        else:
            items = obj.items() if isinstance(obj, Mapping) else enumerate(obj)
        for key, child in items:
            yield from _named_tensors(child, f"{name}.{key}" if name else str(key), seen)


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


def add_remedy(error: BaseException) -> None:
    """Add a problem with its remedy to an error that torch raises for a shard of FSDP2, or for a deferred weight.

    Python prints it after the error.
    """
    if not isinstance(error, RuntimeError) or getattr(error, "__notes__", None):
        return
    if (problem := explain(error)) is not None:
        error.add_note(str(problem))
    elif "DTensor" in str(error) and sharded_models():
        message = "a whole tensor meets a shard: a copy of a weight from before prepare(), or a module inside a unit "
        message += "of FSDP that was called outside of the unit's forward."
        fix = "For averages of the weights (EMAModel, AveragedModel), average the shards: model.parameters() after "
        fix += "prepare(). To read or change whole weights, use hfp.full_parameters. Call the module in the forward of "
        fix += "its unit, or set fsdp_auto_wrap_policy: NO_WRAP, or another fsdp_transformer_layer_cls_to_wrap."
        error.add_note(str(Problem(code="FSDP-E627", message=message, fix=fix)))
