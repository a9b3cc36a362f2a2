"""The files of a model: those that ``from_pretrained`` reads, and those that ``save_pretrained`` writes.

``from_pretrained`` reads a checkpoint of any state dict type.

``save_pretrained`` of a sharded model of Transformers or PEFT, or of a model in a sharded model, is called on all
ranks. Rank 0 writes config, generation config and custom code with the original method, and every rank writes its
shards of the weights. A model that Transformers stores in another form than it computes with, a part of a sharded
model, and a model that is uploaded are gathered on rank 0 instead, and the original method writes them. The weights are
written in the dtype of the parameters that the optimizer updates, which the original method writes too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import convert_file_size_to_int
from accelerate.utils.modeling import is_peft_model
from transformers.utils import logging

from hf_fsdp_plugin.backends.ranks.agreement import collective_call, gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.sharding.buffers import send_buffers
from hf_fsdp_plugin.backends.sharding.shard import ModuleLocation, locate_module
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, safetensors_file
from hf_fsdp_plugin.checkpoint.saved_state import ModelShards
from hf_fsdp_plugin.checkpoint.whole_weights import with_whole_weights
from hf_fsdp_plugin.checkpoint.writing.state_files import gathered_state
from hf_fsdp_plugin.integrations.patching import has_fsdp_settings
from hf_fsdp_plugin.integrations.peft import adapter_state, as_unsharded
from hf_fsdp_plugin.integrations.saving import FIX, bind_call, call_name, exporting, gathered, manager, shards_at
from hf_fsdp_plugin.integrations.session import attributes_in_block
from hf_fsdp_plugin.integrations.torch_functions import flat_storages, is_shard
from hf_fsdp_plugin.integrations.transformers import private
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem, SpecError
from hf_fsdp_plugin.text import format_names, plural

_NOT_SHARED = "FSDP-E405"


def resolve_files(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Find the files of a model, which may be those of a merged copy of a checkpoint."""
    if not has_fsdp_settings():
        return original(*args, **kwargs)
    call = bind_call(original, args, kwargs)
    source = call["pretrained_model_name_or_path"]
    if source is not None and os.path.isdir(source) and not call["gguf_file"]:
        call["pretrained_model_name_or_path"] = os.fspath(with_whole_weights(Path(source)))
    return original(**call)


def save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the whole of a sharded model, or of a model in one. Collective, unless ``state_dict`` is given.

    Of a model of PEFT, only the weights that PEFT stores are gathered and written: adapters, ``modules_to_save``, and
    embeddings if they are stored.
    """
    place = None if gathered().paused else locate_module(model)
    if place is None:
        return original(*args, **kwargs)
    call, answer = bind_call(original, args, kwargs), gathered().state_of(model)
    if call.get("distributed_checkpoint"):  # every rank writes its shards to a checkpoint of torch
        with collective_call(call_name("save_pretrained", model), fix=FIX):
            send_buffers(place.root)
            return original(**call)
    if (given := call.get("state_dict")) is not None:
        # `get_state_dict` returns an empty one on all ranks but rank 0. Then the other ranks write nothing.
        writes = answer is not None or dist.get_rank() == 0 or bool(given)
        if not call["is_main_process"] or not writes:
            return None
        _check_given_state(model, place, given)
        return _write(original, model, call, given)
    if answer is not None:
        return _write(original, model, call, answer)
    with collective_call(call_name("save_pretrained", model), fix=FIX):
        _save_together(original, model, place, call)
    return None


def _save_together(original: Callable[..., Any], model: Any, place: ModuleLocation, call: dict[str, Any]) -> None:
    """Write the weights of all ranks to the folders of the main processes. Collective."""
    with on_all_ranks("reading the layout of the model"):
        _check_supported(model)
        shards = shards_at(place)
    folder = str(Path(call["save_directory"]).absolute())
    folders = [folder for folder, writes in gather_objects((folder, bool(call["is_main_process"]))) if writes]
    if not folders:
        return
    call["save_directory"] = folders[0]
    adapters = stores_adapters(model)
    is_whole = adapters or len(set(folders)) > 1 or place.name or call["push_to_hub"] or call["variant"]
    is_whole = is_whole or is_stored_differently(model, shards, convert=call["save_original_format"])
    if not is_whole and _write_side_by_side(original, model, place, call):
        return
    settings = {name: call[name] for name in ("save_embedding_layers",) if name in call}  # of PEFT's models
    state = adapter_state(model, shards, **settings) if adapters else gathered_state(shards)
    with on_all_ranks(f"writing {folders[0]}"):
        if dist.get_rank() == 0:
            _write(original, model, call, state)


def _write_side_by_side(original: Callable[..., Any], model: Any, place: ModuleLocation, call: dict[str, Any]) -> bool:
    """Write the original's files without weights on rank 0, and this rank's shards of the weights.

    Returns:
        Whether they were written: false if the ranks do not share the folder.
    """
    final = Path(call["save_directory"])
    try:
        with exporting(place.root, final) as save:
            with on_all_ranks(f"writing {final}"):
                if dist.get_rank() == 0:
                    with without_progress_bar():
                        _write(original, model, {**call, "save_directory": str(save.folder)}, {})
                    (save.folder / safetensors_file(HF_MODEL)).unlink(missing_ok=True)
            size = convert_file_size_to_int(call["max_shard_size"])
            manager().save_model(place.root, save, "full", max_shard_size=size)
    except CheckpointError as error:
        if any(problem.code != _NOT_SHARED for problem in error.problems):
            raise
        return False
    return True


def _write(original: Callable[..., Any], model: Any, call: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """Call the original method for a given state dict, on this rank only."""
    with ExitStack() as stack:
        if not is_peft_model(model):
            tensors = {id(tensor): tensor for name, tensor in state.items() if name not in _buffer_names(model)}
            num_parameters = sum(tensor.numel() for tensor in tensors.values())  # the index of the files contains it
            stack.enter_context(attributes_in_block(model, num_parameters=lambda *args, **kwargs: num_parameters))
            stack.enter_context(private.without_distributed_config(model))
        if stores_adapters(model):
            stack.enter_context(as_unsharded(model, state))
        return original(**{**call, "state_dict": dict(state), "is_main_process": True})


def stores_adapters(model: Any) -> bool:
    """Return whether only the adapters are stored for ``from_pretrained``: PEFT's models, and ``model.add_adapter``."""
    return is_peft_model(model) or private.has_adapters(model)


def _buffer_names(model: Any) -> set[str]:
    return {canonical_name(name) for name, _ in model.named_buffers()}


def is_stored_differently(model: Any, shards: ModelShards, *, convert: bool = True) -> bool:
    """Return whether Transformers stores a model with different names or shapes, for example for fused experts.

    Args:
        convert: whether the format of older versions is written (``save_original_format``).
    """
    on_meta = {held.name: torch.empty(held.shape, dtype=held.dtype, device="meta") for held in shards.tensors}
    if on_meta.keys() & set(private.ignored_on_save(model)):
        return True
    tied = private.tied_weights(model)
    if any(name in tied for name in shards.aliases.values()):  # it is stored under another of its names
        return True
    if not convert:
        return False
    try:
        stored = private.stored_state(model, dict(on_meta))
    except Exception:  # the conversion computes with the values, which the meta device does not have
        return True
    return {name: tensor.shape for name, tensor in stored.items()} != {n: t.shape for n, t in on_meta.items()}


def _check_given_state(model: Any, place: ModuleLocation, state: Mapping[str, Any]) -> None:
    """Raise ``SpecError`` if a given state dict lacks weights of the model, or has shards instead of whole tensors."""
    shards, storages = shards_at(place), flat_storages()
    names, ignored, buffers = shards.names(), set(private.ignored_on_save(model)), _buffer_names(model)
    quantized, only_trained = private.is_quantized(model), stores_adapters(model)
    missing, partial = [], []
    for held in shards.tensors:
        given = [state[name] for name in names[held.name] if name in state]
        if any(is_shard(each, storages) or not (quantized or tuple(each.shape) == held.shape) for each in given):
            partial.append(held.name)
        is_required = not only_trained or not (held.frozen or held.name in buffers)
        if not given and is_required and not set(names[held.name]) & ignored:
            missing.append(held.name)
    parts = [f"lacks {plural(len(missing), 'weight')} of the model ({format_names(missing, 3)})"] if missing else []
    parts += [f"has parts of {plural(len(partial), 'weight')} ({format_names(partial, 3)})"] if partial else []
    if parts:
        message = f"the state_dict of save_pretrained {' and '.join(parts)}, so the saved model would be incomplete."
        fix = "Pass the result of accelerator.get_state_dict(model), which all ranks must call, on the main process."
        raise SpecError([Problem(code="FSDP-E671", message=message, fix=fix)])


def _check_supported(model: Any) -> None:
    if private.is_quantized(model) and not stores_adapters(model):
        message = f"the weights of {type(model).__name__} are quantized and sharded, and cannot be stored as one model."
        fix = "Save the adapters that were trained (PeftModel.save_pretrained); the base model is unchanged."
        raise SpecError([Problem(code="FSDP-E673", message=message, fix=fix)])


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide the progress bars of Transformers in this block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
