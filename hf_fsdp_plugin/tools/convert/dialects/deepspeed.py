"""Reads the JSON config of DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.config_tree import ConfigEntry
from hf_fsdp_plugin.sources.interface import entry_of
from hf_fsdp_plugin.tools.convert.dialects import interface
from hf_fsdp_plugin.vocabulary import BY_NAME, PROGRAM_KEYS, TRAINING_FILE_MARKS, word_of

_WEAK_MARKS: Final = frozenset({"train_batch_size", "steps_per_print", "wall_clock_breakdown"})
"""Keys that configs of training scripts may have, too."""
ZERO: Final = "zero_optimization"


def _marks(document: interface.DialectDocument) -> Sequence[ConfigEntry]:
    marks = interface.marked_by(PROGRAM_KEYS["DeepSpeed"])(document)
    is_other = all(entry.key in _WEAK_MARKS for entry in marks) and not TRAINING_FILE_MARKS.isdisjoint(document.keys())
    return [] if is_other else marks


def _read(reading: interface.DialectReading) -> None:
    for name, value in (("launch.distributed_type", "FSDP"), ("fsdp.version", "2"), ("wrap.policy", "transformer")):
        reading.imply(name, value)
    reading.read_tree()
    # The parameters of an optimizer or a schedule that is refused are not reported, too.
    refused = {_spelling(problem) for problem in reading.problems if problem.code == "FSDP-E062"}
    reading.problems = [p for p in reading.problems if f"{_spelling(p).rpartition('.params.')[0]}.type" not in refused]
    if not reading.sets("sharding.strategy"):
        reading.imply("sharding.strategy", "no_shard")
    if not reading.text("gradient_clipping") and "max_grad_norm" not in reading.arguments:
        message = "without gradient_clipping, DeepSpeed does not clip; the Trainer clips unless max_grad_norm is 0."
        reading.report_file("FSDP-N071", message, "")
        if reading.document.converts and "max_grad_norm" not in reading.document.arguments():
            reading.arguments["max_grad_norm"] = 0.0


def _spelling(problem: Problem) -> str:
    return "" if problem.origin is None else problem.origin.spelling


def add_stage(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add the strategy of a stage."""
    if (strategy := reading.translated(entry)) is None:
        return
    reading.add("sharding.strategy", entry, value=strategy, implied=_group(reading) is not None)
    if word_of(entry.value.value) in ("1", "true"):
        reading.differs(entry, "shard_grad_op also shards the gradients")


def _group(reading: interface.DialectReading) -> str | None:
    """Return the key that makes groups of ranks with copies of the model; ``None`` if there is none."""
    sizes = {path: reading.text(f"{ZERO}.{path}") for path in ("mics_shard_size", "zero_hpz_partition_size")}
    return next((path for path, size in sizes.items() if size.isdecimal() and int(size) > 1), None)


def _add_group(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add the groups of MiCS or hpZ."""
    name, group = entry.key.rpartition(".")[2], _group(reading)
    if group is None or not entry.value.text.isdecimal() or int(entry.value.text) <= 1:
        return
    other = f"{ZERO}.stage" if group == name else f"{ZERO}.{group}"
    if group != name or reading.text(other) != "3":
        reason = f"which contradicts {other}={reading.text(other, '0')}"
        reading.contradicts(entry, reason, "Keep one of them: groups need stage 3.")
        return
    reading.add("sharding.strategy", entry, value="hybrid_shard")
    reading.add("mesh.shard", entry)
    if name == "zero_hpz_partition_size":
        reason = "hybrid_shard keeps gradients and optimizer state in each group too"
        reading.differs(entry, reason, "It needs more memory. Remove the key to shard over all ranks.")


def add_state_offload(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add the device of the optimizer: with offloaded parameters, that of all."""
    key = entry.key
    other = key.replace("_optimizer", "_param") if "_optimizer" in key else f"{key}_param"
    is_alone = reading.text(other, "none") in ("none", "false", "0")
    add_offload(reading, entry, "offload.optimizer" if is_alone else "offload.params")


def add_offload(reading: interface.DialectReading, entry: ConfigEntry, setting: str = "offload.params") -> None:
    """Add the device of the parameters."""
    device = word_of(entry.value.value)
    if interface.is_off(entry.value):
        return
    if device not in ("cpu", "nvme", "true"):
        reading.expect(entry, "none, cpu or nvme", setting=setting)
        return
    _add_once(reading, setting, entry, True)
    if device == "nvme":
        fix = "Check that it fits: hf-fsdp plan shows the CPU memory."
        reading.differs(entry, "FSDP offloads to CPU memory", fix)


def _add_pin(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    section = entry.key.rpartition(".")[0]
    if section == ZERO or reading.text(f"{section}.device", "none") != "none":
        _add_once(reading, "offload.pin_memory", entry, not interface.is_off(entry.value))


def _add_once(reading: interface.DialectReading, name: str, entry: ConfigEntry, value: bool) -> None:
    """Add a setting that two sections have. They may differ only where FSDP cannot."""
    if not reading.sets(name):
        reading.add(name, entry, value=value)
    else:
        reading.becomes.append(f"{name}={str(value).lower()}")


def _add_dtype(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add ``bf16``, ``fp16`` or ``torch_autocast``."""
    section = reading.dialect_of.table.known(entry.key).partition(".")[0]
    dtype = reading.text("torch_autocast.dtype", "bf16") if section == "torch_autocast" else section
    if not interface.is_off(entry.value):
        value = replace(entry_of("", dtype).value, line=entry.line, text=entry.value.text)
        reading.add_entry(BY_NAME["launch.mixed_precision"], replace(entry, value=value))


def _add_size(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add the size of the tensor or the expert axis."""
    is_enabled = "expert" not in entry.key or reading.text("expert_parallel.enabled", "false") not in ("false", "0")
    if is_enabled and not interface.is_off(entry.value):
        reading.add_targets(entry)


def _add_batch(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    """Add the micro batch if ``train_batch_size`` alone is given, or check that the sizes are one product."""
    given = {name: _number(reading, name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    micro, accumulation = given.values()
    if not entry.value.text.isdecimal():
        return
    total, num_ranks = int(entry.value.text), reading.document.world_size()
    product = (micro or 1) * (accumulation or 1) * (num_ranks or 1)
    if micro and accumulation and num_ranks is None:
        num_ranks = total // product
    if total % product or (micro and accumulation and num_ranks and micro * accumulation * num_ranks != total):
        parts = [f"{name}={value}" for name, value in {**given, "ranks": num_ranks}.items() if value]
        reason = f"which is not the product of {', '.join(parts)} and a whole number"
        reading.contradicts(entry, reason, "Correct one of them, or remove train_batch_size.")
    elif not micro and num_ranks is not None:
        reading.set_argument("per_device_train_batch_size", entry, value=total // product)
    elif not micro:
        fix = "Pass --num_processes, or set train_micro_batch_size_per_gpu."
        reading.differs(entry, "the micro batch is not known without the number of ranks", fix)


def _number(reading: interface.DialectReading, path: str) -> int | None:
    text = reading.text(path)
    return int(text) if text.isdecimal() and int(text) else None


def _add_optimizer(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    reading.add_targets(entry)
    if reading.text("optimizer.params.weight_decay", "0") not in ("0", "0.0"):
        reading.differs(entry, "DeepSpeed decays all weights, the Trainer no biases and norms")


def _add_schedule(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    reading.add_targets(entry)
    if "lr_scheduler_type" in reading.arguments and reading.text("scheduler.params.warmup_type", "log") == "log":
        reading.differs(entry, "DeepSpeed warms up logarithmically, Transformers linearly")


def _add_betas(reading: interface.DialectReading, entry: ConfigEntry) -> None:
    betas = entry.value.plain()
    if not isinstance(betas, list) or len(betas) != 2:
        reading.expect(entry, "two numbers")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        if beta is not None:  # auto, and only the other one is given
            reading.set_argument(name, entry, value=beta)


DIALECT: Final = interface.ConfigDialect(
    name="deepspeed",
    title="DeepSpeed",
    marks=_marks,
    read=_read,
    handlers={
        "sharding.strategy": add_stage,
        "sharding.strategy mesh.shard": _add_group,
        "offload.params": add_offload,
        "offload.optimizer": add_state_offload,
        "offload.pin_memory": _add_pin,
        "launch.mixed_precision precision.param": _add_dtype,
        "mesh.tensor": _add_size,
        "mesh.expert": _add_size,
        "train_batch_size": _add_batch,
        "optimizer.type": _add_optimizer,
        "optimizer.params.betas": _add_betas,
        "scheduler.type": _add_schedule,
    },
)
