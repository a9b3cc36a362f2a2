"""``PeftModel.save_pretrained`` of a sharded model: rank 0 writes the adapters with the original method.

Only the weights that the method stores are gathered: adapters, ``modules_to_save``, and embeddings if they are stored.
PEFT is imported inside functions only, as scripts without it must not import it.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.arrivals import together
from hf_fsdp_plugin.backends.shard import Place, place_of
from hf_fsdp_plugin.checkpoint import ModelShards, gathered_state
from hf_fsdp_plugin.integrations.adapters import remove_wrapper_names, with_module_names
from hf_fsdp_plugin.integrations.gathered import gathered, shards_at
from hf_fsdp_plugin.integrations.peft.prompts import prompt_embeddings
from hf_fsdp_plugin.integrations.transformers.save_pretrained import FIX, check_given_state
from hf_fsdp_plugin.problems import Problem, SpecError


def save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the whole adapters of a sharded model. Collective, unless ``state_dict`` is given."""
    place = None if gathered.paused else place_of(model)
    if place is None:
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    call: dict[str, Any] = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    call.pop("kwargs", None)
    answer, given = gathered.state_of(model), call.get("state_dict")
    if given is not None:
        if not call["is_main_process"] or (answer is None and dist.get_rank() != 0 and not given):
            return None
        check_given_state(model, place, given, only_trainable=True)
        return _write(original, model, place, call, given)
    if answer is not None:
        return _write(original, model, place, call, answer)
    with together(f"save_pretrained of {type(model).__name__.removeprefix('FSDP')}", fix=FIX):
        with on_all_ranks("reading the layout of the model"):
            _check_supported(call)
            shards = shards_at(place)
        folders = [
            folder
            for folder, writes in gather_objects((str(call["save_directory"]), call["is_main_process"]))
            if writes
        ]
        if not folders:
            return None
        call["save_directory"] = folders[0]
        with prompt_embeddings(model), on_all_ranks("selecting the weights of the adapters"):
            stored = _stored_shards(model, place, shards)
        with prompt_embeddings(model):
            state = gathered_state(stored)
            with on_all_ranks(f"writing {folders[0]}"):
                if dist.get_rank() == 0:
                    _write(original, model, place, call, state)
    return None


def _write(
    original: Callable[..., Any], model: Any, place: Place, call: Mapping[str, Any], state: Mapping[str, Any]
) -> Any:
    """Call the original method for a given state dict, on this rank only."""
    named = with_module_names(dict(state), model)
    with _answering(place, state):
        result = original(**{**call, "state_dict": named, "is_main_process": True})
    remove_wrapper_names(Path(call["save_directory"]))
    return result


def _answering(place: Place, state: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Answer from ``state``: PEFT calls ``state_dict`` of modules to save, which is collective under FSDP1."""
    return gathered.answering(place.root, {place.prefix + name: tensor for name, tensor in state.items()})


def _check_supported(call: Mapping[str, Any]) -> None:
    if call.get("path_initial_model_for_weight_conversion") is not None:
        message = (
            "path_initial_model_for_weight_conversion loads a second adapter into the model, which is sharded already."
        )
        fix = "Save without it, load the adapter in one process, and convert it there."
        raise SpecError([Problem(code="FSDP-E675", message=message, fix=fix)])


def _stored_shards(model: Any, place: Place, shards: ModelShards) -> ModelShards:
    """Return the shards of the weights that PEFT stores; all shards if PEFT computes other tensors from them."""
    get_peft_model_state_dict = importlib.import_module("peft").get_peft_model_state_dict  # PEFT is optional
    on_meta = {held.name: torch.empty(held.shape, dtype=held.dtype, device="meta") for held in shards.tensors}
    owners = {id(tensor): name for name, tensor in on_meta.items()}
    named = {**on_meta, **{alias: on_meta[name] for alias, name in shards.aliases.items()}}
    names: set[str] = set()
    for adapter in model.peft_config:
        try:
            with warnings.catch_warnings(), _answering(place, named):
                warnings.simplefilter("ignore")
                found = get_peft_model_state_dict(
                    model, with_module_names(named, model), adapter, save_embedding_layers=True
                )
        except Exception:  # PEFT computes with the values
            return shards
        found.pop("prompt_embeddings", None)
        if any(id(tensor) not in owners for tensor in found.values()):
            return shards
        names |= {owners[id(tensor)] for tensor in found.values()}
    kept = {alias: name for alias, name in shards.aliases.items() if name in names}
    return ModelShards(tuple(held for held in shards.tensors if held.name in names), kept)
