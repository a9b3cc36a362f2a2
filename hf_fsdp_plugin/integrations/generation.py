"""Replacement of torch's function that makes FSDP2 gather the root for a method of a model, such as ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.backends.submodule_calls import gathers


def register_forward_method(original: Callable[..., None], module: Any, method_name: str) -> None:
    """Leave a method that gathers the root itself: torch's gather around it would precede its wait for all ranks."""
    if not gathers(getattr(module, method_name, None)):
        original(module, method_name)
