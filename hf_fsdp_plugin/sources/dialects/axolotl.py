"""Reads the YAML of axolotl, in its older form (``fsdp``, keys with ``fsdp_``) and its newer one (``fsdp_config``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.sources.dialects.interface import ConfigDialect, DialectDocument, DialectReading, is_off, leaves
from hf_fsdp_plugin.sources.dialects.training_script import HANDLERS, read_training
from hf_fsdp_plugin.sources.tree import ConfigEntry


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    return [entry for key, entry in document.keys().items() if key == "base_model"]


def _read(reading: DialectReading) -> None:
    entries = list(leaves(reading.dialect_of.table, reading.document.root.value))
    given = {path for path, entry in entries if not is_off(entry.value)}
    if "deepspeed" not in given:  # with DeepSpeed, the version is that of the converted file
        reading.imply("fsdp.version", "1")
    read_training(reading, entries, config_enables=True)


DIALECT: Final = ConfigDialect(
    name="axolotl", title="axolotl", marks=_marks, read=_read, handlers=HANDLERS, own_script=True
)
