"""Precedence: the order of the sources, the effective settings, and the problems of overridden settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources import (
    accelerate_file,
    command_line,
    distributed_config,
    environment,
    overrides,
    parallelism_config,
    plugin_object,
    training_arguments,
)
from hf_fsdp_plugin.sources.model import Sources
from hf_fsdp_plugin.sources.settings import Setting, SourceSettings
from hf_fsdp_plugin.vocabulary import canonical

Reader = Callable[[Sources], SourceSettings | None]

PRECEDENCE: Final[tuple[tuple[str, Reader], ...]] = (
    (distributed_config.SOURCE, distributed_config.read),
    (overrides.SOURCE, overrides.read),
    (command_line.SOURCE, command_line.read),
    (training_arguments.SOURCE, training_arguments.read),
    (training_arguments.SOURCE, plugin_object.read),
    (training_arguments.SOURCE, parallelism_config.read),
    (environment.TORCHRUN, environment.read_torchrun),
    (accelerate_file.SOURCE, accelerate_file.read),
    (environment.SOURCE, environment.read),
)
"""The level and the reader of every source, highest precedence first. The defaults have the lowest precedence.

``DistributedConfig`` has the highest precedence, because the model is already sharded with it.

``TrainingArguments``, ``FullyShardedDataParallelPlugin`` and ``ParallelismConfig`` are one level, because all are part
of the script. If they set a setting to different values, the first of them overrides the others. If one sets the
strategy and the other a different ``reshard_after_forward``, neither has precedence, which is the error FSDP-E107.

A cluster sets the variables of torchrun for each job, so they override a file, which has a number of machines too.
"""

_LEVELS: Final = tuple(dict.fromkeys(level for level, _ in PRECEDENCE))
FLAGS: Final = frozenset({overrides.SOURCE, command_line.SOURCE, environment.TORCHRUN})
FILES: Final = frozenset({accelerate_file.SOURCE, environment.SOURCE, environment.TORCHRUN})
"""Flags are given for one run, and usually override the file and the environment of many runs on purpose."""

OTHER_ENGINES: Final = MappingProxyType({"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"})
"""Value of ``distributed_type`` -> name of an engine other than FSDP."""
COMPLEMENTARY = frozenset({"launch.distributed_type"})
"""Settings that several sources may set differently: ``fsdp=`` in a script turns FSDP on under any launcher."""


def read_all(sources: Sources) -> tuple[SourceSettings, ...]:
    """Read all sources that are given, highest precedence first."""
    return tuple(
        replace(read, level=level, settings=tuple(replace(setting, level=level) for setting in read.settings))
        for level, reader in PRECEDENCE
        if (read := reader(sources)) is not None
    )


def merge(levels: Iterable[SourceSettings]) -> tuple[dict[str, Setting], tuple[Problem, ...]]:
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
            problems.append(overridden(setting, effective[name]))
    return effective, tuple(problems)


def _merge_level(level: SourceSettings) -> tuple[dict[str, Setting], list[Problem]]:
    """Return one setting per name of one source. An explicit value overrides an implied one; a conflict is an error."""
    settings: dict[str, Setting] = {}
    problems: list[Problem] = []
    for setting in sorted(level.settings, key=lambda setting: setting.implied):
        first = settings.setdefault(setting.name, setting)
        if first is setting or setting.implied or first.origin == setting.origin:
            continue
        if first.value == setting.value:
            problems.append(_repeated(setting, first))
        else:
            problems.append(conflict(setting, first))
    return settings, problems


def has_precedence(one: Setting, other: Setting) -> bool:
    """Whether `one` is from a level of higher precedence than `other`."""
    return _LEVELS.index(one.level) < _LEVELS.index(other.level)


def _script_enables_fsdp(setting: Setting, effective: Setting) -> bool:
    """Whether a script enables FSDP under a launcher that was started with ``--multi_gpu``, as Transformers does."""
    is_fsdp = setting.name in COMPLEMENTARY and setting.value == "FSDP" and setting.level == training_arguments.SOURCE
    return is_fsdp and effective.level == command_line.SOURCE and effective.value not in OTHER_ENGINES


def overridden(setting: Setting, effective: Setting) -> Problem:
    """Return the note or warning that `effective` overrides `setting`."""
    if setting.value == effective.value:
        return _repeated(setting, effective)
    by_flag = setting.level in FILES and effective.level in FLAGS
    if setting.name in COMPLEMENTARY and (setting.value in OTHER_ENGINES or not by_flag):
        return _other_engine(setting, effective)
    message = f"{setting.written} is overridden by {effective.origin}."
    if by_flag or (setting.implied and effective.implied):
        return about(setting, "FSDP-N105", message)
    return about(setting, "FSDP-W103", message, "Set it in one place.")


def _other_engine(setting: Setting, effective: Setting) -> Problem:
    """Return the problem that two sources select different kinds of parallelism."""
    if setting.value in OTHER_ENGINES:
        message = f"{setting.written} selects {OTHER_ENGINES[setting.value]}, and {effective.origin} enables FSDP."
        return about(setting, "FSDP-E120", message, "Keep one of them.")
    message = f"{setting.written} is overridden by {effective.origin}, which selects {effective.value}."
    return about(setting, "FSDP-W160", message, f"Set distributed_type: {effective.value} in the config.")


def conflict(setting: Setting, first: Setting) -> Problem:
    """Return the error that one source sets a setting to two values."""
    return about(setting, "FSDP-E102", f"{setting.written} conflicts with {first.origin}.", "Keep one of them.")


def about(setting: Setting, code: str, message: str, fix: str = "") -> Problem:
    """Return a problem of one setting, with its origin."""
    return Problem(code=code, message=message, fix=fix, setting=canonical(setting.name), origin=setting.origin)


def _repeated(setting: Setting, first: Setting) -> Problem:
    return about(setting, "FSDP-N104", f"{setting.written} repeats {first.origin}.")
