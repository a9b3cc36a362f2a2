"""Makes one spec of the settings of all sources: precedence, overridden settings, derived settings, defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources import accelerate_file, command_line, environment_variables, script_objects
from hf_fsdp_plugin.sources.interface import AUTO_WRAP, OFF, Reader, Setting, SourceSettings
from hf_fsdp_plugin.sources.script_objects import PARALLELISM, PLUGIN, read_parallelism_config, read_plugin
from hf_fsdp_plugin.spec.fsdp_spec import VERSION_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, strategy_of

PRECEDENCE: Final[tuple[tuple[str, Reader], ...]] = (
    (script_objects.DISTRIBUTED_CONFIG, script_objects.read_distributed_config),
    (command_line.OVERRIDES, command_line.read_overrides),
    (command_line.SOURCE, command_line.read),
    (script_objects.ARGUMENTS, script_objects.read_arguments),
    (script_objects.ARGUMENTS, read_plugin),
    (script_objects.ARGUMENTS, read_parallelism_config),
    (environment_variables.TORCHRUN, environment_variables.read_torchrun),
    (accelerate_file.SOURCE, accelerate_file.read),
    (environment_variables.SOURCE, environment_variables.read),
)
"""The level and the reader of every source, highest precedence first. The defaults have the lowest precedence.

``DistributedConfig`` has the highest precedence, because the model is already sharded with it.

``TrainingArguments``, ``FullyShardedDataParallelPlugin`` and ``ParallelismConfig`` are one level, because all are part
of the script. If they set a setting to different values, the first of them overrides the others. If one sets the
strategy and the other a different ``reshard_after_forward``, neither has precedence, which is the error FSDP-E102.

A cluster sets the variables of torchrun for each job, so they override a file, which has a number of machines too.
"""

LEVELS: Final = tuple(dict.fromkeys(level for level, _ in PRECEDENCE))
FLAGS: Final = frozenset({command_line.OVERRIDES, command_line.SOURCE, environment_variables.TORCHRUN})
FILES: Final = frozenset({accelerate_file.SOURCE, environment_variables.SOURCE, environment_variables.TORCHRUN})
"""Levels of settings for many runs. That a level of ``FLAGS``, for one run, overrides them is a note, not a warning."""

OTHER_ENGINES: Final = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""Value of ``distributed_type`` -> name of an engine other than FSDP."""
COMPLEMENTARY = frozenset({"launch.distributed_type"})
"""Settings that several sources may set differently: ``fsdp=`` in a script turns FSDP on under any launcher."""
Settings = dict[str, Setting]
_FIELDS = frozenset(name for name, _, _ in FsdpSpec().settings())


def active_settings(given: Sequence[SourceSettings]) -> list[SourceSettings]:
    """Return the settings of all sources, without those that do not apply.

    If any source enables FSDP, ``inactive`` settings apply, and ``fsdp=False`` does not, because it is also the
    Trainer's default. If none does, ``inactive`` settings are reported and not used.
    """
    if any(source.enables_fsdp for source in given):
        given = [source if source.family is not None else _without_implied_off(source) for source in given]
        return [replace(source, problems=[*source.problems, *source.inactive_problems]) for source in given]
    return [_without_inactive(source) for source in given]


def _without_inactive(source: SourceSettings) -> SourceSettings:
    """Remove inactive settings, and report those that only FSDP has."""
    settings = [setting for setting in source.settings if not setting.inactive]
    unused = [setting for setting in source.settings if setting.inactive and _is_only_for_fsdp(setting)]
    origins = [*(setting.origin for setting in unused), *(problem.origin for problem in source.inactive_problems)]
    problems = list(source.problems)
    # Accelerate itself uses a ParallelismConfig in a run without FSDP.
    if origins and (origins[0] is None or origins[0].source != PARALLELISM):
        keys = dict.fromkeys(origin.spelling for origin in origins if origin is not None and origin.spelling)
        written = ", ".join(keys) or "fsdp_config"
        message = f"FSDP settings without fsdp do not enable FSDP and are not used: {written}."
        fix = "Set fsdp=True to shard the model, or remove these settings."
        problems.append(Problem(code="FSDP-W033", message=message, fix=fix, origin=origins[0]))
    return replace(source, settings=settings, problems=problems)


def _is_only_for_fsdp(setting: Setting) -> bool:
    """Whether a setting has no effect on a run without FSDP, unlike ``bf16`` or ``gradient_checkpointing``."""
    return not (setting.implied or setting.name.startswith("launch.") or setting.name == "activation.trainer")


def _without_implied_off(source: SourceSettings) -> SourceSettings:
    """Remove ``fsdp=False``. A flag of the command line is not a default, so it is reported."""
    off = [s for s in source.settings if s.implied and (s.name, s.value) == ("launch.distributed_type", "NO")]
    problems = list(source.problems)
    for setting in off if source.level == command_line.SOURCE else ():
        message = f"{setting.written} does not turn FSDP off, because another source enables it."
        problems.append(setting.problem("FSDP-W164", message, "Set distributed_type: NO in the config."))
    settings = [setting for setting in source.settings if setting not in off]
    return replace(source, settings=settings, problems=problems)


def merge_levels(levels: Iterable[SourceSettings]) -> tuple[dict[str, Setting], tuple[Problem, ...]]:
    """Return the effective setting of every name, and a note or a warning for each overridden setting.

    The values must be typed, because they are compared: ``FULL_SHARD`` and ``1`` are equal.
    """
    effective: dict[str, Setting] = {}
    problems: list[Problem] = []
    for level in levels:
        settings, conflicts = _merge_level(level)
        problems += conflicts
        for name, setting in settings.items():
            if name not in effective:
                effective[name] = setting
                continue
            if _script_enables_fsdp(setting, effective[name]):
                setting, effective[name] = effective[name], setting
            problems.append(override_problem(setting, effective[name]))
    return effective, tuple(problems)


def _merge_level(level: SourceSettings) -> tuple[dict[str, Setting], list[Problem]]:
    """Return one setting per name of one source. An explicit value overrides an implied one; a conflict is an error."""
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    for setting in sorted(level.settings, key=lambda setting: setting.implied):
        first = settings.setdefault(setting.name, setting)
        if first is setting or setting.implied or first.origin == setting.origin:
            continue
        problem_of = _repetition_problem if first.value == setting.value else conflict_problem
        problems.append(problem_of(setting, first))
    return settings, problems


def has_precedence(one: Setting, other: Setting) -> bool:
    """Whether `one` is from a level of higher precedence than `other`."""
    return LEVELS.index(one.level) < LEVELS.index(other.level)


def _script_enables_fsdp(setting: Setting, effective: Setting) -> bool:
    """Whether a script enables FSDP under a launcher that was started with ``--multi_gpu``, as Transformers does."""
    is_fsdp = setting.name in COMPLEMENTARY and setting.value == "FSDP" and setting.level == script_objects.ARGUMENTS
    return is_fsdp and effective.level == command_line.SOURCE and effective.value not in OTHER_ENGINES


def override_problem(setting: Setting, effective: Setting) -> Problem:
    """Return the note or warning that `effective` overrides `setting`."""
    if setting.value == effective.value:
        return _repetition_problem(setting, effective)
    by_flag = setting.level in FILES and effective.level in FLAGS
    if setting.name in COMPLEMENTARY and (setting.value in OTHER_ENGINES or not by_flag):
        return _engine_problem(setting, effective)
    message = f"{setting.written} is overridden by {effective.origin}."
    if by_flag or (setting.implied and effective.implied):
        return setting.problem("FSDP-N105", message)
    return setting.problem("FSDP-W103", message, "Set it in one place.")


def _engine_problem(setting: Setting, effective: Setting) -> Problem:
    """Return the problem that two sources select different kinds of parallelism."""
    if setting.value in OTHER_ENGINES:
        message = f"{setting.written} selects {OTHER_ENGINES[setting.value]}, and {effective.origin} enables FSDP."
        return setting.problem("FSDP-E120", message, "Keep one of them.")
    message = f"{setting.written} is overridden by {effective.origin}, which selects {effective.value}."
    return setting.problem("FSDP-W160", message, f"Set distributed_type: {effective.value} in the config.")


def conflict_problem(setting: Setting, first: Setting) -> Problem:
    """Return the error that one source sets a setting to two values."""
    return setting.problem("FSDP-E102", f"{setting.written} conflicts with {first.origin}.", "Keep one of them.")


def _repetition_problem(setting: Setting, first: Setting) -> Problem:
    return setting.problem("FSDP-N104", f"{setting.written} repeats {first.origin}.")


def derive_spec(effective: Settings, family_defaults: Mapping[str, Any]) -> tuple[FsdpSpec, tuple[Problem, ...]]:
    """Return the spec of these settings, and the problems of the derived settings."""
    problems: list[Problem] = []
    settings = dict(effective)
    _derive_off(settings, problems)
    _derive_mode(settings)
    _gather(settings, "launch.dynamo_config", "dynamo_")
    _gather(settings, "launch.extra", "")
    _gather(settings, "fp8.te_options", "")
    defaults = dict(family_defaults)
    version = settings["fsdp.version"].value if "fsdp.version" in settings else defaults["fsdp.version"]
    defaults |= VERSION_DEFAULTS[version]
    _derive_checkpointing(settings, problems)
    _derive_wrap_policy(settings, problems)
    _derive_strategy(settings, version, problems)
    given = {name: setting for name, setting in sorted(settings.items()) if name in _FIELDS}
    values = {**defaults, **{name: setting.value for name, setting in given.items()}}
    values = {name: MappingProxyType(value) if isinstance(value, dict) else value for name, value in values.items()}
    origins = {name: setting.origin for name, setting in given.items()}
    return FsdpSpec().with_values(values, origins), tuple(problems)


def _derive_off(settings: Settings, problems: list[Problem]) -> None:
    """Apply ``bf16: false`` to a mixed precision mode of lower precedence."""
    for dtype, name in OFF.items():
        mode, param = settings.get("launch.mixed_precision"), settings.get("precision.param")
        off = settings.pop(name, None)
        if off is None or mode is None or mode.value != dtype or has_precedence(mode, off):
            continue
        if not has_precedence(off, mode):
            problems.append(conflict_problem(off, mode))
            continue
        problems.append(override_problem(mode, off))
        settings["launch.mixed_precision"] = replace(off, name="launch.mixed_precision", value="no")
        if param is not None and param.value == dtype and has_precedence(off, param):
            settings["precision.param"] = replace(off, name="precision.param", value="auto")


def _derive_mode(settings: Settings) -> None:
    """Override ``launch.mixed_precision`` with ``precision.param`` if that has higher precedence."""
    mode, param = settings.get("launch.mixed_precision"), settings.get("precision.param")
    if mode is None or param is None or mode.origin == param.origin or param.implied or param.value == mode.value:
        return
    if mode.value == "fp8" and param.value == "bf16":
        return  # it is the dtype of everything that fp8 does not compute
    if has_precedence(param, mode):
        value = param.value if param.value in ("bf16", "fp16") else "no"
        settings["launch.mixed_precision"] = replace(param, name="launch.mixed_precision", value=value)


def _gather(settings: Settings, name: str, prefix: str) -> None:
    """Combine settings such as ``launch.extra.x`` and ``launch.extra.y`` into one mapping, ``launch.extra``."""
    parts = {key: settings.pop(key) for key in list(settings) if key.startswith(f"{name}.")}
    if parts:
        first = next(iter(parts.values()))
        value = {prefix + key.removeprefix(f"{name}."): part.value for key, part in parts.items()}
        settings[name] = replace(first, name=name, value=value)


def _derive_checkpointing(settings: Settings, problems: list[Problem]) -> None:
    """Set ``activation.checkpointing`` from ``gradient_checkpointing`` of TrainingArguments, and mark it as native."""
    trainer = settings.pop("activation.trainer", None)
    if trainer is None or not trainer.value:
        return
    own = settings.get("activation.checkpointing")
    if own is not None and own.value != "none":
        message = f"{own.written} and {trainer.origin} both recompute the activations."
        fix = f"Remove {trainer.origin.spelling}: FSDP's checkpointing needs no second all-gather."
        problems.append(own.problem("FSDP-E112", message, fix))
        return
    if own is not None and has_precedence(own, trainer):
        message = f"{own.written} does not turn off {trainer.origin}, which the Trainer itself applies."
        problems.append(own.problem("FSDP-W150", message, f"Remove {trainer.origin.spelling} to turn it off."))
    settings["activation.checkpointing"] = replace(trainer, name="activation.checkpointing", value="full")
    settings["activation.native"] = replace(trainer, name="activation.native", value=True)


def _derive_wrap_policy(settings: Settings, problems: list[Problem]) -> None:
    """If no wrap policy is set, select it by the size threshold, ``auto_wrap`` or the class names."""
    auto_wrap, policy = settings.pop(AUTO_WRAP, None), settings.get("wrap.policy")
    if auto_wrap is not None and policy is not None and policy.value == "none":
        if has_precedence(auto_wrap, policy):
            problems.append(override_problem(settings.pop("wrap.policy"), auto_wrap))
        elif has_precedence(policy, auto_wrap):
            problems.append(override_problem(auto_wrap, policy))
        else:
            problems.append(conflict_problem(policy, auto_wrap))
    if "wrap.policy" in settings:
        return
    threshold, classes = settings.get("wrap.min_num_params"), settings.get("wrap.classes")
    if threshold is not None and threshold.value > 0:
        if classes is not None:
            message = "a size threshold and layer classes are set, but no wrap policy."
            fix = "Set fsdp_auto_wrap_policy to TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP, or remove one of the two."
            problems.append(threshold.problem("FSDP-E113", message, fix))
        else:
            settings["wrap.policy"] = replace(threshold, name="wrap.policy", value="size")
    elif selects := auto_wrap or classes:
        settings["wrap.policy"] = replace(selects, name="wrap.policy", value="transformer")


def _derive_strategy(settings: Settings, version: int, problems: list[Problem]) -> None:
    """Combine the strategy with ``reshard_after_forward``, then with the mesh."""
    reshard, strategy = settings.pop("sharding.reshard", None), settings.get("sharding.strategy")
    if reshard is not None and strategy is not None:
        _combine_reshard(settings, reshard, version, problems)
    elif reshard is not None:
        settings["sharding.strategy"] = _strategy_of(reshard)
    _combine_mesh(settings, problems)


def _strategy_of(reshard: Setting, row: Strategy = DEFAULT_STRATEGY) -> Setting:
    value = strategy_of(sharded=True, hybrid=row.hybrid, reshard=reshard.value).name
    return replace(reshard, name="sharding.strategy", value=value)


def _combine_reshard(settings: Settings, reshard: Setting, version: int, problems: list[Problem]) -> None:
    strategy = settings["sharding.strategy"]
    row = STRATEGIES[strategy.value]
    other = _strategy_of(reshard, row)
    is_option = strategy.origin.spelling.lstrip("-").lower() == "fsdp"  # fsdp="full_shard auto_wrap"
    is_in_config = reshard.level == strategy.level and reshard.origin.source != PLUGIN  # in fsdp_config
    if not row.is_sharded and has_precedence(reshard, strategy):
        settings["sharding.strategy"] = _strategy_of(reshard)
        problems.append(override_problem(strategy, reshard))
    elif not row.is_sharded or row.reshards_after_forward == reshard.value:
        problems.append(reshard.problem("FSDP-N108", f"{reshard.written} has no effect with {strategy.origin}."))
    elif row.hybrid and row.reshards_after_forward:
        settings["sharding.strategy"] = replace(strategy, value=other.value)
        problems.append(reshard.problem("FSDP-N109", f"{reshard.written} changes {strategy.origin} to {other.value}."))
    elif version == 2 and is_option and is_in_config:
        # As in Transformers, fsdp_config has precedence over the options of fsdp.
        settings["sharding.strategy"] = other
        message = f"{strategy.written} is overridden by {reshard.origin}: the strategy is {other.value}."
        fix = f"Write {strategy.written.replace(strategy.value, other.value)}."
        problems.append(strategy.problem("FSDP-W103", message, fix))
    elif reshard.origin.source == strategy.origin.source == environment_variables.SOURCE:
        # accelerate launch always sets both variables; each FSDP version reads one of them.
        if version == 2:
            settings["sharding.strategy"] = _strategy_of(reshard)
        used = reshard if version == 2 else strategy
        message = f"{strategy.written} and {reshard.written} differ; FSDP{version} reads {used.origin.spelling}."
        problems.append(reshard.problem("FSDP-N110", message))
    elif has_precedence(strategy, reshard):
        problems.append(override_problem(reshard, strategy))
    elif has_precedence(reshard, strategy):
        settings["sharding.strategy"] = other
        problems.append(override_problem(strategy, reshard))
    else:
        message = f"{strategy.written} conflicts with {reshard.origin}, which means {other.value}."
        fix = f"Keep one of them: {strategy.value}, or {other.value}."
        problems.append(strategy.problem("FSDP-E102", message, fix))


def _combine_mesh(settings: Settings, problems: list[Problem]) -> None:
    """Change the strategy to its hybrid counterpart if the mesh replicates, or to no_shard if the shard size is 1."""
    replicate, shard = settings.get("mesh.replicate"), settings.get("mesh.shard")
    strategy = settings.get("sharding.strategy")
    shares_samples = any(settings[name].value != 1 for name in ("mesh.context", "mesh.tensor") if name in settings)
    if shard is not None and shard.value == 1 and _num_ranks(settings) > 1 and not shares_samples:
        if strategy is None:
            unsharded = strategy_of(sharded=False, hybrid=False, reshard=False)
            settings["sharding.strategy"] = replace(shard, name="sharding.strategy", value=unsharded.name)
            if replicate is None or replicate.value == "auto":
                message = f"{shard.written} shards nothing: every rank has a copy of the model ({unsharded.name})."
                problems.append(shard.problem("FSDP-W162", message, "Remove it to shard the model over all ranks."))
        return
    if replicate is None or replicate.value == "auto" or replicate.value == 1:
        return
    plain = STRATEGIES[strategy.value] if strategy is not None else DEFAULT_STRATEGY
    hybrid = plain.counterpart(hybrid=True)
    if hybrid is not plain:
        settings["sharding.strategy"] = replace(strategy or replicate, name="sharding.strategy", value=hybrid.name)
        message = f"{replicate.written} changes the strategy {plain.name} to {hybrid.name}."
        problems.append(replicate.problem("FSDP-N111", message))


def _num_ranks(settings: Settings) -> int:
    """Return the number of ranks that these settings imply; 1 if they do not imply a number."""
    sizes = (settings[name].value for name in ("mesh.replicate", "launch.num_processes") if name in settings)
    return max((size for size in sizes if size != "auto"), default=1)
