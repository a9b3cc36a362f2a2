"""The text of a config for the other FSDP version, and what changes in a run (``behavior_changes.yaml``).

Keys that the new version does not use are removed: those that FSDP2 ignores, and sizes of the mesh that FSDP1 makes
without ``parallelism_config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.config_tree import ConfigFile, config_tree, read_text
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.spec.fsdp_spec import VERSION_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_value
from hf_fsdp_plugin.tools.config import text as config_text
from hf_fsdp_plugin.tools.config.text import SettingLine
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading
from hf_fsdp_plugin.vocabulary import BY_NAME, FALSE_WORDS, PREFIXES, TRUE_WORDS, find_row

_ONLY_FSDP1: Final = ("params.use_orig", "prefetch.limit_all_gathers")
"""Settings without an effect under FSDP2."""
_STRATEGY, _RESHARD, _VERSION = "sharding.strategy", "sharding.reshard", "fsdp.version"
_DISTRIBUTED: Final = "launch.distributed_type"
_MESH: Final = ("mesh.replicate", "mesh.shard")
_ALL_OF_MESH: Final = (*_MESH, *(f"mesh.{axis}" for axis in MODEL_AXES), "mesh.context_exchange")
_FSDP: Final = "fsdp_config"
_PREFIX: Final = PREFIXES["fsdp"]
_BOOLEANS: Final = (TRUE_WORDS | FALSE_WORDS) - {"0", "1"}  # 1 is a strategy
_IN_TABLE: Final = ("fsdp.version", "params.use_orig", "prefetch.limit_all_gathers")
"""Settings whose effects the table describes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """A config and its rewritten text.

    Attributes:
        old, new: the two configs.
        before, after: their texts.
        old_spec, new_spec: their settings.
        kept: the keys that are removed because the new version does not use them, one sentence each.
    """

    old: ConfigFile
    new: ConfigFile
    before: str
    after: str
    old_spec: FsdpSpec
    new_spec: FsdpSpec
    kept: tuple[str, ...]


def migrate(file: ConfigFile, to: int | None = None) -> Migration:
    """Return the config for another FSDP version.

    Args:
        to: the version; by default the one that the config does not have.

    Raises:
        SpecError: the config has errors, is not for FSDP, has the version already, mixes keys of both versions, or has
            settings that the other version cannot have.
    """
    sources = with_converted_config(Sources(config=file, environ={}))
    spec = assess(sources).checked_spec()
    _check_dialect(file, sources.converted)
    to = to or 3 - spec.fsdp.version
    if problems := list(_check(file, spec, to)):
        raise SpecError(problems)
    before = read_text(file)
    target, is_json = _target(spec, to), file.path.suffix.lower() == ".json"
    lines = _lines(target.settings, config_text.in_yaml(before, is_json=is_json)[0])
    after = config_text.changed_text(before, lines, target.unused, is_json=is_json)
    kept = tuple(f"{spec.origin(name).written} is removed" for name in target.unused if spec.asked(name))
    new = replace(file, data=after.encode())
    migrated = assess(with_converted_config(Sources(config=new, environ={})))
    if wrong := _wrong_settings(spec, migrated, target.changes_mesh):
        fix = "Write these settings as plain keys of fsdp_config, one per line. Nothing was written."
        message = f"the file cannot be rewritten for FSDP{to}: {'; '.join(wrong)}."
        problem = Problem(code="FSDP-E792", message=message, fix=fix, origin=Origin(source=file.shown))
        raise SpecError([problem, *(each for each in migrated.problems if each.severity == "error")])
    return Migration(old=file, new=new, before=before, after=after, old_spec=spec, new_spec=migrated.spec, kept=kept)


def _check_dialect(file: ConfigFile, reading: SourceSettings | None) -> None:
    """Raise ``SpecError`` if a file has no keys of FSDP. Of other programs, only the YAML of training scripts has."""
    if isinstance(reading, DialectReading) and not reading.dialect_of.own_script:
        message = f"this is a config of {reading.dialect_of.title}, without the keys of FSDP."
        fix = "Convert it first: hf-fsdp convert prints a config for FSDP2, or with --fsdp_version 1 one for FSDP1."
        raise SpecError([Problem(code="FSDP-E788", message=message, fix=fix, origin=Origin(source=file.shown))])


def _check(file: ConfigFile, spec: FsdpSpec, to: int) -> Iterator[Problem]:
    """Yield why a config without errors cannot be migrated."""
    place, version = Origin(source=file.shown), spec.fsdp.version
    if not spec.enabled:
        message = f"this is not a config for PyTorch's FSDP: distributed_type is {spec.launch.distributed_type}."
        fix = "Give a file with distributed_type: FSDP and an fsdp_config; hf-fsdp convert makes one."
        yield Problem(code="FSDP-E788", message=message, fix=fix, origin=spec.origins.get(_DISTRIBUTED, place))
        return
    if mixed := _key_of_fsdp2(file, spec):
        fix = "Set fsdp_version: 2 if it is a config for FSDP2; otherwise replace the key by fsdp_sharding_strategy."
        source = f"{spec.origin(_VERSION)}" if spec.asked(_VERSION) else "no fsdp_version"
        message = f"{mixed.written} is a key of FSDP2, and the version is 1 ({source})."
        yield Problem(code="FSDP-E795", message=message, fix=fix, origin=mixed, setting=_STRATEGY)
    elif to == version:
        message = f"the config is for FSDP{version} already ({spec.origin(_VERSION)})."
        fix = f"Pass --to {3 - version} for the other version."
        yield Problem(code="FSDP-E789", message=message, fix=fix, origin=spec.origins.get(_VERSION, place))
    only_fsdp2 = ("precision.fp32_modules", "sharding.reduce_replicas_at_last_micro_batch")
    for name in (*(f"mesh.{axis}" for axis in MODEL_AXES), *only_fsdp2) if to == 1 else ():
        if spec.get(name) != FsdpSpec().get(name):
            message = f"{spec.origin(name).written} has no counterpart in FSDP1."
            yield spec.problem("FSDP-E796", name, message, "Remove the key, or stay with FSDP2.")


def _key_of_fsdp2(file: ConfigFile, spec: FsdpSpec) -> Origin | None:
    """Return where a config of FSDP1 has ``fsdp_reshard_after_forward`` with a bool, which FSDP2 only has."""
    root = config_tree(file)
    sections = [root, *(entry.value for entry in root.value if entry.value.is_mapping)]
    for entry in (entry for section in sections for entry in section.value):
        text, row = entry.value.text, find_row(entry.key, ("fsdp",))
        if spec.fsdp.version == 1 and row is not None and row.name == _RESHARD and text.strip().lower() in _BOOLEANS:
            return Origin(source=file.shown, line=entry.line, spelling=entry.key, text=text)
    return None


def _wrong_settings(old: FsdpSpec, migrated: Assessment, changes_mesh: bool) -> list[str]:
    """Return the settings of a rewritten config that differ from the old ones and should not."""
    new = migrated.spec
    free = {_VERSION, *_ONLY_FSDP1, *(name for name in VERSION_DEFAULTS[1] if not old.asked(name))}
    wrong = [
        f"{name} would be {format_value(new.get(name))} instead of {format_value(value)}"
        for name, value, _ in old.settings()
        if name not in free and not (changes_mesh and name.startswith("mesh.")) and new.get(name) != value
    ]
    return wrong or ([] if migrated.ok else ["it would have errors"])


def machines_mesh(spec: FsdpSpec) -> tuple[int, int] | None:
    """Return the replicas and shards of FSDP1's hybrid strategies without a mesh: the machines, and the ranks of each.

    ``None`` if the number of ranks is unknown, or if there is one machine or one rank per machine.
    """
    world, machines = spec.launch.num_processes, spec.launch.num_machines
    if world == "auto" or machines < 2 or world % machines or world == machines:
        return None
    return machines, world // machines


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """What a config for the other version has.

    Attributes:
        settings: canonical name -> value of the settings that are written.
        unused: the settings whose keys are removed.
        changes_mesh: whether sizes of the mesh are written or removed, which does not change the mesh of a run.
    """

    settings: dict[str, Any]
    unused: tuple[str, ...] = ()
    changes_mesh: bool = False


def _target(spec: FsdpSpec, to: int) -> _Target:
    strategy, has_mesh = STRATEGIES[spec.sharding.strategy], any(spec.asked(size) for size in _MESH)
    settings: dict[str, Any] = {_VERSION: to}
    if has_mesh or spec.asked(_STRATEGY):
        settings[_STRATEGY] = spec.sharding.strategy
    if to == 1:
        is_own = _is_own_mesh(spec)
        return _Target(settings=settings, unused=_ALL_OF_MESH if is_own else (), changes_mesh=is_own)
    made = machines_mesh(spec) if strategy.hybrid and not has_mesh and spec.asked(_DISTRIBUTED) else None
    if made is not None or (strategy.hybrid and spec.mesh.replicate not in ("auto", 1)):
        # Stock Accelerate reads a bool, and the mesh makes the strategy hybrid.
        settings[_STRATEGY] = "full_shard" if strategy.reshards_after_forward else "shard_grad_op"
        settings |= dict(zip(_MESH, made or (), strict=False))
    elif strategy.hybrid and not strategy.reshards_after_forward:
        settings.pop(_STRATEGY, None)  # a bool does not tell it, so the key stays as it is
    return _Target(settings=settings, unused=_ONLY_FSDP1, changes_mesh=made is not None)


def _is_own_mesh(spec: FsdpSpec) -> bool:
    """Whether FSDP1 makes the mesh without ``parallelism_config``, which stock Accelerate refuses under FSDP1."""
    mesh, strategy = spec.mesh, STRATEGIES[spec.sharding.strategy]
    if mesh.context_exchange != FsdpSpec().mesh.context_exchange:
        return False
    if strategy.hybrid:
        return machines_mesh(spec) == (mesh.replicate, mesh.shard)
    shards = ("auto", spec.launch.num_processes) if strategy.is_sharded else ("auto",)
    return mesh.replicate in ("auto", 1) and mesh.shard in shards


def _lines(settings: Mapping[str, Any], text: str) -> list[SettingLine]:
    """Return the lines of the settings, in the sections and with the prefix that the file has."""
    lines = config_text.setting_lines(settings, settings[_VERSION], {})
    keys = config_text.keys_of(text)
    names = {key.name for key in keys}
    own = [key.name for key, row in config_text.rows_of(keys).items() if row.scope == "fsdp"]
    prefix = _PREFIX if not own or own[0].lower().startswith(_PREFIX) else ""
    section = _FSDP if names & {_FSDP, "distributed_type"} else ""
    return [
        replace(line, section=section, key=prefix + line.key.removeprefix(_PREFIX)) if line.section == _FSDP else line
        for line in lines
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorChange:
    """One difference between two configs.

    Attributes:
        setting: canonical name of the setting that it depends on.
        what: what changes.
        was, becomes: the behavior with the old and with the new config.
        verify: the command that shows it. NEW is the migrated config, OLD the other one.
        stock: whether only stock ``accelerate launch`` has the difference.
    """

    setting: str
    what: str
    was: str
    becomes: str
    verify: str
    stock: bool = False


def behavior_changes(old: FsdpSpec, new: FsdpSpec) -> list[BehaviorChange]:
    """Return the differences in behavior: of settings with other values, then of the versions with these settings."""
    table = yaml.safe_load(Path(__file__).with_name("behavior_changes.yaml").read_text(encoding="utf-8"))
    of_fsdp1 = old if old.fsdp.version == 1 else new
    conditions, words = _conditions(of_fsdp1), _words(of_fsdp1)
    found = list(_other_values(old, new))
    for row in (row for row in table if conditions[row.pop("when", "always")]):
        texts = {1: row.pop("fsdp1").format_map(words), 2: row.pop("fsdp2").format_map(words)}
        found.append(BehaviorChange(**row, was=texts[old.fsdp.version], becomes=texts[new.fsdp.version]))
    return found


def _other_values(old: FsdpSpec, new: FsdpSpec) -> Iterator[BehaviorChange]:
    """Yield settings with another value, such as a default that depends on the version."""
    for name, value, _ in old.settings():
        is_unused = name in _IN_TABLE or name.startswith("mesh.") or (name == "fp8.all_gather" and not old.uses_fp8)
        if not is_unused and new.get(name) != value:
            key = BY_NAME[name].key
            was, becomes = (
                format_value(spec.get(name)) + ("" if spec.asked(name) else f" (default of FSDP{spec.fsdp.version})")
                for spec in (old, new)
            )
            verify = f"hf-fsdp check NEW; {key} in the config sets it"
            yield BehaviorChange(setting=name, what=key, was=was, becomes=becomes, verify=verify)


def _conditions(spec: FsdpSpec) -> Mapping[str, bool]:
    """Return the conditions of the rows, from the settings under FSDP1."""
    strategy, precision = STRATEGIES[spec.sharding.strategy], spec.precision
    is_wrapped, is_mixed = spec.wrap.policy != "none", precision.param in ("bf16", "fp16")
    return {
        "always": True,
        "flat": not spec.params.use_orig,
        "unlimited": not spec.prefetch.limit_all_gathers,
        "wrapped": is_wrapped,
        "wrapped_and_resharded": is_wrapped and strategy.reshards_after_forward,
        "by_size": spec.wrap.policy == "size",
        "sharded": strategy.is_sharded,
        "unsharded": not strategy.is_sharded,
        "mixed": is_mixed,
        "reduced_in_another_dtype": is_mixed and precision.reduce not in (precision.param, "auto"),
        "default_state_dict": not spec.asked("checkpoint.state_dict"),
        "offloaded": spec.offload.params,
        "offloaded_activations": spec.activation.offload,
    }


def _words(spec: FsdpSpec) -> Mapping[str, str]:
    """Return the words that the texts contain."""
    by_size = f"modules of at least {spec.wrap.min_num_params:,} parameters"
    return {
        "layers": by_size if spec.wrap.policy == "size" else "each layer",
        "param": spec.precision.param,
        "reduce": spec.precision.reduce,
        "pinned": "pinned" if spec.offload.pin_memory else "not pinned",
    }
