"""``save``, ``save_pretrained`` and ``push_to_hub`` of the sharded models of sentence-transformers.

The library writes each module of the model with the module's own method, so rank 0 runs it with the gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.save_calls import call_on_rank_0


def save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a sharded model on rank 0. Collective."""
    return call_on_rank_0(original, model, args, kwargs, name="save_pretrained")


def push_to_hub(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Upload a sharded model from rank 0. Collective. All ranks return rank 0's result."""
    return call_on_rank_0(original, model, args, kwargs, name="push_to_hub")
