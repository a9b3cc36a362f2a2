"""Read all sources and return one checked spec: ``load_spec`` and ``assess``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hf_fsdp_plugin.problems import DEFAULT_ORIGIN, Origin, Problem, SpecError, has_errors
from hf_fsdp_plugin.sources import accelerate_file, command_line, environment_variables
from hf_fsdp_plugin.sources.accelerate_file import FsdpConfig
from hf_fsdp_plugin.sources.config_location import locate_config
from hf_fsdp_plugin.sources.config_tree import ConfigFile
from hf_fsdp_plugin.sources.interface import Setting, Sources, SourceSettings, config_of
from hf_fsdp_plugin.sources.script_objects import ARGUMENTS, FsdpOptions
from hf_fsdp_plugin.spec.derived_settings import derive_spec
from hf_fsdp_plugin.spec.fsdp_spec import FAMILY_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.precedence import LEVELS, PRECEDENCE, active_settings, merge_levels
from hf_fsdp_plugin.spec.rules import check_rules
from hf_fsdp_plugin.spec.value_parsers import parse_settings
from hf_fsdp_plugin.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """A spec and all problems. If there are errors, the spec is incomplete."""

    spec: FsdpSpec
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not has_errors(self.problems)

    def checked_spec(self) -> FsdpSpec:
        """Return the spec. Raises ``SpecError`` with all problems if one of them is an error."""
        if not self.ok:
            raise SpecError(self.problems)
        return self.spec


def load_spec(
    config: str | Path | ConfigFile | Mapping[str, Any] | None = None,
    *,
    fsdp: FsdpOptions = None,
    fsdp_config: FsdpConfig = None,
    training_arguments: Mapping[str, Any] | None = None,
    command_line: Sequence[str] = (),
    overrides: Mapping[str, Any] | Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    plugin_object: Mapping[str, Any] | None = None,
    distributed_config: Any = None,
    parallelism_config: Any = None,
    default_file: bool = False,
    as_launched: bool = False,
) -> FsdpSpec:
    """Return the checked spec of a config and all other sources of FSDP settings.

    Args:
        config: path of Accelerate's YAML or JSON, or of only its ``fsdp_config`` section; or a dict of these forms. A
            config of DeepSpeed or another program is an error; ``hf-fsdp convert`` converts it.
        fsdp: ``fsdp`` of ``TrainingArguments``: a bool, or options as text or list.
        fsdp_config: ``fsdp_config`` of ``TrainingArguments``: a dict, the path of a JSON or YAML file, or JSON text.
        training_arguments: other keyword arguments of ``TrainingArguments``.
        command_line: flags of the script and of ``accelerate launch``; unknown flags are ignored.
        overrides: ``NAME=VALUE`` of every ``--set``, as strings or as a mapping.
        environ: environment variables; by default those of this process. Lowest precedence.
        plugin_object: constructor arguments of Accelerate's ``FullyShardedDataParallelPlugin``.
        distributed_config: Transformers' ``DistributedConfig``, a dict with its fields, or the path of a JSON file with
            them. The model is sharded with it when it is loaded, so it has the highest precedence.
        parallelism_config: Accelerate's ``ParallelismConfig``, or a dict with its fields.
        default_file: if there is no config, read Accelerate's default file.
        as_launched: if there is no config, read the file of the ``accelerate launch`` that started this process.

    Raises:
        SpecError: at least one problem is an error; the exception contains all problems.
    """
    given = {"fsdp": fsdp, "fsdp_config": fsdp_config}
    arguments = {**(training_arguments or {}), **{key: value for key, value in given.items() if value is not None}}
    sources = Sources(
        config=config_of(config),
        training_arguments=arguments,
        plugin_object=plugin_object,
        distributed_config=config_of(distributed_config),
        parallelism_config=parallelism_config,
        command_line=command_line,
        overrides=overrides,
        environ=environ,
        default_file=default_file,
        as_launched=as_launched,
    )
    return assess(sources).checked_spec()


def assess(sources: Sources) -> Assessment:
    """Read every source, apply the precedence, and check the result."""
    try:
        return combine(read_settings(sources))
    except SpecError as wrong:
        return Assessment(spec=FsdpSpec(), problems=wrong.problems)


def read_settings(sources: Sources) -> list[SourceSettings]:
    """Read every source that is given, with typed values, highest precedence first.

    Raises:
        SpecError: a value of a source contains itself.
    """
    sources, problems = locate_config(sources)
    located = [SourceSettings(problems=problems)] if problems else []
    read = ((level, reader(sources)) for level, reader in PRECEDENCE)
    return located + [parse_settings(replace(found, level=level)) for level, found in read if found is not None]


def add_settings(given: Sequence[SourceSettings], **sources: Any) -> list[SourceSettings]:
    """Return ``given`` with the settings of other sources, at their places in the order of precedence.

    A config replaces the config of ``given``. Flags of the command line and ``--set`` are added to those of ``given``.

    Args:
        given: the settings that :func:`read_settings` has returned.
        sources: fields of :class:`Sources`.

    Raises:
        SpecError: a value of a source contains itself.
    """
    result = list(given)
    for new in read_settings(Sources(environ={}, **sources)):
        before = next((source for source in given if source.level == new.level), None)
        if before is not None and new.level in (accelerate_file.SOURCE, *_WORDS):
            result.remove(before)
            new = before.joined(new) if new.level in _WORDS else new
        if new.level != environment_variables.SOURCE:
            result.append(new)
    # Settings without a level are problems only.
    return sorted(result, key=lambda source: LEVELS.index(source.level) if source.level else -1)


def combine(given: Sequence[SourceSettings]) -> Assessment:
    """Apply the precedence to the settings of all sources, and check the result."""
    levels = active_settings(given)
    effective, overridden = merge_levels(levels)
    family = next((level.family for level in levels if level.family is not None), None)
    spec, derived = derive_spec(effective, FAMILY_DEFAULTS[family])
    read = [problem for level in levels for problem in level.problems]
    return _check(spec, read, [*overridden, *_ambiguous_version(levels, spec), *derived])


_WORDS: Final = (command_line.OVERRIDES, command_line.SOURCE)
"""Sources that are lists of words, to which :func:`add_settings` adds words."""
MADE_FROM_SPEC: Final = "_hf_fsdp_made_from_spec"
"""Attribute of a ``DistributedConfig`` whose sizes are those of a spec."""


def with_script_settings(
    spec: FsdpSpec, *, values: Mapping[str, Any] = MappingProxyType({}), origin: Origin = DEFAULT_ORIGIN, **sources: Any
) -> FsdpSpec:
    """Return a checked spec with settings that a script makes after the spec: they override it, and are reported.

    Args:
        values: canonical name -> value, as arguments of an ``Accelerator`` set them.
        origin: the origin of `values`.
        sources: fields of :class:`Sources`: a ``distributed_config`` (a second call with the same one changes nothing),
            a ``parallelism_config``, or the fields of Accelerate's plugin that the script has assigned, as
            ``plugin_object``.

    Raises:
        SpecError: a value is invalid or not supported, or conflicts with other settings. The exception contains all
            problems.
    """
    if getattr(sources.get("distributed_config"), MADE_FROM_SPEC, False):
        del sources["distributed_config"]
    read = read_settings(Sources(environ={}, **sources))
    settings = [Setting(name=name, value=value, origin=origin, level=ARGUMENTS) for name, value in values.items()]
    now = {name: (value, origin) for name, value, origin in spec.settings()}
    for setting in (setting for source in read for setting in source.settings):
        if setting.name == "sharding.reshard":
            row = STRATEGIES[spec.sharding.strategy].counterpart(reshard=setting.value)
            setting = replace(setting, name="sharding.strategy", value=row.name)
        # The sizes of other axes are checked, but are not in the spec. A plugin enables FSDP, as the spec does.
        is_known = now.get(setting.name) in (None, (setting.value, setting.origin))
        if not is_known and not (setting.name == "launch.distributed_type" and "plugin_object" in sources):
            settings.append(setting)
    problems = [problem for source in read for problem in source.problems]
    if not settings and not problems:
        return spec
    level = accelerate_file.SOURCE
    asked = [Setting(name=name, value=now[name][0], origin=each, level=level) for name, each in spec.origins.items()]
    effective, overridden = merge_levels([SourceSettings(settings=settings), SourceSettings(settings=asked)])
    changed, derived = derive_spec(effective, {name: value for name, (value, _) in now.items()})
    return _check(changed, [*spec.problems, *problems, *overridden, *derived]).checked_spec()


def _ambiguous_version(levels: Sequence[SourceSettings], spec: FsdpSpec) -> Iterator[Problem]:
    """Report that no source sets the FSDP version, and that the families of the sources have different defaults."""
    if spec.asked("fsdp.version") or not spec.enabled:
        return
    written = (level for level in levels if level.level != environment_variables.SOURCE)
    families = {level.family for level in written if level.family is not None}
    if len(families) > 1:
        message = "no source sets the FSDP version, and the defaults differ: 1 for Accelerate's file, 2 for "
        message += f"TrainingArguments. The default of the source with higher precedence is used: {spec.fsdp.version}."
        yield Problem(code="FSDP-W106", setting="fsdp.version", message=message, fix="Set fsdp_version in one of them.")


CHECKED_WITH: Mapping[str | None, str] = {
    "wrap.policy": "wrap.min_num_params",
    "launch.distributed_type": "launch.distributed_type",
    "activation.offload": "activation.checkpointing",
    "loading.sync_module_states": "loading.ram_efficient",
}
"""Setting of a problem -> the setting whose value the rule compares it with."""


def _check(spec: FsdpSpec, read: Sequence[Problem], others: Sequence[Problem] = ()) -> Assessment:
    """Return the spec with all problems: `read`, `others`, and violations of rules by values that could be read."""
    unread = {problem.setting for problem in read if problem.severity == "error"}
    found = [problem for problem in check_rules(spec) if CHECKED_WITH.get(problem.setting, "") not in unread]
    if has_errors(read):
        found = [problem for problem in found if problem.severity != "note"]
    problems = tuple(dict.fromkeys([*read, *others, *found]))
    spec = replace(spec, problems=tuple(problem for problem in problems if problem.severity != "error"))
    return Assessment(spec=spec, problems=problems)
