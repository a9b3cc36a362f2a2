"""What the replacements of ``save_pretrained`` and similar methods share: who makes a call, and who writes where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.arrivals import together
from hf_fsdp_plugin.backends.shard import place_of
from hf_fsdp_plugin.integrations.gathered import gathered
from hf_fsdp_plugin.plan.names import unwrapped

FIX: Final = (
    "Call it on all ranks, outside of `if accelerator.is_main_process:`; only the main process writes the files if "
    "`is_main_process=accelerator.is_main_process` is passed. Or call `state = accelerator.get_state_dict(model)` on "
    "all ranks, and pass state_dict=state on the main process."
)
"""What to write instead of a call on some ranks."""


def call_name(method: str, model: Any) -> str:
    """Return the name of a call for messages."""
    return f"{method} of {type(unwrapped(model)).__name__}"


def bind_call(original: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of ``original`` by name, with its defaults."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    call: dict[str, Any] = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    call.pop("kwargs", None)
    return call


def writes_given_state(call: Mapping[str, Any], *, is_answered: bool) -> bool:
    """Return whether this rank writes the state dict that the call has.

    Args:
        is_answered: whether only this rank makes the call, for a model whose gathered state is in use. Otherwise an
            empty state dict is that of a rank that writes nothing: `get_state_dict` returns it on all ranks but rank 0.
    """
    return bool(call["is_main_process"]) and (is_answered or dist.get_rank() == 0 or bool(call["state_dict"]))


def writing_folders(call: Mapping[str, Any]) -> list[str]:
    """Return the absolute folder of each rank that is a main process. Collective."""
    folder = str(Path(call["save_directory"]).absolute())
    return [folder for folder, writes in gather_objects((folder, bool(call["is_main_process"]))) if writes]


def call_on_rank_0(original: Callable[..., Any], model: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Call a library's own saving method on rank 0 with the gathered model. Collective for a sharded model.

    Returns:
        Rank 0's result, on all ranks.
    """
    place = None if gathered.paused or gathered.state_of(model) is not None else place_of(model)
    if place is None:
        return original(*args, **kwargs)
    with together(call_name(name, model), fix="Call it on all ranks; rank 0 writes or uploads the model."):
        with gathered.on_rank_0(place) as writes, on_all_ranks(f"running {name}"):
            result = original(*args, **kwargs) if writes else None
        return gather_objects(result)[0]
