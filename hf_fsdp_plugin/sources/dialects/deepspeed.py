"""Reads the JSON config of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.collector import entry_of
from hf_fsdp_plugin.sources.dialects.interface import (
    AUTO,
    ConfigDialect,
    DialectDocument,
    DialectReading,
    is_off,
    same_value,
)
from hf_fsdp_plugin.sources.tree import ConfigEntry
from hf_fsdp_plugin.spellings import word_of
from hf_fsdp_plugin.vocabulary import BY_NAME, TRAINING_FILE_MARKS

_MARKS: Final = frozenset(
    {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer",
     "zero_force_ds_cpu_optimizer"}
)  # fmt: skip
_WEAK_MARKS: Final = frozenset({"train_batch_size", "steps_per_print", "wall_clock_breakdown"})
"""Keys that configs of training scripts may have, too."""
ZERO: Final = "zero_optimization"
STAGES: Final[Mapping[str, str]] = {
    "0": "no_shard", "1": "shard_grad_op", "2": "shard_grad_op", "3": "full_shard", "false": "no_shard",
    "true": "shard_grad_op",
}  # fmt: skip
"""Stage of ZeRO -> strategy. FSDP has no strategy that shards the optimizer state only."""
_OPTIMIZERS: Final[Mapping[str, str]] = {
    "adam": "adamw_torch", "adamw": "adamw_torch", "fusedadam": "adamw_torch_fused", "adagrad": "adagrad",
    "sgd": "sgd", "rmsprop": "rmsprop", "lion": "lion_32bit",
}  # fmt: skip
_SCHEDULES: Final[Mapping[str, str]] = {
    "warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine",
}  # fmt: skip


_ARGUMENT_OF: Final = {"optimizer": "optim", "scheduler": "lr_scheduler_type"}


def _marks(document: DialectDocument) -> Sequence[ConfigEntry]:
    keys = document.keys()
    marks = [entry for key, entry in keys.items() if key in _MARKS]
    if marks or TRAINING_FILE_MARKS.isdisjoint(keys):
        marks += [entry for key, entry in keys.items() if key in _WEAK_MARKS]
    return marks


def _read(reading: DialectReading) -> None:
    for name, value in (("launch.distributed_type", "FSDP"), ("fsdp.version", "2"), ("wrap.policy", "transformer")):
        reading.imply(name, value)
    reading.read_tree()
    for section in ("optimizer", "scheduler"):  # the parameters of one that is refused are not reported, too
        origins = {problem.origin and problem.origin.spelling for problem in reading.problems}
        if f"{section}.type" in origins and reading.arguments.get(_ARGUMENT_OF[section]) is None:
            reading.problems = [p for p in reading.problems if not _is_in(p, f"{section}.params.")]
    if not any(setting.name == "sharding.strategy" for setting in reading.settings):
        reading.imply("sharding.strategy", "no_shard")
    if not reading.text("gradient_clipping") and "max_grad_norm" not in reading.arguments:
        message = "without gradient_clipping, DeepSpeed does not clip; the Trainer clips unless max_grad_norm is 0."
        reading.report_file("FSDP-N071", message, "")
        if reading.document.sources.dialects == "convert" and "max_grad_norm" not in reading.document.arguments():
            reading.arguments["max_grad_norm"] = 0.0


def _is_in(problem: Problem, section: str) -> bool:
    return problem.origin is not None and problem.origin.spelling.startswith(section)


def add_stage(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the strategy of a stage."""
    strategy = STAGES.get(word_of(entry.value.value))
    if strategy is None:
        message = f"{entry.key} is {entry.value.shown}; expected 0, 1, 2 or 3."
        reading.report("FSDP-E101", entry, message, "Correct it.", setting="sharding.strategy")
        return
    reading.add("sharding.strategy", entry, value=strategy, implied=_group(reading) is not None)
    if word_of(entry.value.value) in ("1", "true"):
        reading.differs(entry, f"{entry.key} is {entry.value.text}: shard_grad_op also shards the gradients.")


def _group(reading: DialectReading) -> str | None:
    """Return the key that makes groups of ranks with copies of the model; ``None`` if there is none."""
    sizes = {path: reading.text(f"{ZERO}.{path}") for path in ("mics_shard_size", "zero_hpz_partition_size")}
    return next((path for path, size in sizes.items() if size.isdecimal() and int(size) > 1), None)


def _add_group(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the groups of MiCS or hpZ."""
    name = entry.key.rpartition(".")[2]
    if _group(reading) is None or not entry.value.text.isdecimal() or int(entry.value.text) <= 1:
        return
    stage = reading.found.get(f"{ZERO}.stage")
    if _group(reading) != name or stage is None or stage.value.text != "3":
        other = f"{ZERO}.{_group(reading)}" if _group(reading) != name else f"{ZERO}.stage"
        message = f"{entry.key} is {entry.value.text}, which contradicts {other}={reading.text(other, '0')}."
        reading.report("FSDP-E066", entry, message, "Keep one of them: groups need stage 3.")
        return
    reading.add("sharding.strategy", entry, value="hybrid_shard")
    reading.add("mesh.shard", entry)
    if name == "zero_hpz_partition_size":
        message = (
            f"{entry.key} is {entry.value.text}: hybrid_shard keeps gradients and optimizer state in each group too."
        )
        fix = "It needs more memory. Remove the key to shard over all ranks."
        reading.differs(entry, message, fix)


def add_offload(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the device of the optimizer or of the parameters."""
    device = word_of(entry.value.value)
    if is_off(entry.value):
        return
    if device not in ("cpu", "nvme", "true"):
        message = f"{entry.key} is {entry.value.shown}; expected none, cpu or nvme."
        reading.report("FSDP-E101", entry, message, "Correct it.", setting="offload.params")
        return
    _add_once(reading, "offload.params", entry, True)
    if device == "nvme":
        message = f"{entry.key} is nvme: FSDP offloads to CPU memory."
        reading.differs(entry, message, "Check that it fits: hf-fsdp plan shows the CPU memory.")
    elif "optimizer" in entry.key and _is_off_device(reading, entry.key.replace("_optimizer", "_param")):
        reading.differs(
            entry, f"{entry.key} is {device}: FSDP offloads parameters and gradients with the optimizer state."
        )


def _is_off_device(reading: DialectReading, path: str) -> bool:
    """Whether the tree does not offload to the device of a key."""
    return reading.text(path, "none") == "none"


def _add_pin(reading: DialectReading, entry: ConfigEntry) -> None:
    section = entry.key.rpartition(".")[0]
    is_used = section == ZERO or not _is_off_device(reading, f"{section}.device")
    if is_used:
        _add_once(reading, "offload.pin_memory", entry, not is_off(entry.value))


def _add_once(reading: DialectReading, name: str, entry: ConfigEntry, value: bool) -> None:
    """Add a setting that two sections have. They may differ only where FSDP cannot."""
    if not any(setting.name == name for setting in reading.settings):
        reading.add(name, entry, value=value)
    else:
        reading.becomes.append(f"{name}={str(value).lower()}")


def _add_dtype(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add ``bf16``, ``fp16`` or ``torch_autocast``."""
    section = reading.dialect_of.table.known(entry.key).partition(".")[0]
    dtype = reading.text("torch_autocast.dtype", "bf16") if section == "torch_autocast" else section
    if not is_off(entry.value):
        value = replace(entry_of("", dtype).value, line=entry.line, text=entry.value.text)
        reading.add_entry(BY_NAME["launch.mixed_precision"], replace(entry, value=value))


def _add_state_dict(reading: DialectReading, entry: ConfigEntry) -> None:
    reading.add("checkpoint.state_dict", entry, value="sharded" if is_off(entry.value) else "full")


def _add_size(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the size of the tensor or the expert axis."""
    is_expert = "expert" in entry.key
    if is_expert and reading.text("expert_parallel.enabled", "false") in ("false", "0"):
        return
    if not is_off(entry.value):
        reading.add("mesh.expert" if is_expert else "mesh.tensor", entry)


def _add_batch(reading: DialectReading, entry: ConfigEntry) -> None:
    """Add the micro batch if ``train_batch_size`` alone is given, or check that the sizes are one product."""
    given = {name: _number(reading, name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    micro, accumulation = given.values()
    if word_of(entry.value.value) == AUTO or not entry.value.text.isdecimal():
        return
    total, num_ranks = int(entry.value.text), reading.document.world_size()
    product = (micro or 1) * (accumulation or 1) * (num_ranks or 1)
    if micro and accumulation and num_ranks is None:
        num_ranks = total // product
    if total % product or (micro and accumulation and num_ranks and micro * accumulation * num_ranks != total):
        parts = [f"{name}={value}" for name, value in {**given, "ranks": num_ranks}.items() if value]
        message = f"{entry.key} is {total}, which is not the product of {', '.join(parts)} and a whole number."
        reading.report("FSDP-E066", entry, message, "Correct one of them, or remove train_batch_size.")
    elif not micro and num_ranks is not None:
        reading.set_argument("per_device_train_batch_size", entry, value=total // product)
    elif not micro:
        message = f"{entry.key} is {total}: the micro batch is not known without the number of ranks."
        reading.differs(entry, message, "Pass --num_processes, or set train_micro_batch_size_per_gpu.")


def _number(reading: DialectReading, path: str) -> int | None:
    text = reading.text(path)
    return int(text) if text.isdecimal() and int(text) else None


def _add_optimizer(reading: DialectReading, entry: ConfigEntry) -> None:
    _add_choice(reading, entry, _OPTIMIZERS, "optim")
    if not same_value(reading.text("optimizer.params.weight_decay", "0"), 0):
        message = f"{entry.key} is {entry.value.text}: DeepSpeed decays all weights, the Trainer no biases and norms."
        reading.differs(entry, message)


def _add_schedule(reading: DialectReading, entry: ConfigEntry) -> None:
    _add_choice(reading, entry, _SCHEDULES, "lr_scheduler_type")
    if "lr_scheduler_type" in reading.arguments and reading.text("scheduler.params.warmup_type", "log") == "log":
        reading.differs(
            entry, f"{entry.key} is {entry.value.text}: DeepSpeed warms up logarithmically, Transformers linearly."
        )


def _add_choice(reading: DialectReading, entry: ConfigEntry, names: Mapping[str, str], argument: str) -> None:
    name = names.get(word_of(entry.value.value))
    if name is None:
        fix = f"Remove the section, and choose {argument} of TrainingArguments."
        reading.refuse(entry, f"the Trainer has none of this name; known are {', '.join(names)}", fix)
    else:
        reading.set_argument(argument, entry, value=name)


def _add_betas(reading: DialectReading, entry: ConfigEntry) -> None:
    betas = entry.value.plain()
    if not isinstance(betas, list) or len(betas) != 2:
        reading.report("FSDP-E101", entry, f"{entry.key} is {entry.value.shown}; expected two numbers.", "Correct it.")
        return
    for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
        if beta is not None:  # auto, and only the other one is given
            reading.set_argument(name, entry, value=beta)


def _add_total_steps(reading: DialectReading, entry: ConfigEntry) -> None:
    if word_of(entry.value.value) != AUTO:
        reading.set_argument("max_steps", entry)


DIALECT: Final = ConfigDialect(
    name="deepspeed",
    title="DeepSpeed",
    marks=_marks,
    read=_read,
    handlers={
        ZERO: add_stage,
        f"{ZERO}.stage": add_stage,
        f"{ZERO}.mics_shard_size": _add_group,
        f"{ZERO}.zero_hpz_partition_size": _add_group,
        **dict.fromkeys(
            (f"{ZERO}.{name}" for name in ("offload_optimizer.device", "offload_param.device")), add_offload
        ),
        **dict.fromkeys((f"{ZERO}.{name}" for name in ("cpu_offload", "cpu_offload_param")), add_offload),
        **dict.fromkeys((f"{ZERO}.{name}.pin_memory" for name in ("offload_optimizer", "offload_param")), _add_pin),
        f"{ZERO}.cpu_offload_use_pin_memory": _add_pin,
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save": _add_state_dict,
        **dict.fromkeys(("bf16.enabled", "fp16.enabled", "torch_autocast.enabled"), _add_dtype),
        **dict.fromkeys(("tensor_parallel.autotp_size", "expert_parallel.autoep_size"), _add_size),
        "train_batch_size": _add_batch,
        "optimizer.type": _add_optimizer,
        "optimizer.params.betas": _add_betas,
        "scheduler.type": _add_schedule,
        "scheduler.params.total_num_steps": _add_total_steps,
    },
)
