"""``PeftModel.save_pretrained`` of a sharded model: rank 0 writes the adapters with the original method.

Only the weights that the method stores are gathered: adapters, ``modules_to_save``, and embeddings if they are stored.
PEFT is imported inside functions only, as scripts without it must not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.backends.arrivals import together
from hf_fsdp_plugin.backends.shard import place_of
from hf_fsdp_plugin.integrations.gathered import gathered, shards_at
from hf_fsdp_plugin.integrations.peft.saving import adapter_state, as_unsharded
from hf_fsdp_plugin.integrations.save_calls import FIX, bind_call, call_name, writes_given_state, writing_folders
from hf_fsdp_plugin.integrations.transformers.save_pretrained import check_given_state
from hf_fsdp_plugin.problems import Problem, SpecError


def save_pretrained(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the whole adapters of a sharded model. Collective, unless ``state_dict`` is given."""
    place = None if gathered.paused else place_of(model)
    if place is None:
        return original(*args, **kwargs)
    call, answer = bind_call(original, args, kwargs), gathered.state_of(model)
    if (given := call.get("state_dict")) is not None:
        if not writes_given_state(call, is_answered=answer is not None):
            return None
        check_given_state(model, place, given, only_trainable=True)
        return _write(original, model, call, given)
    if answer is not None:
        return _write(original, model, call, answer)
    with together(call_name("save_pretrained", model), fix=FIX):
        with on_all_ranks("reading the layout of the model"):
            _check_supported(call)
            shards = shards_at(place)
        folders = writing_folders(call)
        if not folders:
            return None
        call["save_directory"] = folders[0]
        state = adapter_state(model, shards, save_embedding_layers=call["save_embedding_layers"])
        with on_all_ranks(f"writing {folders[0]}"):
            if dist.get_rank() == 0:
                _write(original, model, call, state)
    return None


def _write(original: Callable[..., Any], model: Any, call: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """Call the original method for a given state dict, on this rank only."""
    with as_unsharded(model, state):
        return original(**{**call, "state_dict": dict(state), "is_main_process": True})


def _check_supported(call: Mapping[str, Any]) -> None:
    if call.get("path_initial_model_for_weight_conversion") is not None:
        message = (
            "path_initial_model_for_weight_conversion loads a second adapter into the model, which is sharded already."
        )
        fix = "Save without it, load the adapter in one process, and convert it there."
        raise SpecError([Problem(code="FSDP-E675", message=message, fix=fix)])
