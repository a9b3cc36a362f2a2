"""Replacements of functions of torch that mark their calls in the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.integrations.profiling.run import profiling
from hf_fsdp_plugin.observe.profile.marks import GATHER, REDUCE, WAIT


def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with marks.phase("backward"):
        return original(*args, **kwargs)


def wait(original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
    with marks(WAIT):
        result = original(*args, **kwargs)
    profiling.after_collective()
    return result


def unshard(original: Callable[..., Any], state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
    with marks(f"{GATHER}{marks.names.get(id(state), '')}"):
        return original(state, handle, *args, **kwargs)


def reduce_grad(original: Callable[..., Any], state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
    with marks(f"{REDUCE}{marks.names.get(id(state), '')}"):
        return original(state, handle, *args, **kwargs)
