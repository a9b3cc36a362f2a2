"""The text of a config for the other FSDP version, and the keys that are changed in it.

A key that only one version uses becomes a comment such as ``# FSDP1 only: fsdp_use_orig_params: false``. The way back
restores it. JSON has no comments: there a key that FSDP2 ignores stays, and sizes of the mesh that FSDP1 makes without
``parallelism_config`` are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.sources.interface import Sources, SourceSettings
from hf_fsdp_plugin.sources.tree import ConfigFile, config_tree, read_text
from hf_fsdp_plugin.spec.fsdp_spec import VERSION_DEFAULTS, FsdpSpec
from hf_fsdp_plugin.spec.load import Assessment, assess
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_value
from hf_fsdp_plugin.tools.config import text as config_text
from hf_fsdp_plugin.tools.config.text import Changes, Key, line_of
from hf_fsdp_plugin.tools.convert.conversion import with_converted_config
from hf_fsdp_plugin.tools.convert.dialects.interface import DialectReading
from hf_fsdp_plugin.vocabulary import FALSE_WORDS, PREFIXES, TRUE_WORDS, find_row

_ONLY_FSDP1: Final = ("params.use_orig", "prefetch.limit_all_gathers")
"""Settings without an effect under FSDP2."""
_STRATEGY, _RESHARD, _VERSION = "sharding.strategy", "sharding.reshard", "fsdp.version"
_DISTRIBUTED: Final = "launch.distributed_type"
_FSDP, _PARALLELISM = "fsdp_config", "parallelism_config"
_PREFIX: Final = PREFIXES["fsdp"]
_BOOLEANS: Final = (TRUE_WORDS | FALSE_WORDS) - {"0", "1"}  # 1 is a strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """A config and its rewritten text.

    Attributes:
        old, new: the two configs.
        before, after: their texts.
        old_spec, new_spec: their settings.
        kept: what becomes of keys that the new version does not use, one sentence each.
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
    text, is_json = config_text.in_yaml(before, is_json=file.path.suffix.lower() == ".json")
    rewriter = _Rewriter(spec=spec, to=to, keeps_comments=not is_json)
    restored = _restored(text, to)
    after = config_text.edited(restored, rewriter.changes)
    after = config_text.as_json(after) if is_json else after
    new = replace(file, data=after.encode())
    migrated = assess(with_converted_config(Sources(config=new, environ={})))
    if wrong := _wrong_settings(spec, migrated, rewriter.changes_mesh or restored != text):
        fix = "Write these settings as plain keys of fsdp_config, one per line. Nothing was written."
        message = f"the file cannot be rewritten for FSDP{to}: {'; '.join(wrong)}."
        problem = Problem(code="FSDP-E792", message=message, fix=fix, origin=Origin(source=file.shown))
        raise SpecError([problem, *(each for each in migrated.problems if each.severity == "error")])
    return Migration(
        old=file, new=new, before=before, after=after, old_spec=spec, new_spec=migrated.spec, kept=tuple(rewriter.kept)
    )


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
    for name in (*(f"mesh.{axis}" for axis in MODEL_AXES), "precision.fp32_modules") if to == 1 else ():
        if spec.get(name) not in (1, ""):
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


def _mark(version: int) -> str:
    return f"# FSDP{version} only: "


def _restored(text: str, version: int) -> str:
    """Return the text in which the keys of a version are no comments."""
    key = r"(?=\s*(?:#|-|[\w\"']+\s*:))"  # not in front of other comments of the user
    return re.sub(rf"^([ \t]*){re.escape(_mark(version))}{key}", r"\1", text, flags=re.MULTILINE)


def machines_mesh(spec: FsdpSpec) -> tuple[int, int] | None:
    """Return the replicas and shards of FSDP1's hybrid strategies without a mesh: the machines, and the ranks of each.

    ``None`` if the number of ranks is unknown, or if there is one machine or one rank per machine.
    """
    world, machines = spec.launch.num_processes, spec.launch.num_machines
    if world == "auto" or machines < 2 or world % machines or world == machines:
        return None
    return machines, world // machines


class _Rewriter:
    """Computes the changes of one file.

    Attributes:
        kept: see :class:`Migration`.
        changes_mesh: whether sizes of the mesh are written or removed, which does not change the mesh of a run.
    """

    def __init__(self, *, spec: FsdpSpec, to: int, keeps_comments: bool) -> None:
        self._spec, self._to, self._keeps_comments = spec, to, keeps_comments
        self.kept: list[str] = []
        self.changes_mesh = False
        self._replaced: dict[Key, list[str]] = {}
        self._added: dict[str, list[str]] = {}

    def changes(self, text: str) -> Changes:
        """Return the changes of a text in which the keys of the new version are no comments."""
        self._lines, self._keys = text.splitlines(), config_text.keys_of(text)
        self._rows = config_text.rows_of(self._keys)
        self._set_version()
        if self._to == 2:
            self._change_to_fsdp2()
        else:
            self._change_to_fsdp1()
        return self._replaced, self._added

    def _keys_of(self, *names: str) -> list[Key]:
        return [key for key, row in self._rows.items() if row.name in names and row.scope != "training"]

    @property
    def _is_whole(self) -> bool:
        """Whether it is a whole file of Accelerate, not only a section or the file of a training script."""
        return self._spec.asked(_DISTRIBUTED) and any(
            row.name == _DISTRIBUTED and not key.section for key, row in self._rows.items()
        )

    def _set_version(self) -> None:
        if found := self._keys_of(_VERSION):
            self._replace(found[0], found[0].name, self._to)
            return
        own = [key for key, row in self._rows.items() if row.scope == "fsdp"]
        has_section = self._is_whole or any(key.name == _FSDP for key in self._keys)
        self._add(_FSDP if has_section else "", "fsdp_version", self._to, like=own)

    def _add(self, section: str, name: str, value: Any, like: Sequence[Key] = ()) -> None:
        name = _spelled(name, like[0].name) if like else name
        self._added.setdefault(section, []).append(line_of(name, value))

    def _replace(self, key: Key, name: str, value: Any) -> None:
        """Write another name and value, and keep the comment behind the value."""
        end = key.value.end_mark
        behind = self._lines[end.line][end.column :] if end.line == key.start else ""
        self._replaced[key] = [f"{key.indent}{line_of(name, value)}{behind}"]

    def _keep(self, key: Key) -> None:
        """Make a comment of a key that the new version does not use. In JSON it stays, or is removed."""
        written = f"{key.name}: {key.value.value}" if isinstance(key.value.value, str) else key.name
        if self._keeps_comments:
            text = f"becomes a comment, which a migration to FSDP{3 - self._to} restores"
            mark, width = _mark(3 - self._to), len(key.indent)
            lines = self._lines[key.start : key.stop]
            self._replaced[key] = [line[:width] + mark + line[width:] if line.strip() else line for line in lines]
        elif self._to == 2:
            text = "stays; FSDP2 ignores it"
        else:
            text = "is removed; FSDP1 makes this mesh itself"
            self._replaced[key] = []
        self.kept.append(f"{written} {text}")

    def _change_to_fsdp2(self) -> None:
        spec, found = self._spec, self._keys_of(_STRATEGY, _RESHARD)
        strategy, sizes = STRATEGIES[spec.sharding.strategy], machines_mesh(spec)
        has_mesh = spec.asked("mesh.shard") or spec.asked("mesh.replicate")
        reshards = strategy.reshards_after_forward
        if found and strategy.is_sharded and not has_mesh and (not strategy.hybrid or (self._is_whole and sizes)):
            self._replace(found[0], _spelled("fsdp_reshard_after_forward", found[0].name), reshards)
            if strategy.hybrid and sizes is not None:
                self._set_mesh(*sizes)
        elif found:
            # The name of the strategy shows the way back that the mesh was written under FSDP1, too.
            if self._rows[found[0]].name == _RESHARD:
                self._name_strategy(found[0])
            if strategy.is_sharded and not reshards:  # stock Accelerate reads no strategy under FSDP2
                self._add(found[0].section, "fsdp_reshard_after_forward", False, like=found)
        elif has_mesh and (self._is_named_by_mesh or not spec.asked(_STRATEGY)):
            self._add_strategy()
        for key in self._keys_of(*_ONLY_FSDP1):
            self._keep(key)

    def _set_mesh(self, replicate: int, shard: int) -> None:
        self.changes_mesh = True
        for axis, size in (("replicate", replicate), ("shard", shard)):
            if restored := self._keys_of(f"mesh.{axis}"):
                self._replace(restored[0], restored[0].name, size)
            else:
                self._add(_PARALLELISM, f"{_PARALLELISM}_dp_{axis}_size", size)

    def _name_strategy(self, key: Key) -> None:
        self._replace(key, _spelled("fsdp_sharding_strategy", key.name), self._spec.sharding.strategy.upper())

    def _add_strategy(self) -> None:
        own = [key for key, row in self._rows.items() if row.scope == "fsdp"]
        section = own[0].section if own else _FSDP
        self._add(section, "fsdp_sharding_strategy", self._spec.sharding.strategy.upper(), like=own)

    @property
    def _is_named_by_mesh(self) -> bool:
        """Whether the strategy follows from the sizes of the mesh."""
        row = find_row(self._spec.origin(_STRATEGY).spelling, ("parallelism",))
        return row is not None and row.name.startswith("mesh.")

    def _change_to_fsdp1(self) -> None:
        named, reshard, by_mesh = self._keys_of(_STRATEGY), self._keys_of(_RESHARD), self._is_named_by_mesh
        if reshard:
            self._name_strategy((named or reshard)[0])
            self._replaced |= {key: [] for key in reshard if named}
        elif by_mesh and not named:
            self._add_strategy()
        section_keys = [key for key in self._keys if not key.section and key.name == _PARALLELISM]
        if (
            section_keys
            and (reshard or by_mesh or not self._spec.asked(_STRATEGY))
            and not named
            and self._is_own_mesh()
        ):
            self.changes_mesh = True
            self._keep(section_keys[0])
            members = [key for key in self._keys if key.section == _PARALLELISM]
            self._replaced = {key: lines for key, lines in self._replaced.items() if key not in members}

    def _is_own_mesh(self) -> bool:
        """Whether FSDP1 makes the mesh without ``parallelism_config``, which stock Accelerate refuses under FSDP1."""
        spec, mesh = self._spec, self._spec.mesh
        strategy = STRATEGIES[spec.sharding.strategy]
        if mesh.context_exchange != FsdpSpec().mesh.context_exchange:
            return False
        if strategy.hybrid:
            return machines_mesh(spec) == (mesh.replicate, mesh.shard)
        shards = ("auto", spec.launch.num_processes) if strategy.is_sharded else ("auto",)
        return mesh.replicate in ("auto", 1) and mesh.shard in shards


def _spelled(key: str, like: str) -> str:
    """Return a key with its prefix, or without it if another key has none."""
    return key if like.lower().startswith(_PREFIX) else key.removeprefix(_PREFIX)
