"""Reads the objects of Transformers that a script makes: ``TrainingArguments`` and ``DistributedConfig``.

Transformers is not imported. ``TrainingArguments`` are read from their keyword arguments. A ``DistributedConfig``, with
which ``from_pretrained`` shards a model while it loads it, is an object with ``to_dict``, a dict, or the path of a JSON
file as written by ``DistributedConfig.to_json_file``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_file import FsdpConfig, add_fsdp_config
from hf_fsdp_plugin.sources.collector import Collector, entry_of
from hf_fsdp_plugin.sources.interface import ConfigFile, Sources, SourceSettings, config_tree
from hf_fsdp_plugin.sources.tree import ConfigEntry, ConfigFileError
from hf_fsdp_plugin.spellings import FALSE_WORDS, TRUE_WORDS, word_of
from hf_fsdp_plugin.strategies import strategy_of
from hf_fsdp_plugin.vocabulary import find_row, plain_key

DISTRIBUTED_CONFIG = "DistributedConfig"
ARGUMENTS = "TrainingArguments"
KEYS = ("bf16", "fp16", "fp8", "gradient_checkpointing", "activation_checkpointing", "use_cpu", "no_cuda")
"""Arguments that are settings whether or not FSDP is enabled."""
OLD_KEYS = ("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
"""Arguments of Transformers 4 that Transformers 5 removed."""

FsdpOptions = bool | str | Enum | Sequence[str | Enum] | None
"""Options as text or list, or a bool."""
OTHER_AXES: Final = ("tp_size", "pp_size", "ep_size")
"""Sizes of the axes that FSDP does not use. Only 1 is supported."""

_SIZES: Final = MappingProxyType({"fsdp_size": "mesh.shard", "dp_replicate_size": "mesh.replicate"})
_NUMBER: Final = re.compile(r"\+?(\d{1,19})(?:\.0+)?", re.ASCII)
_DEFAULTS: Final = frozenset({"", "auto", "false", "none", "null"})


def read_arguments(sources: Sources) -> SourceSettings | None:
    """Read ``sources.training_arguments``. Arguments that are not related to FSDP are ignored."""
    arguments = sources.training_arguments
    if not arguments:
        return None
    out = Collector(ARGUMENTS)
    # None, False and 0 are defaults of Transformers, and not settings.
    given = {key: v for key, v in arguments.items() if v is not None and (v or not isinstance(v, int))}
    for key in KEYS:
        if key in given:
            out.add_key("training", key, given[key])
    old = {key: given[key] for key in OLD_KEYS if key in given}
    fsdp = entry_of("fsdp", arguments["fsdp"]) if arguments.get("fsdp") is not None else None
    add_fsdp_arguments(out, fsdp, arguments.get("fsdp_config"), old)
    return out.result("training_arguments")


def add_fsdp_arguments(
    out: Collector,
    fsdp: ConfigEntry | None,
    fsdp_config: FsdpConfig,
    old_arguments: Mapping[str, Any] = MappingProxyType({}),
    *,
    config_key: str = "fsdp_config",
) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``. As in Transformers, only ``fsdp`` enables FSDP.

    Args:
        old_arguments: the arguments in ``OLD_KEYS``, which are part of ``fsdp_config`` today.
        config_key: the key or flag of ``fsdp_config`` as written.
    """
    if fsdp is not None:
        out.add_options(fsdp)
    inner = Collector(out.source)
    for key, value in old_arguments.items():
        inner.add_key("fsdp", key, value)
    if isinstance(fsdp_config, str) and not fsdp_config.strip():
        if out.mentions_fsdp:
            message = f"{config_key} is {fsdp_config!r}, which is not a value."
            out.report("FSDP-E050", entry_of(config_key, fsdp_config), message, "Write JSON, or the path of a file.")
    elif fsdp_config is not None and fsdp_config != {}:
        add_fsdp_config(inner, fsdp_config)
    out.extend(inner, active=out.mentions_fsdp)


def read_distributed_config(sources: Sources) -> SourceSettings | None:
    """Read ``sources.distributed_config``; ``None`` if there is none.

    Every field of a ``DistributedConfig`` has a value when the model is loaded, so an absent ``dp_replicate_size`` is 1
    and an absent ``fsdp_cpu_offload`` is false. ``fsdp_mixed_precision`` sets dtypes only if it is true.
    """
    given = sources.distributed_config
    if given is None:
        return None
    if hasattr(given, "to_dict"):
        given = given.to_dict()
    out = Collector(given.shown if isinstance(given, ConfigFile) else DISTRIBUTED_CONFIG)
    try:
        tree = config_tree(given)
    except ConfigFileError as error:
        return SourceSettings(problems=[error.problem])
    # A field that is null has its default, as in Transformers.
    entries = (entry for entry in tree.value if entry.value.value is not None)
    fields = {plain_key(entry.key, "distributed"): entry for entry in entries}
    _add_fields(out, fields)
    sizes = {name: _size_of(fields, name) for name in _SIZES}
    if sizes["fsdp_size"] == sizes["dp_replicate_size"] == 1:
        # from_pretrained does not shard the model, so these fields set nothing.
        message = "fsdp_size and dp_replicate_size are 1: from_pretrained does not shard the model."
        note = Problem(code="FSDP-N081", message=message, origin=Origin(source=out.source))
        return SourceSettings(problems=out.problems or [note])
    _add_consequences(out, fields, sizes)
    return out.result("training_arguments")


def _add_fields(out: Collector, fields: Mapping[str, ConfigEntry]) -> None:
    unknown: list[ConfigEntry] = []
    for name, entry in fields.items():
        row = find_row(name, ("distributed",))
        if row is not None and row.kind == "any":
            if not entry.value.is_empty and word_of(entry.value.value) not in _DEFAULTS:
                out.report("FSDP-N080", entry, f"{entry.key} is {row.about[0].lower()}{row.about[1:]}")
        elif name == "fsdp_mixed_precision":
            _add_precision(out, entry)
        elif name in _SIZES and word_of(entry.value.value) in ("-1", "auto"):
            # Accelerate computes such a size from the world size; Transformers does not.
            message = f"{entry.key} is {entry.value.text}; expected a number of ranks."
            out.report("FSDP-E101", entry, message, "Set the number of ranks.", setting=_SIZES[name])
        elif row is not None and row.scope == "distributed":
            out.add_entry(row, entry)
        else:
            unknown.append(entry)
    # Transformers ignores unknown keys of a dict, so a misspelled size would leave the model unsharded.
    out.add_mapping(unknown, ("distributed",))


def _add_precision(out: Collector, entry: ConfigEntry) -> None:
    """Add the dtypes of the policy that Transformers uses for ``fsdp_mixed_precision=True``."""
    word = word_of(entry.value.value)
    if word in TRUE_WORDS:
        out.add("precision.param", entry, value="bf16")
        out.add("precision.reduce", entry, value="fp32")
    elif word not in FALSE_WORDS:
        message = f"{entry.key} is {entry.value.shown}; expected true or false."
        out.report("FSDP-E101", entry, message, f"Correct {entry.key}, or remove it.", setting="precision.param")


def _add_consequences(out: Collector, fields: Mapping[str, ConfigEntry], sizes: Mapping[str, int | None]) -> None:
    """Add the settings that follow from the fields, including the fields that are absent."""
    out.mentions_fsdp = True
    defaults = {**dict.fromkeys(_SIZES, 1), "fsdp_cpu_offload": False}
    for name, value in defaults.items():
        if name not in fields or fields[name].value.is_empty:
            out.add(_SIZES.get(name, "offload.params"), entry_of(name, value), implied=True)
    cause = fields.get("fsdp_size") or entry_of("fsdp_size", 1)
    out.add("launch.distributed_type", cause, value="FSDP", implied=True)
    out.add("fsdp.version", cause, value="2", implied=True)
    if "fsdp_plan" in fields and not fields["fsdp_plan"].value.is_empty and sizes["fsdp_size"] != 1:
        return  # the plan decides which parameters are freed after forward
    # By default, Transformers frees the layers' parameters after forward.
    row = strategy_of(sharded=sizes["fsdp_size"] != 1, hybrid=sizes["dp_replicate_size"] != 1, reshard=True)
    out.add("sharding.strategy", cause, value=row.name, implied=True)


def _size_of(fields: Mapping[str, ConfigEntry], name: str) -> int | None:
    """Return a size, which is 1 if it is absent; ``None`` if it is not a number, which the parser reports."""
    entry = fields.get(name)
    if entry is None or entry.value.is_empty:
        return 1
    number = _NUMBER.fullmatch(word_of(entry.value.value))
    return int(number[1]) if number is not None else None
