"""Reads the YAML of LLaMA-Factory: arguments of ``TrainingArguments``, or the ``dist_config`` of its version 1."""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectReading, marked_by
from hf_fsdp_plugin.tools.convert.dialects.training_script import HANDLERS, include_deepspeed, read_training
from hf_fsdp_plugin.vocabulary import PROGRAM_KEYS


def _read(reading: DialectReading) -> None:
    entries, given = reading.leaves(), reading.found
    if "dist_config.name" in given:
        # The defaults of version 1.
        reading.imply("fsdp.version", "2")
        reading.imply("activation.checkpointing", "full")
        if "bf16" not in given:
            reading.imply("launch.mixed_precision", "bf16")
            reading.imply("precision.param", "bf16")
    read_training(reading, entries)
    file = given.get("dist_config.config_file")
    if file is not None and not file.value.is_empty:
        include_deepspeed(reading, file, given, {})


DIALECT: Final = ConfigDialect(
    name="llama_factory",
    title="LLaMA-Factory",
    marks=marked_by(PROGRAM_KEYS["LLaMA-Factory"]),
    read=_read,
    own_script=True,
    handlers={**HANDLERS, "dist_config.config_file": HANDLERS["deepspeed"]},
)
