"""The settings that the answers mean, as they are written in Accelerate's file and as ``TrainingArguments(...)``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_fsdp_plugin.cli.config.question import State
from hf_fsdp_plugin.cli.config.questions import BY_SETTING
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.supported import installed_versions, release_of
from hf_fsdp_plugin.vocabulary import BY_NAME, PREFIXES

STOCK_VALUES: Final[Mapping[str, Mapping[Any, Any]]] = {
    "wrap.policy": {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"},
    "prefetch.backward": {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"},
    "checkpoint.state_dict": {
        "sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT", "local": "LOCAL_STATE_DICT",
    },
    "activation.checkpointing": {"none": False, "full": True},
}  # fmt: skip
"""Setting -> canonical value -> the value that stock Accelerate accepts."""
SECTIONS: Final[Mapping[str, str]] = {"fsdp": "fsdp_config", "parallelism": "parallelism_config"}
"""Scope of a key -> its section in the file."""

_KEYS: Final = {"offload.params": "cpu_offload"}
_OPTIMIZERS: Final = {"adafactor": "adafactor", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}
"""Optimizer -> ``optim`` of TrainingArguments, if it is not the default."""
_STOCK_LIMITS: Final = (
    ((1, 2), "launch.use_cpu", (True,), "does not shard on CPU ranks"),
    ((2,), "sharding.strategy", ("no_shard",), "ignores NO_SHARD under FSDP2 and runs full_shard"),
    ((2,), "checkpoint.state_dict", ("local",), "refuses LOCAL_STATE_DICT under FSDP2"),
    ((2,), "prefetch.backward", ("post", "none"), "ignores fsdp_backward_prefetch under FSDP2"),
    ((2,), "prefetch.forward", (True,), "ignores fsdp_forward_prefetch under FSDP2"),
    ((1, 2), "activation.checkpointing", ("selective",), "refuses selective activation checkpointing"),
    ((1,), "activation.offload", (True,), "refuses to offload activations under FSDP1"),
    ((1, 2), "checkpoint.asynchronous", (True,), f"ignores {BY_NAME['checkpoint.asynchronous'].key}"),
    ((1, 2), "offload.pin_memory", (False,), f"ignores {BY_NAME['offload.pin_memory'].key}"),
)
"""FSDP versions, setting, its values, and what stock ``accelerate launch`` does with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingLine:
    """One line of the file.

    Attributes:
        name: canonical name of the setting.
        section: ``fsdp_config`` or ``parallelism_config``; empty at the top level.
        value: what is written: text, a number or a bool.
        means: the value of the setting.
        comment: why; without ``#``.
    """

    name: str
    section: str
    key: str
    value: Any
    means: Any
    comment: str = ""


def settings_of(state: State) -> dict[str, Any]:
    """Return the settings that the answers mean, by canonical name, in the order of a new file."""
    answers = state.answers
    found: dict[str, Any] = {"launch.distributed_type": "FSDP", "launch.num_processes": state.world_size}
    if state.cpu:
        found["launch.use_cpu"] = True
    for name, question in BY_SETTING.items():
        if question.name in answers and not (answers[question.name] == "" and name != "wrap.classes"):
            found[name] = answers[question.name]
    if "wrap.classes" in found:
        found["wrap.classes"] = tuple(word for word in found["wrap.classes"].split(",") if word)
    if state.is_hybrid:
        found["mesh.replicate"] = state.world_size // found["mesh.shard"]
        if state.version == 1 and found["mesh.shard"] == state.gpus:
            # FSDP1 shards within a machine by default, and stock Accelerate refuses a mesh with it.
            del found["mesh.shard"], found["mesh.replicate"]
    return found


def unused_settings(state: State, settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that the answers leave without a meaning, whose keys are removed from an existing file."""
    unused = set()
    for name, question in BY_SETTING.items():
        is_reviewed = state.answers["details"] or not question.is_detail or not question.asked(state)
        if is_reviewed and not name.startswith(("launch.", "mesh.")):
            unused.add(name)
    if state.existing.launch.machine_rank >= state.num_machines:
        unused.add("launch.machine_rank")
    mesh = state.existing.mesh
    is_plain = STRATEGIES[settings["sharding.strategy"]].is_sharded and not state.is_hybrid
    if not (is_plain and mesh.shard in ("auto", state.world_size) and mesh.replicate in ("auto", 1)):
        unused |= {"mesh.shard", "mesh.replicate"}  # other sizes do not fit the strategy
    return unused - set(settings)


def entries_of(state: State, settings: Mapping[str, Any]) -> list[SettingLine]:
    """Return the lines that set the settings."""
    entries = [_entry(name, value, state) for name, value in settings.items()]
    return [entry for entry in entries if entry.value != ""]


def _entry(name: str, value: Any, state: State) -> SettingLine:
    row = BY_NAME[name]
    section, key, written = SECTIONS.get(row.scope, ""), row.key, STOCK_VALUES.get(name, {}).get(value, value)
    if name == "sharding.strategy":
        key, written = _strategy_key(value, state.version)
    elif name.startswith("mesh."):
        section, key = "parallelism_config", f"{PREFIXES['parallelism']}dp_{name.partition('.')[2]}_size"
    elif isinstance(written, tuple):
        written = ",".join(written)
    return SettingLine(name=name, section=section, key=key, value=written, means=value, comment=_comment(name, state))


def _strategy_key(name: str, version: int) -> tuple[str, Any]:
    """Return the key that stock Accelerate reads under this FSDP version, and its value."""
    row = STRATEGIES[name]
    if version == 2 and row.is_sharded and not (row.hybrid and row.reshards_after_forward):
        return "fsdp_reshard_after_forward", row.reshards_after_forward
    return "fsdp_sharding_strategy", name.upper()


def _comment(name: str, state: State) -> str:
    if name == "launch.num_processes":
        return f"{state.num_machines} machines × {state.gpus} GPUs" if state.num_machines > 1 else ""
    if name.startswith("mesh."):
        return "ranks that share one copy of the model" if name == "mesh.shard" else "copies of the model"
    question = BY_SETTING.get(name)
    if question is None or question.name not in state.answers:
        return ""
    return question.comment(state.answers[question.name], state)


def stock_limits(settings: Mapping[str, Any], version: int, *, gpus: int = 0) -> Iterator[str]:
    """Yield the limits of stock ``accelerate launch`` with these settings, one sentence each.

    Args:
        gpus: the size of the shard axis with which FSDP1 needs no mesh.
    """
    for versions, name, values, text in _STOCK_LIMITS:
        if version in versions and settings.get(name) in values:
            yield f"Stock Accelerate {text}."
    if version == 1 and settings.get("mesh.shard", gpus) != gpus:
        yield "Stock Accelerate refuses parallelism_config under FSDP1."


def fixed_settings(state: State) -> dict[str, Any]:
    """Return the settings of a new file that no question sets."""
    found: dict[str, Any] = {"launch.compute_environment": "LOCAL_MACHINE", "launch.machine_rank": 0}
    found["launch.use_cpu"] = state.cpu
    return found if state.num_machines == 1 else {**found, "launch.rdzv_backend": "static", "launch.same_network": True}


def header_of(state: State, memory: str = "") -> list[str]:
    """Return the comment at the beginning of the file: model, batch, the arguments of the script and the memory."""
    lines = [state.model.text] if state.model is not None else []
    answers = state.answers
    tokens = f" of {answers['seq_len']:,} tokens" if "seq_len" in answers else ""
    lines.append(f"{answers['global_batch']:,} samples{tokens} per step on {state.world_size:,} ranks:")
    lines.append(
        f"--per_device_train_batch_size {answers['micro_batch']} --gradient_accumulation_steps {state.accumulation}"
    )
    if answers.get("sync_each_batch"):
        lines.append("""--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'""")
    return [*lines, *([f"predicted memory: {memory}"] if memory else [])]


def arguments_of(state: State, spec: FsdpSpec) -> dict[str, Any]:
    """Return the keyword arguments of ``TrainingArguments`` for the settings of the file and for the batch."""
    settings = {name: value for name, value, _ in spec.settings() if spec.asked(name) and name in BY_NAME}
    if spec.origin("precision.param") == spec.origin("launch.mixed_precision"):
        settings.pop("precision.param", None)  # bf16=True sets it
    if spec.activation.native:
        del settings["activation.checkpointing"]
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": _config(settings)}
    if spec.launch.mixed_precision in ("bf16", "fp16"):
        arguments[spec.launch.mixed_precision] = True
    if spec.launch.use_cpu:
        arguments["use_cpu"] = True
    if spec.activation.native:
        transformers = release_of(installed_versions().get("transformers", ""))
        arguments["activation_checkpointing" if transformers >= (5, 23) else "gradient_checkpointing"] = True
    arguments["per_device_train_batch_size"] = int(state.answers["micro_batch"])
    arguments["gradient_accumulation_steps"] = state.accumulation
    if state.answers.get("sync_each_batch"):
        arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    if optimizer := _OPTIMIZERS.get(state.answers.get("optimizer", "")):
        arguments["optim"] = optimizer
    return arguments


def _config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fsdp_config`` of TrainingArguments, whose keys have no prefix."""
    version = settings["fsdp.version"]
    key, value = _strategy_key(settings["sharding.strategy"], version)
    if version == 1:  # the key that Transformers reads under version 1
        key, value = "reshard_after_forward", value.lower()
    config: dict[str, Any] = {"version": version, key.removeprefix("fsdp_"): value}
    for name, value in settings.items():
        row = BY_NAME[name]
        if name in ("fsdp.version", "sharding.strategy") or name.startswith("launch.") or value in ("", ()):
            continue
        key = f"dp_{name.partition('.')[2]}_size" if name.startswith("mesh.") else _KEYS.get(name, row.spellings[0])
        written = list(value) if isinstance(value, tuple) else STOCK_VALUES.get(name, {}).get(value, value)
        config[key] = dict(written) if isinstance(written, Mapping) else written
    return config


def code_of(arguments: Mapping[str, Any]) -> str:
    """Return the call of ``TrainingArguments`` as Python code, with one argument per line."""
    lines = ["TrainingArguments("]
    for name, value in arguments.items():
        if isinstance(value, dict):
            lines += [f"    {name}={{", *(f"        {key!r}: {item!r}," for key, item in value.items()), "    },"]
        else:
            lines.append(f"    {name}={value!r},")
    return "\n".join([*lines, ")"])
