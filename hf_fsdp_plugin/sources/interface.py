"""What every reader of settings takes and returns: ``Sources`` and ``SourceSettings``.

A reader fills a ``Collector``, which finds the setting of each key in the vocabulary.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, Entries, ObjectText, from_python, one_line
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import BLANKS, BY_NAME, FALSE_WORDS, TRUE_WORDS, Scope, SettingRow, find_row, plain_key

SourceFamily = Literal["accelerate", "training_arguments"]
"""Selects the defaults: FSDP1 without wrapping (Accelerate), or FSDP2 with the model's layers (TrainingArguments)."""
ENVIRONMENT: Final = "environment"
"""Name of the source of environment variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The sources of settings. Attributes that are also arguments of ``load_spec`` are documented there.

    Attributes:
        training_arguments: keyword arguments of ``TrainingArguments``, including ``fsdp`` and ``fsdp_config``.
        distributed_config: a ``DistributedConfig``, a dict with its fields, or a ``ConfigFile`` with them.
        world_size: the value of ``check --world-size``, a number of ranks with the precedence of ``--set``.
        converted: the settings of `config`, if it is a config of another program that a command has converted. Without
            them, such a config is an error.
        allows_deepspeed: whether `config` may be a file of Accelerate for DeepSpeed, such as that of the ``accelerate
            launch`` that has started this process with DeepSpeed.
    """

    config: ConfigFile | Mapping[str, Any] | None = None
    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin_object: Mapping[str, Any] | None = None
    distributed_config: Any = None
    parallelism_config: Any = None
    command_line: Sequence[str] = ()
    overrides: Mapping[str, Any] | Sequence[str] = ()
    world_size: int | None = None
    environ: Mapping[str, str] | None = None
    default_file: bool = False
    as_launched: bool = False
    converted: SourceSettings | None = None
    allows_deepspeed: bool = False


def config_of(config: str | Path | ConfigFile | Mapping[str, Any] | None) -> ConfigFile | Mapping[str, Any] | None:
    """Convert a config that a user passed to the value of ``Sources.config``."""
    return ConfigFile.at(config) if isinstance(config, (str, os.PathLike)) else config


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of one source.

    Attributes:
        name: canonical name.
        value: the value as written; after ``spec.value_parsers.parse_settings``, the typed value.
        implied: whether another setting implies this one (``mixed_precision`` implies ``precision.param``). An explicit
            value of the same source overrides an implied value.
        inactive: whether the setting applies only if another source enables FSDP, such as an ``fsdp_config`` without
            ``fsdp``, which Transformers ignores.
        level: level of precedence; set by ``spec.value_parsers.parse_settings``.
    """

    name: str
    value: Any
    origin: Origin
    implied: bool = False
    inactive: bool = False
    level: str = ""

    @property
    def written(self) -> str:
        """Key and value as written: ``fsdp_sharding_strategy=1``."""
        return self.origin.written

    @property
    def enables_fsdp(self) -> bool:
        return not self.inactive and enables_fsdp(self.name, self.value, self.origin)

    def problem(self, code: str, message: str, fix: str = "") -> Problem:
        """Return a problem of this setting, with its origin."""
        setting = vocabulary.canonical_setting(self.name)
        return Problem(code=code, message=message, fix=fix, setting=setting, origin=self.origin)


@dataclass(kw_only=True, slots=True)
class SourceSettings:
    """All settings and problems of one source.

    Attributes:
        source: name for messages; the path of a file as the user wrote it.
        family: selects the defaults; ``None`` if the source does not mention FSDP.
        level: level of precedence; set by ``spec.load.read_settings``.
        inactive_problems: the problems of inactive settings.
        enables_fsdp: whether a setting enables FSDP, also one with an invalid value.
    """

    source: str = ""
    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    family: SourceFamily | None = None
    level: str = ""
    inactive_problems: list[Problem] = field(default_factory=list)
    enables_fsdp: bool = False

    def joined(self, other: SourceSettings) -> SourceSettings:
        """Return the settings and problems of both, as those of one source."""
        lists: Any = {name: [*getattr(self, name), *getattr(other, name)] for name in ("settings", *_PROBLEMS)}
        enables_fsdp = self.enables_fsdp or other.enables_fsdp
        return replace(self, family=self.family or other.family, enables_fsdp=enables_fsdp, **lists)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SourceSettings:
        """Return the settings, whose values are typed, and problems of which ``asdict`` was written as JSON."""
        fields = {**content, "settings": [_setting_from_json(each) for each in content["settings"]]}
        for name in _PROBLEMS:
            problems = ({**each, "origin": each["origin"] and Origin(**each["origin"])} for each in content[name])
            fields[name] = [Problem(**each) for each in problems]
        return cls(**fields)


_PROBLEMS: Final = ("problems", "inactive_problems")


def _setting_from_json(fields: Mapping[str, Any]) -> Setting:
    row, value = BY_NAME.get(fields["name"]), fields["value"]
    if row is not None and row.kind == "names" and value is not None:
        value = tuple(value)
    return Setting(**{**fields, "value": value, "origin": Origin(**fields["origin"])})


Reader = Callable[[Sources], SourceSettings | None]
"""Reads one source; returns ``None`` if it is not given."""


def enables_fsdp(name: str, value: Any, origin: Origin) -> bool:
    """Whether a setting enables FSDP. A precision, fp8 included, or a number of processes does not.

    Environment variables configure FSDP but do not enable it, except ``ACCELERATE_USE_FSDP``: Transformers itself sets
    some of them.
    """
    if name == "launch.distributed_type":
        return str(value).strip().upper() == "FSDP"
    section, _, key = name.partition(".")
    if section == "mesh" and key not in ("shard", "replicate"):
        return False
    return section not in ("launch", "precision", "fp8", "activation") and origin.source != ENVIRONMENT


AUTO_WRAP = "wrap.auto"
"""Internal name of the ``auto_wrap`` option, which leaves the wrap policy to the other settings."""
OFF: Final = {"bf16": "precision.off.bf16", "fp16": "precision.off.fp16"}
"""Internal names of ``bf16: false`` and ``fp16: false``."""
_STRATEGY_OPTIONS: Final = frozenset({*STRATEGIES, "_hybrid_shard_zero2"})
"""Options of ``fsdp`` that are strategies. The last one is the name in torch's enumeration."""
_SETTING_OF_OPTION: Final = {"auto_wrap": AUTO_WRAP, "offload": "offload.params"}
"""Other options -> the setting that is true with them."""
_SEPARATORS: Final = str.maketrans(dict.fromkeys(f"{BLANKS},", " "))
"""Translation of the characters that separate the options of ``fsdp`` to spaces."""
FSDP_SCOPES: tuple[Scope, ...] = ("fsdp", "precision", "parallelism")


@dataclass(slots=True)
class Collector(SourceSettings):
    """Collects the settings and problems of one source.

    Attributes:
        nulls: the values that mean "not set" in this source.
        mentions_fsdp: whether the source has an FSDP setting.
    """

    source: str
    nulls: Collection[str | None] = (None,)
    mentions_fsdp: bool = False

    def result(self, family: SourceFamily | None) -> SourceSettings:
        """Return the settings and problems. `family` is used only if the source mentions FSDP."""
        self.family = family if self.mentions_fsdp else None
        return self

    def extend(self, other: Collector, *, active: bool = True) -> None:
        """Add the content of another collector.

        Args:
            active: whether its settings apply even if no other source enables FSDP.
        """
        if active:
            self.settings += other.settings
            self.problems += other.problems
            self.inactive_problems += other.inactive_problems
            self.mentions_fsdp |= other.mentions_fsdp
            return
        self.settings += (replace(setting, inactive=True) for setting in other.settings)
        self.inactive_problems += other.problems

    def add_mapping(self, entries: Iterable[ConfigEntry], scopes: Sequence[Scope]) -> None:
        """Add all keys of a mapping."""
        for entry in entries:
            # dynamo_backend was a top-level key before dynamo_config existed.
            older: tuple[Scope, ...] = ("dynamo",) if entry.key.lower().startswith("dynamo_") else ()
            if row := find_row(entry.key, (*scopes, *older)):
                self.add_entry(row, entry)
            else:
                self.report_unknown(entry, scopes)

    def add_entry(self, row: SettingRow, entry: ConfigEntry) -> None:
        """Add one key. Null means that it is not set. Any other value without content (``""``, ``[]``) is an error."""
        if row.scope in FSDP_SCOPES:
            self.mentions_fsdp = True
        if row.opens is not None and not (row.opens == "precision" and not entry.value.is_mapping):
            self._add_section(row, entry)
        elif row.kind == "options":
            self.add_options(entry)
        elif row.ignored and row.internal:
            self._report_ignored(row, entry)
        elif not self._has_value(row, entry):
            return
        elif row.kind == "mode":
            self.add(row.name, entry)
            self._add_param_dtype(entry, entry.value.plain())
        elif row.kind == "flag":
            self._add_flag(row, entry)
        elif row.opens == "precision":  # fsdp_mixed_precision_policy: bf16
            self.add("precision.param", entry)
        else:
            if row.ignored:
                self._report_ignored(row, entry)
            if row.name == "launch.distributed_type" and str(entry.value.value).strip().upper() == "FSDP":
                self.mentions_fsdp = True
            self.add(row.name, entry)

    def _report_ignored(self, row: SettingRow, entry: ConfigEntry) -> None:
        if not entry.value.is_empty and vocabulary.word_of(entry.value.value) not in row.stock:
            self.report("FSDP-W026", entry, f"'{entry.key}' {row.ignored}", "Remove it.")

    def _has_value(self, row: SettingRow, entry: ConfigEntry) -> bool:
        """Whether an entry has a value, which null is not. Report any other value without content."""
        raw = entry.value.value
        word = vocabulary.word_of(raw) if isinstance(raw, str) else None
        is_choice = word is not None and vocabulary.look_up(row.choices, word) is not None
        if (raw is None or word is not None) and word in self.nulls and not is_choice:
            return False
        is_null = word in vocabulary.NULL_WORDS and not is_choice
        if not is_null and (not entry.value.is_empty or (row.kind in ("mapping", "any") and word is None)):
            return True
        message = f"{entry.key} is {entry.value.shown}, which is not a value."
        fix = f"Write a value for {entry.key}, or leave it out."
        self.report("FSDP-E050", entry, message, fix, setting=vocabulary.canonical_setting(row.name))
        return False

    def add_key(self, scope: Scope, key: str, value: object, *, written: str = "") -> None:
        """Add a key of the vocabulary with a Python value. Messages contain the key as `written`, by default `key`."""
        row = find_row(key, (scope,))
        assert row is not None, f"the vocabulary has no key {key} in the scope {scope}"
        self.add_entry(row, entry_of(written or key, value))

    def add(self, name: str, entry: ConfigEntry, *, value: object = ..., implied: bool = False) -> None:
        """Add a setting by its canonical name, with the value of the entry or with `value`."""
        raw = entry.value.plain() if value is ... else value
        self.settings.append(Setting(name=name, value=raw, origin=self._origin(entry), implied=implied))

    def sets(self, name: str) -> bool:
        """Whether one of the settings has this canonical name."""
        return any(setting.name == name for setting in self.settings)

    def report(self, code: str, entry: ConfigEntry, message: str, fix: str = "", *, setting: str | None = None) -> None:
        """Add a problem with the origin of an entry."""
        problem = Problem(code=code, message=message, fix=fix, setting=setting, origin=self._origin(entry))
        self.problems.append(problem)

    def expect(self, entry: ConfigEntry, expected: str, fix: str = "", *, setting: str | None = None) -> None:
        """Report a value that is not one of the expected ones."""
        message = f"{entry.key} is {entry.value.shown}; expected {expected}."
        self.report("FSDP-E101", entry, message, fix or f"Correct {entry.key}.", setting=setting)

    def _origin(self, entry: ConfigEntry) -> Origin:
        text = None if entry.is_switch else entry.value.text
        return Origin(source=self.source, line=entry.line, spelling=entry.key, text=text)

    def _add_section(self, row: SettingRow, entry: ConfigEntry) -> None:
        assert row.opens is not None
        if entry.value.value is None:  # an empty section
            return
        if not entry.value.is_mapping:
            message = f"'{entry.key}' is {entry.value.shown}; expected a section with keys and values."
            self.report("FSDP-E022", entry, message, f"Indent the settings under {entry.key}:.")
            return
        self.mentions_fsdp |= row.opens == "fsdp"
        self.add_mapping(entry.value.value, FSDP_SCOPES if row.opens == "fsdp" else (row.opens,))

    def add_options(self, entry: ConfigEntry) -> None:
        """Add the value of ``fsdp``: options separated by spaces or commas, a list of options, or a bool."""
        value = entry.value.value
        self.mentions_fsdp = value is not None
        if value is None:
            return
        if isinstance(value, Entries):
            self.add_mapping(value, FSDP_SCOPES)
            return
        if isinstance(value, ObjectText):
            self._report_option(entry, value)
            return
        nodes = value if isinstance(value, tuple) else (entry.value,)
        options = _split_options(" ".join(str(node.value) for node in nodes))
        if not options or (len(options) == 1 and options[0] in FALSE_WORDS):
            self.mentions_fsdp = False
            self.add("launch.distributed_type", entry, value="NO", implied=True)
            return
        self.add("launch.distributed_type", entry, value="FSDP", implied=True)
        for option in options:
            if option in _SETTING_OF_OPTION:
                self.add(_SETTING_OF_OPTION[option], entry, value=True)
            elif option not in TRUE_WORDS and option not in _STRATEGY_OPTIONS:
                self._report_option(entry, option)
        if strategies := [option for option in options if option in _STRATEGY_OPTIONS]:
            self.add("sharding.strategy", entry, value=strategies[0])
        if len(set(strategies)) > 1:
            message = f"{entry.key} has more than one sharding strategy: {', '.join(strategies)}."
            self.report("FSDP-E023", entry, message, "Keep one of them.", setting="sharding.strategy")

    def _report_option(self, entry: ConfigEntry, option: str) -> None:
        known = (*STRATEGIES, *_SETTING_OF_OPTION)
        message = f"'{one_line(option)}' is not a valid fsdp option; expected {', '.join(known)}, true or false."
        fix = vocabulary.did_you_mean(vocabulary.nearest_word(option, known), "Remove it.")
        self.report("FSDP-E023", entry, message, fix, setting="sharding.strategy")

    def _add_flag(self, row: SettingRow, entry: ConfigEntry) -> None:
        """Add ``bf16: true`` or ``fp16: true``. ``auto`` and ``full``, which axolotl accepts, also mean true."""
        word = vocabulary.word_of(entry.value.value)
        dtype = row.name.rpartition(".")[2]
        if word in TRUE_WORDS or word in ("auto", "full"):
            self.add("launch.mixed_precision", entry, value=dtype)
            self._add_param_dtype(entry, dtype)
        elif word in FALSE_WORDS:
            if dtype in OFF:  # fp8: false is the default
                self.add(OFF[dtype], entry, value=False, implied=True)
        else:
            fix = f"Write {entry.key}: true, or remove the key."
            self.expect(entry, "true or false", fix, setting="launch.mixed_precision")

    def _add_param_dtype(self, entry: ConfigEntry, mode: object) -> None:
        """Add the parameter dtype that a mixed precision mode implies, if the mode is valid."""
        row = BY_NAME["launch.mixed_precision"]
        if (found := vocabulary.look_up(row.choices, mode, row.prefixes)) is not None:
            implied = {"no": "auto", "fp8": "bf16"}.get(found, found)  # as in Accelerate
            self.add("precision.param", entry, value=implied, implied=True)

    def report_unknown(self, entry: ConfigEntry, scopes: Sequence[Scope]) -> None:
        """Report a key that none of these scopes has."""
        for scope in scopes:
            if unsupported := vocabulary.UNSUPPORTED_KEYS.get((scope, plain_key(entry.key, scope))):
                self.report(unsupported.code, entry, f"'{entry.key}' {unsupported.why}", unsupported.fix)
                return
        if entry.key.startswith("_"):
            message = f"'{one_line(entry.key)}' begins with an underscore and is ignored as a comment."
            self.report("FSDP-N027", entry, message)
            return
        if "launch" in scopes and (row := find_row(entry.key, FSDP_SCOPES)):
            section = "parallelism_config" if row.scope == "parallelism" else "fsdp_config"
            message = f"'{entry.key}' is at the top level, where stock accelerate launch rejects it."
            self.report("FSDP-E020", entry, message, f"Move it under {section}:.")
            return
        nearest = vocabulary.similar_key(entry.key, scopes)
        fix = vocabulary.did_you_mean(nearest, "Remove it, or see hf-fsdp schema for the list of keys.")
        self.report("FSDP-E020", entry, f"unknown key '{one_line(entry.key)}'.", fix)


def entry_of(key: str, value: object, *, is_switch: bool = False) -> ConfigEntry:
    """Return an entry without a line, from a key and a Python value."""
    return ConfigEntry(key=key, line=None, value=from_python(value), is_switch=is_switch)


def _split_options(text: str) -> list[str]:
    """Split text into lower-case options. ``full shard`` and ``FSDPOption.FULL_SHARD`` are ``full_shard``.

    Quotes around the text are removed, and a list in brackets is read too, because launchers of jobs add both.
    """
    text = vocabulary.without_pair(text.strip(BLANKS), vocabulary.QUOTES)
    inner = vocabulary.without_pair(text, ("[]",))
    if inner != text:
        text = " ".join(vocabulary.without_pair(item.strip(BLANKS), vocabulary.QUOTES) for item in inner.split(","))
    words = [word for word in vocabulary.word_of(text).translate(_SEPARATORS).replace("-", "_").split(" ") if word]
    joined = " ".join(_without_prefix(word) for word in words)
    for name in sorted((*STRATEGIES, "auto_wrap"), key=len, reverse=True):
        joined = re.sub(rf"(?<![^ ]){name.replace('_', '[ _]')}(?![^ ])", name, joined)
    return joined.split(" ") if joined else []


def _without_prefix(word: str) -> str:
    """Return ``full_shard`` for ``fsdpoption.full_shard``. ``fsdpoption.true`` is not a word for true."""
    option = vocabulary.without_prefix(word, BY_NAME["sharding.strategy"].prefixes)
    return word if option in TRUE_WORDS | FALSE_WORDS else option
