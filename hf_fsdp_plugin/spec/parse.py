"""Settings to an ``FsdpSpec``: values typed, derived settings folded, defaults of the dialect filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.keys import AUTO_WRAP
from hf_fsdp_plugin.sources.precedence import is_stronger, lost
from hf_fsdp_plugin.sources.settings import Dialect, Reading, Setting
from hf_fsdp_plugin.spec import model
from hf_fsdp_plugin.spec.values import NotSaid, ValueProblem, shown, typed
from hf_fsdp_plugin.strategies import DEFAULT, STRATEGIES, Strategy, strategy_of
from hf_fsdp_plugin.vocabulary import BY_NAME, canonical

Settings = dict[str, Setting]
_FIELDS = frozenset(
    f"{section}.{f.name}" for section in model.SECTIONS for f in fields(getattr(model.FsdpSpec(), section))
)


def parse(reading: Reading) -> Reading:
    """The same reading with typed values; what cannot be typed becomes a problem."""
    settings: list[Setting] = []
    problems = list(reading.problems)
    for setting in reading.settings:
        row = BY_NAME.get(setting.name)
        if row is None:
            settings.append(setting)  # AUTO_WRAP has no row: nobody can write it as a key
            continue
        try:
            settings.append(_folded(setting.with_value(typed(row, setting.value))))
        except NotSaid:
            continue
        except ValueProblem as problem:
            name = canonical(row.name)
            message = f"{setting.origin.spelling} is {shown(setting.value)}; expected {problem.expected}."
            problems.append(
                Problem(severity="error", message=message, fix=problem.fix, setting=name, origin=setting.origin)
            )
    if len(problems) > len(reading.problems) and any(_is_refused_axis(setting) for setting in reading.settings):
        # with a tensor axis refused, the data axes no longer add up to anything worth judging
        settings = [setting for setting in settings if not setting.name.startswith("mesh.")]
    return replace(reading, settings=tuple(settings), problems=tuple(problems))


def _is_refused_axis(setting: Setting) -> bool:
    row = BY_NAME.get(setting.name)
    return row is not None and row.kind == "one" and setting.value not in (1, "1")


def _folded(setting: Setting) -> Setting:
    """A spelling with a meaning of its own under the name it means."""
    if setting.name == "sharding.reshard" and isinstance(setting.value, str):
        return replace(setting, name="sharding.strategy")
    return setting


def dialect_of(readings: Iterable[Reading]) -> Dialect | None:
    """That of the strongest source that speaks of FSDP. The readings come strongest first."""
    return next((reading.dialect for reading in readings if reading.dialect is not None), None)


def build(won: Settings, dialect: Dialect | None) -> tuple[model.FsdpSpec, tuple[Problem, ...]]:
    """The spec that these settings make, and what was noticed in folding them."""
    problems: list[Problem] = []
    settings = dict(won)
    _fold_precision(settings)
    _fold_dynamo(settings)
    _fold_extra(settings)
    defaults = _defaults(settings, dialect)
    _fold_checkpointing(settings, problems)
    _fold_wrapping(settings, defaults, problems)
    _fold_strategy(settings, defaults, problems)
    _fold_loading(settings, defaults)
    return _spec(settings, defaults), tuple(problems)


def _defaults(settings: Settings, dialect: Dialect | None) -> dict[str, Any]:
    """What is meant where nothing is said."""
    version = _value(settings, "fsdp.version", 1 if dialect == "accelerate" else 2)
    return {
        "fsdp.version": version,
        "wrap.policy": "transformer" if dialect == "training_arguments" else "none",
        "prefetch.backward": "none" if version == 1 else "pre",
        "params.use_orig": True,
        "loading.sync_module_states": True,
    }


def _fold_precision(settings: Settings) -> None:
    """A dtype said by a stronger source than ``mixed_precision`` takes the launcher's word along."""
    mode, param = settings.get("launch.mixed_precision"), settings.get("precision.param")
    if mode is None or param is None or mode.origin == param.origin or param.implied or param.value == mode.value:
        return
    if is_stronger(param, mode):
        word = param.value if param.value in ("bf16", "fp16") else "no"
        settings["launch.mixed_precision"] = replace(param, name="launch.mixed_precision", value=word)


def _fold_dynamo(settings: Settings) -> None:
    _gather(settings, "launch.dynamo_config", "dynamo_")


def _fold_extra(settings: Settings) -> None:
    _gather(settings, "launch.extra", "")


def _gather(settings: Settings, name: str, prefix: str) -> None:
    """``launch.extra.x``, ``launch.extra.y`` to one mapping under ``launch.extra``."""
    parts = {key: settings.pop(key) for key in list(settings) if key.startswith(f"{name}.")}
    if parts:
        first = next(iter(parts.values()))
        value = {prefix + key.removeprefix(f"{name}."): part.value for key, part in parts.items()}
        settings[name] = replace(first, name=name, value=value)


def _fold_checkpointing(settings: Settings, problems: list[Problem]) -> None:
    trainer = settings.pop("activation.trainer", None)
    if trainer is None or not trainer.value:
        return
    own = settings.get("activation.checkpointing")
    if own is not None and own.value != "none":
        problems.append(
            _error(
                own,
                f"activations would be recomputed twice: {own.said} and {trainer.origin}.",
                f"Drop {trainer.origin.spelling}: FSDP's own checkpointing needs no second all-gather.",
            )
        )
        return
    settings["activation.checkpointing"] = replace(trainer, name="activation.checkpointing", value="full")
    settings["activation.native"] = replace(trainer, name="activation.native", value=True)


def _fold_wrapping(settings: Settings, defaults: dict[str, Any], problems: list[Problem]) -> None:
    word = settings.pop(AUTO_WRAP, None)
    if "wrap.policy" in settings:
        return
    threshold = settings.get("wrap.min_num_params")
    sized = threshold is not None and threshold.value > 0
    if sized and "wrap.classes" in settings:
        assert threshold is not None
        problems.append(
            _error(
                threshold,
                "both a size threshold and layer classes are given, and no policy.",
                "Write fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP, or drop one of the two.",
            )
        )
    elif sized:
        assert threshold is not None
        settings["wrap.policy"] = replace(threshold, name="wrap.policy", value="size")
    elif word is not None:
        settings["wrap.policy"] = replace(word, name="wrap.policy", value="transformer")
    elif "wrap.classes" in settings:
        settings["wrap.policy"] = replace(settings["wrap.classes"], name="wrap.policy", value="transformer")


def _fold_strategy(settings: Settings, defaults: dict[str, Any], problems: list[Problem]) -> None:
    """A strategy and ``reshard_after_forward`` to one strategy; then the hybrid one where the mesh has replicas."""
    reshard = settings.pop("sharding.reshard", None)
    strategy = settings.get("sharding.strategy")
    if reshard is not None and strategy is None:
        settings["sharding.strategy"] = replace(reshard, name="sharding.strategy", value=_with_reshard(reshard).name)
    elif reshard is not None and strategy is not None:
        _reconcile(settings, strategy, reshard, defaults, problems)
    _promote(settings, defaults, problems)


def _reconcile(
    settings: Settings, strategy: Setting, reshard: Setting, defaults: dict[str, Any], problems: list[Problem]
) -> None:
    row, means = STRATEGIES[strategy.value], _with_reshard(reshard)
    other = _with_reshard(reshard, row)
    if not row.is_sharded or row.reshards_after_forward == reshard.value:
        problems.append(_note(reshard, f"{reshard.said} changes nothing beside {strategy.origin}."))
    elif row.hybrid and row.reshards_after_forward:
        settings["sharding.strategy"] = strategy.with_value(other.name)
        problems.append(_note(reshard, f"{reshard.said} makes {strategy.origin} a {other.name}."))
    elif reshard.origin.source == strategy.origin.source == "environment":
        # accelerate launch writes both variables whatever was asked; each version of FSDP reads one of them
        if defaults["fsdp.version"] == 2:
            settings["sharding.strategy"] = replace(reshard, name="sharding.strategy", value=means.name)
        problems.append(
            _note(reshard, f"{strategy.said} and {reshard.said}: the one that this FSDP version reads is taken.")
        )
    elif is_stronger(strategy, reshard):
        problems.append(lost(reshard, strategy))
    elif is_stronger(reshard, strategy):
        settings["sharding.strategy"] = replace(reshard, name="sharding.strategy", value=other.name)
        problems.append(lost(strategy, reshard))
    else:
        problems.append(
            _error(
                strategy,
                f"{strategy.said} contradicts {reshard.origin}, which means {means.name}.",
                f"Drop {reshard.origin.spelling}.",
            )
        )


def _with_reshard(reshard: Setting, row: Strategy = DEFAULT) -> Strategy:
    return strategy_of(sharded=True, hybrid=row.hybrid, reshard=reshard.value)


def _promote(settings: Settings, defaults: dict[str, Any], problems: list[Problem]) -> None:
    replicate, shard = settings.get("mesh.replicate"), settings.get("mesh.shard")
    if replicate is None or replicate.value == "auto" or replicate.value == 1:
        return
    strategy = settings.get("sharding.strategy")
    if shard is not None and shard.value == 1:
        if strategy is None:
            unsharded = strategy_of(sharded=False, hybrid=False, reshard=False)
            settings["sharding.strategy"] = replace(replicate, name="sharding.strategy", value=unsharded.name)
        return
    plain = STRATEGIES[strategy.value] if strategy is not None else DEFAULT
    hybrid = plain.counterpart(hybrid=True)
    if hybrid not in (None, plain):
        settings["sharding.strategy"] = replace(strategy or replicate, name="sharding.strategy", value=hybrid.name)
        problems.append(
            _note(replicate, f"{replicate.said} makes {plain.name} a {hybrid.name}: shards inside, replicas outside.")
        )


def _fold_loading(settings: Settings, defaults: dict[str, Any]) -> None:
    """Rank 0 alone has the weights, so they must be sent: sync_module_states follows unless it was said otherwise."""
    if _value(settings, "loading.ram_efficient", False):
        defaults["loading.sync_module_states"] = True


def _spec(settings: Settings, defaults: Mapping[str, Any]) -> model.FsdpSpec:
    sections: dict[str, dict[str, Any]] = {section: {} for section in model.SECTIONS}
    origins: dict[str, Origin] = {}
    for name in sorted({*settings, *defaults} & _FIELDS):
        section, _, attribute = name.partition(".")
        if name in settings:
            origins[name] = settings[name].origin
        value = settings[name].value if name in settings else defaults[name]
        sections[section][attribute] = MappingProxyType(value) if isinstance(value, dict) else value
    base = model.FsdpSpec()
    built = {section: replace(getattr(base, section), **values) for section, values in sections.items()}
    return replace(base, **built, origins=MappingProxyType(origins))


def _value(settings: Settings, name: str, default: Any) -> Any:
    return settings[name].value if name in settings else default


def _error(setting: Setting, message: str, fix: str) -> Problem:
    return Problem(severity="error", message=message, fix=fix, setting=canonical(setting.name), origin=setting.origin)


def _note(setting: Setting, message: str) -> Problem:
    return Problem(severity="note", message=message, setting=canonical(setting.name), origin=setting.origin)
