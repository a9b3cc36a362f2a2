"""Reads the JSON config of DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.sources.dialects.interface import ConfigDialect, DialectDocument, DialectReading
from hf_fsdp_plugin.sources.tree import ConfigEntry
from hf_fsdp_plugin.vocabulary import WORDS

_STRATEGIES: Final = {"0": "no_shard", "1": "shard_grad_op", "2": "shard_grad_op", "3": "full_shard"}
"""Stage of ZeRO -> strategy."""


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    return [entry for key, entry in document.keys().items() if key.lower() in WORDS["deepspeed_keys"]]


def _read(reading: DialectReading) -> None:
    reading.imply("launch.distributed_type", "FSDP")
    reading.imply("fsdp.version", "2")
    reading.imply("wrap.policy", "transformer")
    reading.read_tree()


def _add_stage(reading: DialectReading, entry: ConfigEntry) -> None:
    stage = entry.value.text
    if stage not in _STRATEGIES:
        message = f"{entry.key} is {entry.value.shown}; expected 0, 1, 2 or 3."
        reading.report("FSDP-E101", entry, message, "Correct it.", setting="sharding.strategy")
        return
    reading.add("sharding.strategy", entry, value=_STRATEGIES[stage])


DIALECT: Final = ConfigDialect(
    name="deepspeed",
    title="DeepSpeed",
    marks=_marks,
    read=_read,
    handlers={"zero_optimization.stage": _add_stage},
)
