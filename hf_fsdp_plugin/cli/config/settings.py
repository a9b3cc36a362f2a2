"""The settings that the answers mean, the comments about them, and the same settings as ``TrainingArguments(...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_fsdp_plugin.cli.config.question import State
from hf_fsdp_plugin.cli.config.questions import BY_SETTING
from hf_fsdp_plugin.cli.config_text import SYNC_EACH_BATCH, script_arguments, setting_lines
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.supported import installed_versions, release_of
from hf_fsdp_plugin.vocabulary import BY_NAME, PREFIXES

HEADER: Final = "# hf-fsdp config: "
"""Begins each line of the comment at the beginning of a file."""
_FSDP1: Final = {"prefetch.backward": "pre", "params.use_orig": True}
"""Settings that are written for FSDP1, because stock Accelerate has other defaults, and their values."""
_OPTIMIZERS: Final = {"adafactor": "adafactor", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}
"""Optimizer -> ``optim`` of TrainingArguments, if it is not the default."""


def settings_of(state: State) -> dict[str, Any]:
    """Return the settings that the answers mean, by canonical name, in the order of a new file."""
    answers = state.answers
    found: dict[str, Any] = {"launch.distributed_type": "FSDP", "launch.num_processes": state.world_size}
    if state.cpu:
        found["launch.use_cpu"] = True
    for name, question in BY_SETTING.items():
        if question.name in answers and not (answers[question.name] == "" and name != "wrap.classes"):
            found[name] = answers[question.name]
    if state.version == 1:
        written = _FSDP1 if answers["ram_efficient_loading"] else {**_FSDP1, "loading.sync_module_states": True}
        given = {name: state.existing.get(name) for name in written if state.existing.asked(name)}
        found |= {**written, **given}
    if "wrap.classes" in found:
        found["wrap.classes"] = tuple(word for word in found["wrap.classes"].split(",") if word)
    if state.is_hybrid:
        found["mesh.replicate"] = state.world_size // found["mesh.shard"]
        if state.version == 1 and found["mesh.shard"] == state.gpus:
            # FSDP1 shards within a machine by default, and stock Accelerate refuses a mesh with it.
            del found["mesh.shard"], found["mesh.replicate"]
    return found


def fixed_settings(state: State) -> dict[str, Any]:
    """Return the settings of a new file that no question sets."""
    found = {"launch.compute_environment": "LOCAL_MACHINE", "launch.machine_rank": 0, "launch.use_cpu": state.cpu}
    return found if state.num_machines == 1 else {**found, "launch.rdzv_backend": "static", "launch.same_network": True}


def unused_settings(state: State, settings: Mapping[str, Any]) -> set[str]:
    """Return the settings that the answers leave without a meaning, whose keys are removed from an existing file."""
    unused = {name for name in BY_SETTING if not name.startswith(("launch.", "mesh."))}
    unused.add("loading.sync_module_states")
    if state.version == 2:
        unused |= {"params.use_orig", "prefetch.limit_all_gathers"}
    if not state.answers["offload"]:
        unused.add("offload.pin_memory")
    if state.existing.launch.machine_rank >= state.num_machines:
        unused.add("launch.machine_rank")
    mesh = state.existing.mesh
    is_plain = STRATEGIES[settings["sharding.strategy"]].is_sharded and not state.is_hybrid
    if not (is_plain and mesh.shard in ("auto", state.world_size) and mesh.replicate in ("auto", 1)):
        unused |= {"mesh.shard", "mesh.replicate"}  # other sizes do not fit the strategy
    return unused - set(settings)


def comments_of(state: State) -> dict[str, str]:
    """Return why the settings have their values, by canonical name."""
    answered = {name: question for name, question in BY_SETTING.items() if question.name in state.answers}
    comments = {name: question.comment(state.answers[question.name], state) for name, question in answered.items()}
    if state.num_machines > 1:
        comments["launch.num_processes"] = f"{state.num_machines} machines × {state.gpus} GPUs"
    return {**comments, "mesh.shard": "ranks that share one copy of the model", "mesh.replicate": "copies of the model"}


def header_of(state: State, memory: str = "") -> list[str]:
    """Return the comment at the beginning of the file: model, batch, the arguments of the script and the memory."""
    answers = state.answers
    tokens = f" of {answers['seq_len']:,} tokens" if "seq_len" in answers else ""
    lines = [
        state.model.text if state.model is not None else "",
        f"{answers['global_batch']:,} samples{tokens} per step on {state.world_size:,} ranks:",
        " ".join(script_arguments(answers["micro_batch"], state.accumulation, answers.get("sync_each_batch", False))),
        f"predicted memory: {memory}" if memory else "",
    ]
    return [f"{HEADER}{line}" for line in lines if line]


def with_header(text: str, header: Sequence[str]) -> str:
    """Return the text with another comment at its beginning, if it has one of this verb."""
    lines = text.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if line.startswith(HEADER)), None)
    if start is None:
        return text
    rest = [line for line in lines[start:] if not line.startswith(HEADER)]
    return "".join([*lines[:start], *(f"{line}\n" for line in header), *rest])


def arguments_of(state: State, spec: FsdpSpec) -> dict[str, Any]:
    """Return the keyword arguments of ``TrainingArguments`` for the settings of the file and for the batch."""
    settings = {
        name: value
        for name, value, _ in spec.settings()
        if spec.asked(name) and name in BY_NAME and not name.startswith("launch.")
    }
    if spec.origin("precision.param") == spec.origin("launch.mixed_precision"):
        settings.pop("precision.param", None)  # bf16=True sets it
    if spec.activation.native:
        del settings["activation.checkpointing"]
    config: dict[str, Any] = {}  # whose keys have no prefix
    for line in setting_lines(settings, spec.fsdp.version, {}):
        key, value = line.key.removeprefix("fsdp_").removeprefix(PREFIXES["parallelism"]), line.value
        if line.name == "offload.params":
            key = "cpu_offload"
        elif line.name == "sharding.strategy" and spec.fsdp.version == 1:  # the key that Transformers reads
            key, value = "reshard_after_forward", line.means
        elif isinstance(line.means, tuple):
            value = list(line.means)
        config[key] = dict(value) if isinstance(value, Mapping) else value
    arguments: dict[str, Any] = {"fsdp": True, "fsdp_config": config}
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
        arguments["accelerator_config"] = SYNC_EACH_BATCH
    if optimizer := _OPTIMIZERS.get(state.answers.get("optimizer", "")):
        arguments["optim"] = optimizer
    return arguments
