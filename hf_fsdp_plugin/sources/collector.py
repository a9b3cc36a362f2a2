"""Converts the keys of a source to settings with canonical names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import hf_fsdp_plugin.spellings as spellings
import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.interface import Setting, SourceFamily, SourceSettings
from hf_fsdp_plugin.sources.tree import ConfigEntry, Entries, ObjectText, from_python, one_line
from hf_fsdp_plugin.spellings import BLANKS, FALSE_WORDS, QUOTES, TRUE_WORDS, without_pair, word_of
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import Scope, SettingRow, find_row, plain_key

AUTO_WRAP = "wrap.auto"
"""Internal name of the ``auto_wrap`` option, which leaves the wrap policy to the other settings."""
OFF: Final = {"bf16": "precision.off.bf16", "fp16": "precision.off.fp16"}
"""Internal names of ``bf16: false`` and ``fp16: false``."""
_STRATEGY_OPTIONS: Final = frozenset({*STRATEGIES, "_hybrid_shard_zero2"})
"""Options of ``fsdp`` that are strategies. The last one is the name in torch's enumeration."""
_SETTING_OF_OPTION: Final = {"auto_wrap": AUTO_WRAP, "offload": "offload.params"}
"""Other options -> the setting that is true with them."""
_ALWAYS_WRITTEN: Final = frozenset({"wrap.min_num_params", "xla.enabled", "xla.v2", "xla.grad_ckpt"})
_WRITTEN_VALUES: Final = (0, False)
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
            active: whether its settings apply even if no other source enables FSDP. Values that Transformers 4 writes
                into every ``fsdp_config`` are not settings of the user.
        """
        if active:
            self.settings += other.settings
            self.not_set += other.not_set
            self.problems += other.problems
            self.inactive_problems += other.inactive_problems
            self.mentions_fsdp |= other.mentions_fsdp
            return
        given = (s for s in other.settings if s.name not in _ALWAYS_WRITTEN or s.value not in _WRITTEN_VALUES)
        self.settings += (replace(setting, inactive=True) for setting in given)
        self.not_set += (replace(setting, inactive=True) for setting in other.not_set)
        self.inactive_problems += other.problems

    def add_mapping(
        self, entries: Iterable[ConfigEntry], scopes: Sequence[Scope], *, misplaced: Sequence[Scope] = ()
    ) -> None:
        """Add all keys of a mapping. A key that is valid only in a `misplaced` scope is added with a warning."""
        for entry in entries:
            # dynamo_backend was a top-level key before dynamo_config existed.
            older: tuple[Scope, ...] = ("dynamo",) if entry.key.lower().startswith("dynamo_") else ()
            if row := find_row(entry.key, (*scopes, *older)):
                self.add_entry(row, entry)
            elif row := find_row(entry.key, misplaced):
                self._warn_misplaced(row, entry)
                self.add_entry(row, entry)
            else:
                self.report_unknown(entry, (*scopes, *misplaced))

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
        if not entry.value.is_empty and word_of(entry.value.value) not in row.stock:
            self.report("FSDP-W026", entry, f"'{entry.key}' {row.ignored}", "Remove it.")

    def _has_value(self, row: SettingRow, entry: ConfigEntry) -> bool:
        """Whether an entry has a value. Record null, and report any other value without content."""
        raw = entry.value.value
        word = word_of(raw) if isinstance(raw, str) else None
        is_choice = word is not None and spellings.look_up(row.choices, word) is not None
        if (raw is None or word is not None) and word in self.nulls and not is_choice:
            self.not_set.append(Setting(name=row.name, value=None, origin=self._origin(entry)))
            return False
        is_null = word in spellings.NULL_WORDS and not is_choice
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
        strategies = [option for option in options if option in _STRATEGY_OPTIONS]
        if strategies:
            self.add("sharding.strategy", entry, value=strategies[0])
        if len(set(strategies)) > 1:
            message = f"{entry.key} has more than one sharding strategy: {', '.join(strategies)}."
            self.report("FSDP-E023", entry, message, "Keep one of them.", setting="sharding.strategy")

    def _report_option(self, entry: ConfigEntry, option: str) -> None:
        known = (*STRATEGIES, *_SETTING_OF_OPTION)
        message = f"'{one_line(option)}' is not a valid fsdp option; expected {', '.join(known)}, true or false."
        fix = spellings.did_you_mean(spellings.nearest_word(option, known), "Remove it.")
        self.report("FSDP-E023", entry, message, fix, setting="sharding.strategy")

    def _add_flag(self, row: SettingRow, entry: ConfigEntry) -> None:
        """Add ``bf16: true`` or ``fp16: true``. ``auto`` and ``full``, which axolotl accepts, also mean true."""
        word = word_of(entry.value.value)
        dtype = row.name.rpartition(".")[2]
        if word in TRUE_WORDS or word in ("auto", "full"):
            self.add("launch.mixed_precision", entry, value=dtype)
            self._add_param_dtype(entry, dtype)
        elif word in FALSE_WORDS:
            if dtype in OFF:  # fp8: false is the default
                self.add(OFF[dtype], entry, value=False, implied=True)
        else:
            message = f"{entry.key} is {entry.value.text!r}; expected true or false."
            fix = f"Write {entry.key}: true, or remove the key."
            self.report("FSDP-E024", entry, message, fix, setting="launch.mixed_precision")

    def _add_param_dtype(self, entry: ConfigEntry, mode: object) -> None:
        """Add the parameter dtype that a mixed precision mode implies, if the mode is valid."""
        row = vocabulary.BY_NAME["launch.mixed_precision"]
        found = spellings.look_up(row.choices, mode, row.prefixes)
        if found is not None:
            implied = {"no": "auto", "fp8": "bf16"}.get(found, found)  # as in Accelerate
            self.add("precision.param", entry, value=implied, implied=True)

    def _warn_misplaced(self, row: SettingRow, entry: ConfigEntry) -> None:
        section = "parallelism_config" if row.scope == "parallelism" else "fsdp_config"
        message = f"'{entry.key}' is at the top level, where stock accelerate launch rejects it."
        self.report("FSDP-W021", entry, message, f"Move it under {section}:.", setting=row.name)

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
        nearest = vocabulary.similar_key(entry.key, scopes)
        fix = spellings.did_you_mean(nearest, "Remove it, or see hf-fsdp schema for the list of keys.")
        self.report("FSDP-E020", entry, f"unknown key '{one_line(entry.key)}'.", fix)


def entry_of(key: str, value: object, *, is_switch: bool = False) -> ConfigEntry:
    """Return an entry without a line, from a key and a Python value."""
    return ConfigEntry(key=key, line=None, value=from_python(value), is_switch=is_switch)


def _split_options(text: str) -> list[str]:
    """Split text into lower-case options. ``full shard`` and ``FSDPOption.FULL_SHARD`` are ``full_shard``.

    Quotes around the text are removed, and a list in brackets is read too, because launchers of jobs add both.
    """
    text = without_pair(text.strip(BLANKS), QUOTES)
    inner = without_pair(text, ("[]",))
    if inner != text:
        text = " ".join(without_pair(item.strip(BLANKS), QUOTES) for item in inner.split(","))
    words = [word for word in word_of(text).translate(_SEPARATORS).replace("-", "_").split(" ") if word]
    joined = " ".join(_without_prefix(word) for word in words)
    for name in sorted((*STRATEGIES, "auto_wrap"), key=len, reverse=True):
        joined = re.sub(rf"(?<![^ ]){name.replace('_', '[ _]')}(?![^ ])", name, joined)
    return joined.split(" ") if joined else []


def _without_prefix(word: str) -> str:
    """Return ``full_shard`` for ``fsdpoption.full_shard``. ``fsdpoption.true`` is not a word for true."""
    option = spellings.without_prefix(word, vocabulary.BY_NAME["sharding.strategy"].prefixes)
    return word if option in TRUE_WORDS | FALSE_WORDS else option
