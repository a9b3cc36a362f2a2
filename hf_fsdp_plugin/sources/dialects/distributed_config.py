"""Reads Transformers' ``DistributedConfig``: its JSON file, or its call in a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.sources.dialects.interface import ConfigDialect, DialectDocument, DialectReading, marked_by
from hf_fsdp_plugin.sources.dialects.python_calls import choose_part, find_calls
from hf_fsdp_plugin.sources.script_objects import add_distributed_config
from hf_fsdp_plugin.sources.tree import ConfigEntry

_OWN_FIELDS: Final = (
    "tp_plan",
    "ep_plan",
    "fsdp_plan",
    "ep_implementation",
    "enable_expert_parallel",
    "enable_sequence_parallel",
)
"""Fields that no other config has at its top level."""


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    return marked_by(_OWN_FIELDS)(document) or [call.mark() for call in find_calls(document, ("DistributedConfig",))]


def _read(reading: DialectReading) -> None:
    entries = list(reading.document.root.value)
    if not entries:
        call = choose_part(reading, find_calls(reading.document, ("DistributedConfig",)), "DistributedConfig calls")
        if call is None:
            return
        entries = list(call.entries)
    reading.mentions_fsdp = add_distributed_config(reading, entries)
    for entry in entries:
        reading.record_read(entry.key, entry)


DIALECT: Final = ConfigDialect(name="distributed_config", title="DistributedConfig", marks=_marks, read=_read)
