"""The settings that the answers mean, as they are written in Accelerate's file and as ``TrainingArguments(...)``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_fsdp_plugin.cli.wizard.fsdp_questions import BY_SETTING, DETAILS, is_hybrid
from hf_fsdp_plugin.cli.wizard.question import State
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
SECTIONS: Final[Mapping[str, str]] = {
    "fsdp": "fsdp_config", "precision": "fsdp_config", "parallelism": "parallelism_config", "dynamo": "dynamo_config",
}  # fmt: skip
"""Scope of a key -> its section in the file."""

_KEYS: Final = {"offload.params": "cpu_offload"}
_OPTIMIZERS: Final = {"adafactor": "adafactor", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}
"""Optimizer -> ``optim`` of TrainingArguments, if it is not the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the file.

    Attributes:
        name: canonical name of the setting; empty for a key that is no setting of the plugin.
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


def settings_of(state: State, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the answers mean, by canonical name.

    Args:
        extra: other settings, from ``--set``.
    """
    answers = state.answers
    found: dict[str, Any] = {"launch.distributed_type": "FSDP", "launch.num_processes": state.world_size}
    for name, question in BY_SETTING.items():
        if question.name in answers and not (answers[question.name] == "" and name != "wrap.classes"):
            found[name] = answers[question.name]
    if "wrap.classes" in found:
        found["wrap.classes"] = tuple(word for word in found["wrap.classes"].split(",") if word)
    if is_hybrid(state):
        found["mesh.replicate"] = state.world_size // found["mesh.shard"]
        if state.version == 1 and found["mesh.shard"] == state.gpus:
            # FSDP1 shards within a machine by default, and stock Accelerate refuses a mesh with it.
            del found["mesh.shard"], found["mesh.replicate"]
    return {**found, **extra}


def unused_settings(state: State, settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that the answers leave without a meaning, whose keys are removed from an existing file."""
    details = state.answers["details"]
    kept = {*settings, "mesh.shard"} | {name for name in BY_SETTING if name.startswith("launch.")}
    if state.existing.launch.machine_rank >= state.num_machines:
        kept.discard("launch.machine_rank")
    return {
        name
        for name, question in BY_SETTING.items()
        if name not in kept and (details or question not in DETAILS or not question.asked(state))
    } | _unused_mesh(state, settings)


def _unused_mesh(state: State, settings: Mapping[str, Any]) -> set[str]:
    """Return the sizes of the mesh, unless the file has sizes that fit a strategy without groups."""
    mesh, world = state.existing.mesh, state.world_size
    is_plain = STRATEGIES[settings["sharding.strategy"]].is_sharded and not is_hybrid(state)
    if is_plain and mesh.shard in ("auto", world) and mesh.replicate in ("auto", 1):
        return set()
    return {"mesh.shard", "mesh.replicate"} - set(settings)


def entries_of(state: State, settings: Mapping[str, Any]) -> list[Entry]:
    """Return the lines that set the settings."""
    entries = [_entry(name, value, state) for name, value in settings.items() if name != "sharding.strategy"]
    entries += _strategy(settings["sharding.strategy"], state)
    return [entry for entry in entries if entry.value != ""]


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of a new file."""
    return sorted(entries, key=_position)


_TOP_ORDER: Final = (
    "compute_environment", "distributed_type", "num_machines", "num_processes", "machine_rank", "main_process_ip",
    "main_process_port", "rdzv_backend", "same_network", "gpu_ids", "use_cpu", "mixed_precision", "downcast_bf16",
    "debug", "enable_cpu_affinity", "main_training_function",
)  # fmt: skip
_SECTION_ORDER: Final = ("", "fsdp_config", "parallelism_config")


def _position(entry: Entry) -> tuple[int, int, int]:
    top = _TOP_ORDER.index(entry.key) if entry.key in _TOP_ORDER else len(_TOP_ORDER)
    names = list(BY_SETTING)
    return (
        _SECTION_ORDER.index(entry.section) if entry.section in _SECTION_ORDER else len(_SECTION_ORDER),
        top if not entry.section else 0,
        names.index(entry.name) if entry.name in names else len(names),
    )


def _entry(name: str, value: Any, state: State) -> Entry:
    row = BY_NAME[name]
    section, key = SECTIONS.get(row.scope, ""), row.key
    if name.startswith("mesh."):
        section, key = "parallelism_config", f"{PREFIXES['parallelism']}dp_{name.partition('.')[2]}_size"
    written = STOCK_VALUES.get(name, {}).get(value, value)
    written = ",".join(written) if isinstance(written, tuple) else written
    return Entry(name=name, section=section, key=key, value=written, means=value, comment=_comment(name, value, state))


def _comment(name: str, value: Any, state: State) -> str:
    if name == "launch.num_processes":
        return f"{state.num_machines} machines × {state.gpus} GPUs" if state.num_machines > 1 else ""
    if name == "mesh.shard":
        return "ranks that share one copy of the model"
    if name == "mesh.replicate":
        return "copies of the model"
    question = BY_SETTING.get(name)
    if question is None or question.name not in state.answers:
        return ""
    return question.comment(state.answers[question.name], state)


def _strategy(name: str, state: State) -> Iterator[Entry]:
    """Yield the strategy with the key that stock Accelerate reads under this FSDP version."""
    row = STRATEGIES[name]
    comment = BY_SETTING["sharding.strategy"].comment(name, state)
    by_reshard = state.version == 2 and row.is_sharded and not (row.hybrid and row.reshards_after_forward)
    key = "fsdp_reshard_after_forward" if by_reshard else "fsdp_sharding_strategy"
    written = row.reshards_after_forward if by_reshard else name.upper()
    yield Entry(name="sharding.strategy", section="fsdp_config", key=key, value=written, means=name, comment=comment)


def stock_limits(settings: Mapping[str, Any], version: int, *, gpus: int = 0) -> Iterator[str]:
    """Yield what stock ``accelerate launch`` does not do with these settings, one sentence each.

    Args:
        gpus: the size of the mesh's shard axis that FSDP1 needs no mesh for.
    """
    strategy = settings["sharding.strategy"]
    if settings.get("launch.use_cpu"):
        yield "Stock Accelerate does not shard on CPU ranks."
    if version == 2 and strategy == "no_shard":
        yield "Stock Accelerate ignores NO_SHARD under FSDP2 and runs full_shard."
    if version == 1 and settings.get("mesh.shard", gpus) != gpus:
        yield "Stock Accelerate refuses parallelism_config under FSDP1."
    if version == 2 and settings.get("checkpoint.state_dict") == "local":
        yield "Stock Accelerate refuses LOCAL_STATE_DICT under FSDP2."
    if version == 2 and settings.get("prefetch.backward") in ("post", "none"):
        yield "Stock Accelerate ignores fsdp_backward_prefetch under FSDP2."
    if version == 2 and settings.get("prefetch.forward"):
        yield "Stock Accelerate ignores fsdp_forward_prefetch under FSDP2."
    if settings.get("activation.checkpointing") == "selective":
        yield "Stock Accelerate refuses selective activation checkpointing."
    if version == 1 and settings.get("activation.offload"):
        yield "Stock Accelerate refuses to offload activations under FSDP1."
    for name in ("checkpoint.asynchronous", "offload.pin_memory"):
        if name in settings and settings[name] != (name == "offload.pin_memory"):
            yield f"Stock Accelerate ignores {BY_NAME[name].key}."


def fixed_entries(state: State, settings: Mapping[str, Any]) -> list[Entry]:
    """Return the keys of a new file that no question sets."""
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "machine_rank": 0, "use_cpu": False}
    if state.num_machines > 1:
        values |= {"rdzv_backend": "static", "same_network": True}
    rows = ((f"launch.{key}", key, value) for key, value in values.items())
    return [
        Entry(name=name, section="", key=key, value=value, means=value)
        for name, key, value in rows
        if name not in settings
    ]


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


def code_of(arguments: Mapping[str, Any]) -> str:
    """Return the call as Python code, with one argument per line."""
    lines = ["TrainingArguments("]
    for name, value in arguments.items():
        if isinstance(value, dict):
            lines += [f"    {name}={{", *(f"        {_python(key)}: {_python(item)}," for key, item in value.items())]
            lines += ["    },"]
        else:
            lines.append(f"    {name}={_python(value)},")
    return "\n".join([*lines, ")"])


def _python(value: Any) -> str:
    """Return a value as Python code, with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(map(_python, value))}]" if isinstance(value, list) else repr(value)


def _config(settings: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"version": settings["fsdp.version"]}
    strategy = STRATEGIES[settings["sharding.strategy"]]
    if settings["fsdp.version"] == 1:
        config["reshard_after_forward"] = strategy.name  # the key that Transformers reads under version 1
    elif strategy.is_sharded and not (strategy.hybrid and strategy.reshards_after_forward):
        config["reshard_after_forward"] = strategy.reshards_after_forward
    else:
        config["sharding_strategy"] = strategy.name
    for name, value in settings.items():
        row = BY_NAME[name]
        if name in ("fsdp.version", "sharding.strategy") or name.startswith("launch.") or value in ("", ()):
            continue
        key = f"dp_{name.partition('.')[2]}_size" if name.startswith("mesh.") else _KEYS.get(name, row.spellings[0])
        written = STOCK_VALUES.get(name, {}).get(value, value) if not isinstance(value, tuple) else list(value)
        config[key] = dict(written) if isinstance(written, Mapping) else written
    return config
