"""Replacements of functions that write files: they write whole weights, and refuse shards that cannot be gathered.

``torch.save`` writes a ``DTensor`` as the shard of one rank, without an error. The state dict of a model that FSDP2 has
sharded is gathered, as it already is under FSDP1. Optimizer state, modules and flat shards are refused. Objects without
shards are written as before. ``torch.distributed.checkpoint`` and the checkpoints of this package write plain tensors,
so they are not affected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.arrivals import together
from hf_fsdp_plugin.backends.shard import sharded_models, sharded_optimizers
from hf_fsdp_plugin.integrations.state_dicts import FIX
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private import fsdp1

_OPTIMIZER_FIX = "call `accelerator.save_state(folder)` on all ranks."


def torch_save(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Write an object with whole weights. Collective if it contains the state dict of a model under FSDP2."""
    obj = with_whole_weights("torch.save", obj)
    check_no_shards("torch.save", obj)
    return original(obj, *args, **kwargs)


def find_shared_tensors(original: Callable[..., Any], state_dict: Mapping[str, Any]) -> Any:
    """Check the tensors that safetensors is about to write. Each of its functions that writes calls this one."""
    check_no_shards("safetensors", state_dict, dtensors=True)
    return original(state_dict)


def accelerator_save(original: Callable[..., Any], accelerator: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather and check on every rank, although only the main process writes: no rank continues without the file."""
    obj = with_whole_weights("Accelerator.save", obj, keep=accelerator.is_local_main_process)
    check_no_shards("Accelerator.save", obj, dtensors=bool(kwargs.get("safe_serialization")))
    return original(obj, *args, **kwargs)


def with_whole_weights(function: str, obj: Any, *, keep: bool = True) -> Any:
    """Return an object with whole tensors on the CPU instead of the ``DTensor`` weights of sharded models.

    Collective if the object contains any. The state dicts of optimizers and modules are returned unchanged.

    Args:
        function: the function that writes the object, for messages.
        keep: whether this rank writes the object. Otherwise its tensors are empty.
    """
    meshes = {
        parameter.device_mesh
        for model in sharded_models()
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    }
    if not meshes or not any(isinstance(tensor, DTensor) for _, tensor in _tensors(obj, skip=_is_written_as_it_is)):
        return obj

    written: dict[object, torch.Tensor] = {}

    def gather(tensor: Any) -> Any:
        # The mesh tells the weights of a model from tensors of the script, also on a rank whose shard is empty.
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

    with together(f"{function} of the weights of a model", fix=FIX):
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


def check_no_shards(function: str, obj: Any, *, dtensors: bool = False) -> None:
    """Raise ``SpecError`` if ``obj`` contains shards, while there is a sharded model in this process.

    Args:
        dtensors: whether to refuse the ``DTensor`` objects of a single rank too.
    """
    models = sharded_models()
    if not models:
        return
    storages = set(_flat_storages(models))
    found = [
        name
        for name, tensor in _tensors(obj)
        if is_shard(tensor, storages) or (dtensors and isinstance(tensor, DTensor))
    ]
    if found:
        message = (
            f"{function} would write one rank's part of {plural(len(found), 'tensor')} instead of the whole tensors: "
            f"{format_names(found, 3)}."
        )
        raise SpecError([Problem(code="FSDP-E672", message=message, fix=f"{FIX} For optimizers: {_OPTIMIZER_FIX}")])


def is_shard(tensor: torch.Tensor, flat_storages: set[int]) -> bool:
    """Return whether a tensor is a part of a whole one, or a ``DTensor``, which is read only by the same ranks.

    Args:
        flat_storages: addresses of the memory of FSDP1's flat shards, and of their optimizer state.
    """
    if isinstance(tensor, DTensor):
        return tensor.device_mesh.size() > 1
    if not flat_storages or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in flat_storages


def flat_storages() -> set[int]:
    """Return the addresses of the memory of all flat shards of FSDP1, and of their optimizer state."""
    return set(_flat_storages(sharded_models()))


def _flat_storages(models: list[nn.Module]) -> Iterator[int]:
    parameters: set[int] = set()
    for unit in (module for model in models for module in model.modules() if isinstance(module, FSDP)):
        flat, group = fsdp1.flat_parameter(unit), fsdp1.shard_group(unit)
        if flat is not None and group is not None and group.size() > 1:
            yield fsdp1.local_shard(flat).untyped_storage().data_ptr()
            parameters.update(map(id, fsdp1.parameter_objects(flat)))
    for optimizer in sharded_optimizers() if parameters else ():
        for state in (state for parameter, state in optimizer.state.items() if id(parameter) in parameters):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.dim() and value.layout == torch.strided:
                    yield value.untyped_storage().data_ptr()


def _tensors(obj: Any, skip: Callable[[Any], bool] = lambda _: False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers and modules, with a name for messages. ``skip``: what is not entered."""
    waiting: list[tuple[str, Any]] = [("", obj)]
    seen: set[int] = set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield name or "a tensor", value
            continue
        if (
            not isinstance(value, Mapping | list | tuple | set | frozenset | nn.Module)
            or id(value) in seen
            or skip(value)
        ):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            items: Any = value.named_parameters()
        elif isinstance(value, Mapping):
            items = value.items()
        else:
            items = enumerate(value)
        children = [(f"{name}.{key}" if name else str(key), child) for key, child in items]
        waiting.extend(reversed(children))
