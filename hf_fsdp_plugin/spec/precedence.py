"""Selects the effective settings of all sources: precedence, overridden settings, conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources import accelerate_file, command_line, environment_variables, script_objects
from hf_fsdp_plugin.sources.interface import Reader, Setting, SourceSettings
from hf_fsdp_plugin.sources.script_objects import PARALLELISM, read_parallelism_config, read_plugin

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
