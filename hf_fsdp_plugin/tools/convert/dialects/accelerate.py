"""Reads Accelerate's file with a section for DeepSpeed and the file that it names, and, to convert it, one for DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fsdp_plugin.sources.accelerate_file import is_for_deepspeed
from hf_fsdp_plugin.sources.config_tree import ConfigEntry
from hf_fsdp_plugin.tools.convert.dialects import deepspeed
from hf_fsdp_plugin.tools.convert.dialects.interface import ConfigDialect, DialectDocument, DialectReading
from hf_fsdp_plugin.tools.convert.dialects.training_script import find_file
from hf_fsdp_plugin.vocabulary import NULL_WORDS, word_of

_SECTION: Final = "deepspeed_config"
_FILE: Final = f"{_SECTION}.deepspeed_config_file"
_OF_FILE: Final = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model",
    "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
"""Keys of the section that conflict with the config of DeepSpeed that it names, as in Accelerate."""


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    """Return the entry of DeepSpeed with its section, or, to convert it, of DDP."""
    if (kind := document.keys().get("distributed_type")) is None:
        return []
    is_ddp = document.converts and word_of(kind.value.value).startswith("multi_")
    return [kind] if is_ddp or is_for_deepspeed(document.root) else []


def _read(reading: DialectReading) -> None:
    kind = reading.document.keys()["distributed_type"]
    reading.imply("fsdp.version", "2", kind)
    reading.imply("wrap.policy", "transformer", kind)
    reading.read_tree()
    if not reading.sets("sharding.strategy"):
        is_ddp = word_of(kind.value.value) != "deepspeed"
        reading.imply("sharding.strategy", "full_shard" if is_ddp else "shard_grad_op", kind)


def _add_type(reading: DialectReading, entry: ConfigEntry) -> None:
    reading.imply("launch.distributed_type", "FSDP", entry)
    if word_of(entry.value.value) != "deepspeed":
        reading.differs(entry, "each rank had a copy of the model, and full_shard divides it")


def _add_own(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add a key that Accelerate reads for every engine. The section of another engine is a contradiction."""
    if entry.key in ("fsdp_config", "megatron_lm_config") and not entry.value.is_empty:
        kind = reading.text("distributed_type").upper()
        reading.contradicts(entry, f"and distributed_type is {kind}, which ignores it")
    elif entry.key != _SECTION:
        reading.add_mapping([entry], ("launch", "training"))


def _add_file(reading: DialectReading, entry: ConfigEntry) -> None:
    """Read the config of DeepSpeed that the section names."""
    if entry.value.text.lower() in NULL_WORDS:
        return
    others = [key for name in _OF_FILE if (key := f"{_SECTION}.{name}") in reading.found]
    if others:
        reason = f"and {', '.join(others)} cannot be set with it in Accelerate"
        reading.contradicts(entry, reason, "Set them in one of the two files.")
    if (file := find_file(reading, entry)) is None:
        return
    reading.include(file)
    if reading.text("mixed_precision"):  # it replaces auto
        reading.unfilled = [item for item in reading.unfilled if item[1] not in (("bf16",), ("fp16",))]


def _add_loading(reading: DialectReading, entry: ConfigEntry) -> None:
    if reading.text(f"{_SECTION}.zero_stage", "3" if _FILE in reading.found else "2") == "3":
        reading.add("loading.ram_efficient", entry)


DIALECT: Final = ConfigDialect(
    name="accelerate",
    title="Accelerate for DeepSpeed or DDP",
    marks=_marks,
    read=_read,
    handlers={
        "distributed_type": _add_type,
        f"{_SECTION}.zero_stage": deepspeed.add_stage,
        "offload.params": deepspeed.add_offload,
        "offload.optimizer": deepspeed.add_state_offload,
        f"{_SECTION}.zero3_init_flag": _add_loading,
        _FILE: _add_file,
        "*": _add_own,
    },
)
