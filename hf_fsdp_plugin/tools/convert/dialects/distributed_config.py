"""Reads the JSON file of Transformers' ``DistributedConfig``."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.sources.script_objects import add_distributed_config
from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectReading, marked_by
from hf_fsdp_plugin.vocabulary import PROGRAM_KEYS


def _read(reading: DialectReading) -> None:
    entries = reading.document.root.value
    reading.mentions_fsdp = add_distributed_config(reading, entries)
    for entry in entries:
        reading.record_read(entry.key, entry)


DIALECT: Final = ConfigDialect(
    name="distributed_config",
    title="DistributedConfig",
    marks=marked_by(PROGRAM_KEYS["DistributedConfig"]),
    read=_read,
)
