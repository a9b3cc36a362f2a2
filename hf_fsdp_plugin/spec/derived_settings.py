"""Makes a spec of the effective settings: settings that follow from others, and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources import environment_variables
from hf_fsdp_plugin.sources.interface import AUTO_WRAP, OFF, Setting
from hf_fsdp_plugin.sources.script_objects import PLUGIN
from hf_fsdp_plugin.spec.fsdp_spec import VERSION_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.precedence import Settings, conflict_problem, has_precedence, override_problem
from hf_fsdp_plugin.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, strategy_of

_FIELDS = frozenset(name for name, _, _ in FsdpSpec().settings())


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
