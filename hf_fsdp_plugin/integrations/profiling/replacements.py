"""Replacements of functions of torch that mark their calls in the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.integrations.profiling.marking import marks


def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with marks.phase("backward"):
        return original(*args, **kwargs)
