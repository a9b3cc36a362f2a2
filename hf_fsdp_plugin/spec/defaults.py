"""The defaults that depend on where settings are written and on the FSDP version: those of Accelerate and Transformers.

All other defaults are those of the fields in ``fsdp_spec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_fsdp_plugin.sources.interface import SourceFamily

FAMILY_DEFAULTS: Final[Mapping[SourceFamily | None, Mapping[str, Any]]] = {
    "accelerate": {"fsdp.version": 1, "wrap.policy": "none"},
    "training_arguments": {"fsdp.version": 2, "wrap.policy": "transformer"},
    None: {"fsdp.version": 2},
}
"""Family of a source, ``None`` if no source mentions FSDP -> the defaults that depend on it."""

VERSION_DEFAULTS: Final[Mapping[int, Mapping[str, Any]]] = {
    1: {"prefetch.backward": "none", "fp8.all_gather": False},
    2: {"prefetch.backward": "pre", "fp8.all_gather": True},
}
"""FSDP version -> the defaults that depend on it."""
