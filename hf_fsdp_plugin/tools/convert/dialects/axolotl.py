"""Reads the YAML of axolotl, in its older form (``fsdp``, keys with ``fsdp_``) and its newer one (``fsdp_config``)."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectReading, is_off, marked_by
from hf_fsdp_plugin.tools.convert.dialects.training_script import HANDLERS, read_training
from hf_fsdp_plugin.vocabulary import PROGRAM_KEYS


def _read(reading: DialectReading) -> None:
    entries = reading.leaves()
    if "deepspeed" not in reading.found or is_off(reading.found["deepspeed"].value):
        reading.imply("fsdp.version", "1")  # with DeepSpeed, the version is that of the converted file
    read_training(reading, entries, config_enables=True)


DIALECT: Final = ConfigDialect(
    name="axolotl",
    title="axolotl",
    marks=marked_by(PROGRAM_KEYS["axolotl"]),
    read=_read,
    handlers=HANDLERS,
    own_script=True,
)
