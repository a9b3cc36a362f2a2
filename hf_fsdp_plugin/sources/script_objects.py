"""Reads the objects that a script makes: ``TrainingArguments``, ``DistributedConfig``, Accelerate's plugin and
``ParallelismConfig``.

Transformers and Accelerate are not imported. ``TrainingArguments`` and a ``FullyShardedDataParallelPlugin`` are read
from the arguments of their constructors: that of the plugin adds values from the environment and defaults to the
object. A ``DistributedConfig``, with which ``from_pretrained`` shards a model while it loads it, is an object with
``to_dict``, a dict, or the path of a JSON file as written by ``DistributedConfig.to_json_file``. A
``ParallelismConfig`` is read from its attributes, or is a dict.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from typing import Any, Final

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_file import FsdpConfig, add_fsdp_config
from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, ConfigFileError, config_tree
from hf_fsdp_plugin.sources.interface import Collector, Sources, SourceSettings, entry_of
from hf_fsdp_plugin.strategies import strategy_of
from hf_fsdp_plugin.vocabulary import FALSE_WORDS, TRUE_WORDS, find_row, plain_key, word_of

DISTRIBUTED_CONFIG = "DistributedConfig"
ARGUMENTS = "TrainingArguments"
KEYS = ("bf16", "fp16", "fp8", "gradient_checkpointing", "activation_checkpointing", "use_cpu", "no_cuda")
"""Arguments that are settings whether or not FSDP is enabled."""

FsdpOptions = bool | str | Enum | Sequence[str | Enum] | None
"""Options as text or list, or a bool."""
_AXIS_OF_FIELDS: Final = {"tp_": "tp_size", "ep_": "ep_size"}
"""Beginning of the names of fields -> the size that must be above 1, so that they have an effect."""

FSDP_SIZES: Final = {"fsdp_size": "mesh.shard", "dp_replicate_size": "mesh.replicate"}
"""Size of a ``DistributedConfig`` for data parallelism -> its setting."""
_NUMBER: Final = re.compile(r"\+?(\d{1,19})(?:\.0+)?", re.ASCII)
_DEFAULTS: Final = frozenset({"", "auto", "false", "none", "null"})

PLUGIN = "FullyShardedDataParallelPlugin"
PARALLELISM = "ParallelismConfig"
DATA_SIZES = ("dp_replicate_size", "dp_shard_size")
STATE_DICT_CONFIGS = ("state_dict_config", "optim_state_dict_config")
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")
_GATHERED = {"offload_to_cpu": True, "rank0_only": True}
"""Options of torch's state dict configs -> the values that correspond to the checkpoints of this package."""
_POLICIES = {"transformer_auto_wrap_policy": "transformer", "size_based_auto_wrap_policy": "size"}
_OF_PEFT = "peft.utils.other.fsdp_auto_wrap_policy"
"""Name of PEFT's wrap policy in messages."""
_SIZE_DEFAULT = 100_000_000
"""torch's default threshold of ``size_based_auto_wrap_policy``."""


def read_arguments(sources: Sources) -> SourceSettings | None:
    """Read ``sources.training_arguments``. Arguments that are not related to FSDP are ignored."""
    if not (arguments := sources.training_arguments):
        return None
    out = Collector(ARGUMENTS)
    # None, False and 0 are defaults of Transformers, and not settings.
    given = {key: v for key, v in arguments.items() if v is not None and (v or not isinstance(v, int))}
    for key in KEYS:
        if key in given:
            out.add_key("training", key, given[key])
    fsdp = entry_of("fsdp", arguments["fsdp"]) if arguments.get("fsdp") is not None else None
    add_fsdp_arguments(out, fsdp, arguments.get("fsdp_config"))
    return out.result("training_arguments")


def add_fsdp_arguments(
    out: Collector, fsdp: ConfigEntry | None, fsdp_config: FsdpConfig, *, config_key: str = "fsdp_config"
) -> None:
    """Add the arguments ``fsdp`` and ``fsdp_config``. As in Transformers, only ``fsdp`` enables FSDP.

    Args:
        config_key: the key or flag of ``fsdp_config`` as written.
    """
    if fsdp is not None:
        out.add_options(fsdp)
    inner = Collector(out.source)
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
    if (given := sources.distributed_config) is None:
        return None
    if hasattr(given, "to_dict"):
        given = given.to_dict()
    out = Collector(given.shown if isinstance(given, ConfigFile) else DISTRIBUTED_CONFIG)
    try:
        tree = config_tree(given)
    except ConfigFileError as error:
        return SourceSettings(problems=[error.problem])
    if not add_distributed_config(out, tree.value):
        return SourceSettings(problems=out.problems)
    return out.result("training_arguments")


def add_distributed_config(out: Collector, entries: Iterable[ConfigEntry]) -> bool:
    """Add the fields of a ``DistributedConfig``. Return false if it does not shard, so that it sets nothing."""
    # A field that is null has its default, as in Transformers.
    fields = {plain_key(entry.key, "distributed"): entry for entry in entries if entry.value.value is not None}
    _add_fields(out, fields)
    sizes = {name: _size_of(fields, name) for name in FSDP_SIZES}
    if sizes["fsdp_size"] == sizes["dp_replicate_size"] == 1:
        # from_pretrained does not shard the model, so these fields set nothing.
        message = "fsdp_size and dp_replicate_size are 1: from_pretrained does not shard the model."
        out.settings.clear()
        if not out.problems:
            out.problems.append(Problem(code="FSDP-N081", message=message, origin=Origin(source=out.source)))
        return False
    _add_consequences(out, fields, sizes)
    return True


def _add_fields(out: Collector, fields: Mapping[str, ConfigEntry]) -> None:
    unknown: list[ConfigEntry] = []
    for name, entry in fields.items():
        row = find_row(name, ("distributed",))
        if row is not None and row.kind == "any":
            axis = _AXIS_OF_FIELDS.get(name[:3], "")
            if axis in fields and (_size_of(fields, axis) or 0) > 1:
                continue  # Transformers uses it when it loads the model
            if not entry.value.is_empty and word_of(entry.value.value) not in _DEFAULTS:
                out.report("FSDP-N080", entry, f"{entry.key} is {row.about[0].lower()}{row.about[1:]}")
        elif name == "fsdp_mixed_precision":
            _add_mixed_precision(out, entry)
        elif name in FSDP_SIZES and word_of(entry.value.value) in ("-1", "auto"):
            # Accelerate computes such a size from the world size; Transformers does not.
            out.expect(entry, "a number of ranks", "Set the number of ranks.", setting=FSDP_SIZES[name])
        elif row is not None and row.scope == "distributed":
            out.add_entry(row, entry)
        else:
            unknown.append(entry)
    # Transformers ignores unknown keys of a dict, so a misspelled size would leave the model unsharded.
    out.add_mapping(unknown, ("distributed",))


def _add_mixed_precision(out: Collector, entry: ConfigEntry) -> None:
    """Add the dtypes of the policy that Transformers uses for ``fsdp_mixed_precision=True``."""
    word = word_of(entry.value.value)
    if word in TRUE_WORDS:
        out.add("precision.param", entry, value="bf16")
        out.add("precision.reduce", entry, value="fp32")
    elif word not in FALSE_WORDS:
        out.expect(entry, "true or false", f"Correct {entry.key}, or remove it.", setting="precision.param")


def _add_consequences(out: Collector, fields: Mapping[str, ConfigEntry], sizes: Mapping[str, int | None]) -> None:
    """Add the settings that follow from the fields, including the fields that are absent."""
    out.mentions_fsdp = True
    defaults = {**dict.fromkeys(FSDP_SIZES, 1), "fsdp_cpu_offload": False}
    for name, value in defaults.items():
        if name not in fields or fields[name].value.is_empty:
            out.add(FSDP_SIZES.get(name, "offload.params"), entry_of(name, value), implied=True)
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


def read_plugin(sources: Sources) -> SourceSettings | None:
    """Read ``sources.plugin_object``: arguments of the constructor, and attributes assigned later. ``None`` is skipped.

    Objects of torch (enums, ``CPUOffload``, ``MixedPrecision``, wrap policies) are identified by their names and
    attributes, because torch is not imported.
    """
    if (given := sources.plugin_object) is None:
        return None
    out = Collector(PLUGIN)
    out.mentions_fsdp = True
    out.add("launch.distributed_type", entry_of("", "FSDP"), implied=True)
    for key, value in given.items():
        if value is not None:
            _add(out, key, value, given)
    return out.result("accelerate")


def _add(out: Collector, key: str, value: Any, given: Mapping[str, Any]) -> None:
    if key == "cpu_offload":
        _add_offload(out, key, value)
    elif key == "mixed_precision_policy":
        _add_precision(out, key, value)
    elif key == "auto_wrap_policy" and not isinstance(value, str):
        _add_policy(out, key, value)
    elif key in STATE_DICT_CONFIGS:
        _add_state_dict(out, key, value, given)
    elif key == "reshard_after_forward" and type(value) is int:
        reason = "for torch, a number is the size of a group that the parameters are resharded to after forward"
        _report(out, key, str(value), reason, "Pass True, False or a ShardingStrategy.")
    elif key == "param_init_fn":
        _report(out, key, value, "the plugin itself initializes modules on the meta device", "Remove it.")
    elif key == "ignored_modules" and not isinstance(value, str):
        reason = "modules are selected by name, not as objects"
        _report(out, key, value, reason, "Pass a regular expression on their names, such as '.*lm_head'.")
    else:
        out.add_mapping([entry_of(key, value)], ("fsdp",))


def _add_offload(out: Collector, key: str, value: Any) -> None:
    """Add a bool, FSDP1's ``CPUOffload``, FSDP2's ``CPUOffloadPolicy`` or ``OffloadPolicy``, which does not offload."""
    offloads = value if isinstance(value, bool | str) else getattr(value, "offload_params", None)
    if offloads is None:
        name = type(value).__name__
        if name not in ("CPUOffloadPolicy", "OffloadPolicy"):
            _report(out, key, value, "this is not an offload policy of torch", "Pass True or False.")
            return
        offloads = name == "CPUOffloadPolicy"
    out.add_key("fsdp", key, offloads)
    if hasattr(value, "pin_memory"):
        out.add_key("fsdp", "pin_memory", value.pin_memory)


def _add_precision(out: Collector, key: str, value: Any) -> None:
    """Add a dtype for all fields, a dict, FSDP1's ``MixedPrecision`` or FSDP2's ``MixedPrecisionPolicy``."""
    if (text := entry_of(key, value).value.text).startswith("torch."):  # a dtype
        value = text
    if not isinstance(value, str | Mapping):
        if not any(hasattr(value, name) for name in _DTYPES):
            _report(out, key, value, "this is not a precision policy of torch", "Pass bf16, fp16 or a policy.")
            return
        _report_switches(out, key, value)
        value = {name: dtype for name in _DTYPES if (dtype := getattr(value, name, None)) is not None}
    if isinstance(value, Mapping):
        value = {name: entry_of("", dtype).value.text for name, dtype in value.items() if dtype is not None}
    out.add_key("fsdp", key, value)


def _report_switches(out: Collector, key: str, policy: Any) -> None:
    """Report fields of a precision policy that are not dtypes and differ from the defaults, which a plan applies."""
    for field in dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ():
        given, fixed = (_names_of(value) for value in (getattr(policy, field.name), field.default))
        if field.name not in _DTYPES and given != fixed:
            message = f"{field.name}={given} of {key} is not supported: the plan uses {field.name}={fixed}."
            out.report("FSDP-E037", entry_of(key, type(policy).__name__), message, f"Remove {field.name}.")


def _names_of(value: Any) -> Any:
    """Return the names of the classes in a sequence, such as ``_module_classes_to_ignore``; another value itself."""
    return [kind.__name__ for kind in value] if isinstance(value, list | tuple | Set) else value


def unused_options(key: str, config: Any) -> str:
    """Return the message of FSDP-N136: options of a state dict config without effect; empty if there are none."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    given = {field: getattr(config, field.name) for field in fields}
    options = [f"{field.name}={v}" for field, v in given.items() if v != _GATHERED.get(field.name, field.default)]
    message = f"{key} selects the state dict type. {', '.join(options)} has no effect: this package writes checkpoints "
    message += "itself, and gathers a full state dict in the CPU memory of rank 0."
    return message if options else ""


def _add_state_dict(out: Collector, key: str, config: Any, given: Mapping[str, Any]) -> None:
    """Add the type of a state dict config, and report its options: this package writes checkpoints itself."""
    if given.get("state_dict_type") is None:
        form = type(config).__name__.removesuffix("StateDictConfig").removesuffix("Optim")  # FullStateDictConfig
        out.add_key("fsdp", "state_dict_type", form.lower(), written=key)
    if message := unused_options(key, config):
        out.report("FSDP-N136", entry_of(key, type(config).__name__), message)


def _add_policy(out: Collector, key: str, value: Any) -> None:
    """Add a wrap policy of torch: a function, a ``functools.partial`` of a function, or a ``ModuleWrapPolicy``."""
    keywords: Mapping[str, Any] = getattr(value, "keywords", {})
    name = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
    classes = keywords.get("transformer_layer_cls") or getattr(value, "_module_classes", None)
    if name == "ModuleWrapPolicy" or name in _POLICIES:
        policy = _POLICIES.get(name, "transformer")
        out.add("wrap.policy", entry_of(key, name), value=policy)
        if classes:
            names = sorted(kind.__name__ for kind in classes if inspect.isclass(kind))
            out.add_key("fsdp", "transformer_layer_cls", names)
        if policy == "size":
            out.add_key("fsdp", "min_num_params", keywords.get("min_num_params", _SIZE_DEFAULT))
        return
    if is_of_peft(value):
        out.add("wrap.policy", entry_of(key, _OF_PEFT), value="transformer")
        if names := _layers_of_peft(keywords["policies"]):
            out.add("wrap.classes", entry_of(key, _OF_PEFT), value=names)
        return
    fix = "Pass transformer_cls_names_to_wrap, min_num_params, or one of torch's policies."
    _report(out, key, name, "a custom wrap function is not supported", fix)


def is_of_peft(policy: Any) -> bool:
    """Whether a wrap policy is PEFT's ``fsdp_auto_wrap_policy``, which wraps the model's own layers."""
    inner = getattr(policy, "keywords", {}).get("policies", ())
    functions = (getattr(each, "keywords", {}).get("lambda_fn") for each in inner)
    return any(str(getattr(function, "__module__", "")).startswith("peft.") for function in functions)


def _layers_of_peft(policies: Iterable[Any]) -> list[str]:
    """Return the layer classes of the model in PEFT's policy, without PEFT's own modules, which few models have."""
    groups = (getattr(policy, "keywords", {}).get("transformer_layer_cls", ()) for policy in policies)
    classes = {kind for group in groups for kind in group if not kind.__module__.startswith("peft.")}
    return sorted(kind.__name__ for kind in classes)


def _report(out: Collector, key: str, value: Any, reason: str, fix: str) -> None:
    entry = entry_of(key, value if isinstance(value, str) else type(value).__name__)
    out.report("FSDP-E037", entry, f"{key} is {entry.value.text}: {reason}.", fix)


def read_parallelism_config(sources: Sources) -> SourceSettings | None:
    """Read ``sources.parallelism_config``; ``None`` if there is none.

    The object is also an argument of runs without FSDP, so it does not enable FSDP. Its constructor replaces missing
    sizes by 1: two data sizes of 1 are not set. If one of them is larger, a 1 is a size.
    """
    if (given := sources.parallelism_config) is None:
        return None
    out = Collector(PARALLELISM)
    out.add_mapping([entry_of(name, value) for name, value in parallelism_fields(given).items()], ("parallelism",))
    inactive = Collector(PARALLELISM)
    inactive.extend(out, active=False)
    return inactive.result(None)


def parallelism_fields(given: Any) -> dict[str, Any]:
    """Return the fields of a ``ParallelismConfig`` that are set: sizes, and handlers of axes that are not used."""
    fields = given if isinstance(given, Mapping) else vars(given)
    fields = {name: value for name, value in fields.items() if value is not None and not name.startswith("_")}
    if all(fields.get(name, 1) == 1 for name in DATA_SIZES):
        fields = {name: value for name, value in fields.items() if name not in DATA_SIZES}
    if (exchange := getattr(fields.get("cp_handler"), "cp_comm_strategy", None)) is not None:
        fields["cp_comm_strategy"] = exchange
    # The constructor sets the backends, and the handler of an axis above 1.
    return {
        name: value
        for name, value in fields.items()
        if not name.endswith("_backend") and name != "device_mesh"
        if not (name.endswith("_handler") and fields.get(f"{name.partition('_')[0]}_size", 1) != 1)
    }
