"""The same settings as ``TrainingArguments(...)``, in the keys that Transformers reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from hf_fsdp_plugin.cli.wizard.question import State
from hf_fsdp_plugin.cli.wizard.settings import STOCK_VALUES
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.supported import installed_versions, release_of
from hf_fsdp_plugin.vocabulary import BY_NAME

_KEYS: Final = {"offload.params": "cpu_offload"}
_OPTIMIZERS: Final = {"adafactor": "adafactor", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}
"""Optimizer -> ``optim`` of TrainingArguments, if it is not the default."""


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
    micro_batch, global_batch = int(state.answers["micro_batch"]), int(state.answers["global_batch"])
    arguments["per_device_train_batch_size"] = micro_batch
    arguments["gradient_accumulation_steps"] = global_batch // (micro_batch * state.world_size)
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
