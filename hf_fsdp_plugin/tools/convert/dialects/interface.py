"""What every dialect has: marks that identify a file, the table of its keys, and a reader of its values.

A dialect is one file ``<name>.py`` with the constant ``DIALECT``, and its table ``<name>.yaml``:

.. code-block:: yaml

    sets:        # key -> canonical settings of the vocabulary
      zero_optimization.stage: {to: sharding.strategy, why: "Stage 3 is full_shard.", values: {3: full_shard}}
    arguments:   # key -> arguments of TrainingArguments
      gradient_clipping: {to: max_grad_norm}
    irrelevant:  # keys without a meaning for FSDP
      - {keys: steps_per_print wall_clock_breakdown, why: Output of DeepSpeed.}
    refused:     # keys that change the training, and have no counterpart
      - {keys: gradient_allreduce_op, allowed: mean, why: "FSDP computes the mean", fix: "Remove it."}
    aliases:     # other spellings of a key or a section
      bfloat16: bf16
    include: training_arguments  # another table: its rows for keys without a row here
    any_case: true  # upper case and - are accepted in keys
    about: ...   # for docs/dialects.md, with an example

Keys are paths with dots. ``section.*`` is every key of a section that has no row of its own, ``prefix_*`` every such
key of the top level that begins with ``prefix_``, and ``*`` every other one. A row for a section includes all keys in
it. ``values`` of a row translates values; ``on`` and ``off`` are those that turn a feature on or off.
``auto`` of a row names the arguments that replace the value ``auto``; by default, this is ``to`` in ``arguments``.
``allowed`` are the values of a refused key that change nothing; by default, those for which :func:`is_off` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import yaml

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.sources.accelerate_file import marks_of
from hf_fsdp_plugin.sources.command_line import parse_flags
from hf_fsdp_plugin.sources.config_tree import ConfigEntry, ConfigFile, Node, one_line
from hf_fsdp_plugin.sources.interface import Collector, SourceFamily, Sources, SourceSettings, entry_of
from hf_fsdp_plugin.text import format_names, format_value, plural
from hf_fsdp_plugin.vocabulary import WORDS, Scope, canonical_setting, find_row, nearest_word, word_of

Fate = Literal["sets", "arguments", "irrelevant", "refused"]
"""What becomes of a key: settings, arguments of ``TrainingArguments``, nothing with a reason, or an error."""
_LAUNCHER_SCOPES: Final[tuple[Scope, ...]] = ("launch", "fsdp", "parallelism", "dynamo", "fp8")
_TEXT_LOADER: Final[Any] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
AUTO: Final = "auto"
"""The value that the arguments of the Trainer replace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DialectKey:
    """One row of the table of a dialect.

    Attributes:
        path: the key with its sections: ``zero_optimization.stage``.
        to: canonical names of settings, or names of arguments.
        auto: names of the arguments that replace ``auto``.
        values: value in the file, in lower case -> value of the settings; empty if they are the same.
        why: the reason, one sentence; for refused keys, without capital and full stop.
        fix: for refused keys: what to do.
        allowed: for refused keys: values in lower case that are not refused.
    """

    path: str
    fate: Fate
    to: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    fix: str = ""
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOutcome:
    """What became of one key of a file.

    Attributes:
        origin: its place, and key and value as written.
        becomes: ``sharding.strategy=full_shard``, ``max_grad_norm=1.0``; empty for a key without effect.
    """

    origin: Origin
    fate: Fate
    becomes: tuple[str, ...] = ()
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return an item of ``keys`` in the output of ``hf-fsdp convert``."""
        place = {"file": self.origin.source, "line": self.origin.line}
        told = {"fate": self.fate, "becomes": list(self.becomes), "why": self.why or None}
        return {"key": self.origin.spelling, "value": self.origin.text, **place, **told}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyTable:
    """All keys of a dialect: path -> row. ``aliases``: another path -> the path in the table.

    ``any_case``: whether upper case and ``-`` are accepted, as in the keys of Accelerate.
    """

    rows: Mapping[str, DialectKey]
    aliases: Mapping[str, str]
    about: str = ""
    any_case: bool = False

    def row(self, path: str) -> DialectKey | None:
        """Return the row of a path, also of ``section.*``, ``prefix_*`` or ``*``; ``None`` if there is none."""
        section = path.rpartition(".")[0]
        prefix = f"{path.partition('_')[0]}_*"
        names = (path, f"{section}.*", "*") if section else (path, prefix, "*")
        return next((self.rows[name] for name in names if name in self.rows), None)

    def is_section(self, path: str) -> bool:
        """Whether the table has rows for keys in this section."""
        return any(known.startswith(f"{path}.") for known in self.rows)

    def known(self, path: str) -> str:
        """Return the path in the table for a path whose key or first section may have another spelling."""
        if self.any_case:
            path = path.lower().replace("-", "_")
        if path in self.aliases:
            return self.aliases[path]
        section, dot, key = path.rpartition(".")
        return f"{self.known(section)}{dot}{key}" if dot else path


@cache
def load_yaml(name: str, loader: Any = _TEXT_LOADER) -> dict[str, Any]:
    """Return the content of ``<name>.yaml``. By default, all values are text."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=loader)


@cache
def load_table(name: str) -> KeyTable:
    """Return the table in ``<name>.yaml``."""
    content = load_yaml(name)
    included = load_table(content["include"]) if "include" in content else KeyTable(rows={}, aliases={})
    rows = dict(included.rows)
    for fate in get_args(Fate):
        groups = content.get(fate, {})
        pairs = groups.items() if isinstance(groups, dict) else [(group["keys"], group) for group in groups]
        for paths, fields in pairs:
            lists = {"to": "", "auto": fields.get("to", "") if fate == "arguments" else "", "allowed": ""}
            given: dict[str, Any] = {key: tuple(fields.get(key, default).split()) for key, default in lists.items()}
            given |= {key: fields[key] for key in ("values", "why", "fix") if key in fields}
            rows |= {path: DialectKey(path=path, fate=fate, **given) for path in paths.split()}
    aliases = MappingProxyType({**included.aliases, **content.get("aliases", {})})
    any_case = included.any_case or "any_case" in content
    return KeyTable(rows=MappingProxyType(rows), aliases=aliases, about=content.get("about", ""), any_case=any_case)


@dataclass(frozen=True, kw_only=True, slots=True)
class DialectDocument:
    """A config of which the dialect is not known yet.

    Attributes:
        root: its tree.
        sources: the config, and everything else that was given with it.
        script_arguments: words of the command line of the script. They replace ``auto`` in a config of DeepSpeed.
        converts: whether all values of ``auto`` must be known, and a config of DDP is read too.
    """

    root: Node
    sources: Sources
    script_arguments: Sequence[str] = ()
    converts: bool = False

    @property
    def file(self) -> ConfigFile | None:
        """The file; ``None`` for a dict."""
        return self.sources.config if isinstance(self.sources.config, ConfigFile) else None

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return self.file.shown if self.file is not None else "config"

    def keys(self) -> dict[str, ConfigEntry]:
        """Return the entries of the top level by their key."""
        return {entry.key.strip(): entry for entry in self.root.value}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``TrainingArguments`` that were given with the config."""
        words = (*self.sources.command_line, *self.script_arguments)
        given = {flag.name: flag.text or True for flag in parse_flags(words)} | dict(self.sources.training_arguments)
        return {name: value for name, value in given.items() if not _is_for_launcher(name)}

    def world_size(self) -> int | None:
        """Return the number of ranks that was given with the config; ``None`` if there is none."""
        given = [flag.text for flag in parse_flags(self.sources.command_line) if flag.name == "num_processes"]
        number = str(self.sources.world_size or (given[-1] if given else ""))
        return int(number) if number.isdecimal() and int(number) else None


@dataclass(kw_only=True, slots=True)
class DialectReading(Collector):
    """Collects the settings and the arguments that a file of a dialect contains, and what became of each key.

    Attributes:
        dialect_of: the dialect of the file.
        document: the file.
        outcomes: what became of each key, in the order of the file.
        arguments: arguments of ``TrainingArguments``: name -> value.
        unfilled: keys with the value ``auto``, for which no argument was given, and the arguments that replace it.
        found: path -> entry of each key of the tree.
        becomes: what the key sets that is being read: ``max_grad_norm=1.0``.
        read_other: reads another config; used by :meth:`include`.
        defaults: selects the defaults of settings that no file sets.
        included_arguments: the arguments that only included files set.
        unknown: the keys of a file with ``own_script`` that the table does not have.
        path, row: the path in the table of the key that is being read, and its row.
    """

    dialect_of: ConfigDialect
    document: DialectDocument
    read_other: Callable[[Sources], SourceSettings | None]
    defaults: SourceFamily = "training_arguments"
    outcomes: list[KeyOutcome] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    unfilled: list[tuple[Origin, tuple[str, ...]]] = field(default_factory=list)
    found: dict[str, ConfigEntry] = field(default_factory=dict)
    becomes: list[str] = field(default_factory=list)
    included_arguments: dict[str, Any] = field(default_factory=dict)
    unknown: list[ConfigEntry] = field(default_factory=list)
    path: str = ""
    row: DialectKey = DialectKey(path="*", fate="sets")

    def leaves(self) -> list[tuple[str, ConfigEntry]]:
        """Return the path in the table and the entry of each key of the file's tree."""
        found = list(leaves(self.dialect_of.table, self.document.root.value))
        self.found = dict(found)
        return found

    def read_tree(self) -> None:
        """Read all keys of the file's tree."""
        for path, entry in self.leaves():
            self.add_path(path, entry)

    def text(self, path: str, default: str = "") -> str:
        """Return the value of a key of the tree in lower case; `default` if it is absent or empty."""
        entry = self.found.get(path)
        return default if entry is None or entry.value.is_empty else word_of(entry.value.value)

    def add_path(self, path: str, entry: ConfigEntry) -> None:
        """Read one key. Its row in the table decides what becomes of it; an unknown key is an error.

        Args:
            path: the key with its sections, as in the table.
            entry: the value, with its place. Its key is shown in messages.
        """
        row, self.path = self.dialect_of.table.row(path), path
        is_comment, is_section = path.rpartition(".")[2].startswith("_"), self.dialect_of.table.is_section(path)
        is_empty = entry.value.value is None or (is_section and entry.value.is_empty)
        if is_comment or is_empty:
            why = "It is a comment." if is_comment else "It has no value."
            self._record(DialectKey(path=path, fate="irrelevant", why=why), entry)
        elif row is None:
            self._report_unknown(path, entry)
        elif row.fate == "irrelevant":
            self._record(row, entry)
        elif row.fate == "refused":
            self._refuse(row, entry)
        elif (filled := self._without_auto(row, entry)) is not None:
            self.add_row(row, filled)

    def record_read(self, path: str, entry: ConfigEntry) -> None:
        """Record what became of a key that another reader has read into this collector."""
        row, origin = self.dialect_of.table.row(path), self._origin(entry)
        if row is None or any(p.severity == "error" and p.origin == origin for p in self.problems):
            return
        self._record(row, entry, tuple(shown_setting(s.name, s.value) for s in self.settings if s.origin == origin))

    def include(self, config: ConfigFile | Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> None:
        """Read a config that the file names or contains, with its own dialect. This reading gets what it sets.

        Args:
            arguments: arguments of ``TrainingArguments`` in the file, which replace the value ``auto`` in the config.
        """
        given = {**(arguments or {}), **self.document.sources.training_arguments}
        part = self.read_other(replace(self.document.sources, config=config, training_arguments=given))
        assert part is not None, "a config is given"
        self.defaults = part.family or self.defaults
        self.settings += part.settings
        self.problems += part.problems
        if isinstance(part, DialectReading):
            self.outcomes += part.outcomes
            self.unfilled += part.unfilled
            new = {name: value for name, value in part.arguments.items() if not same_value(value, given.get(name))}
            self.included_arguments |= new
            self.arguments |= new

    def imply(self, name: str, value: object, cause: ConfigEntry | None = None) -> None:
        """Add a setting that the file implies, and that another key of it may override."""
        self.add(name, cause or entry_of(self.dialect_of.title, "", is_switch=True), value=value, implied=True)

    def set_argument(self, name: str, entry: ConfigEntry, *, value: object = ...) -> None:
        """Add an argument of ``TrainingArguments``. Another value beside the file is an error."""
        new = typed_value(entry.value.plain() if value is ... else value)
        given = self.document.arguments().get(name)
        if given is not None and not same_value(given, new):
            reason = f"and the argument {name} is {format_value(given, 'none')}"
            self.contradicts(entry, reason, f"Remove one of them, or set {entry.key} to {AUTO}.")
        elif name in self.arguments and not same_value(self.arguments[name], new):
            self.contradicts(entry, f"and another key sets {name} to {self.arguments[name]}")
        self.arguments[name] = new
        self.becomes.append(shown_setting(name, new))

    def ignore(self, entry: ConfigEntry, why: str) -> None:
        """Record a key that has no effect for a reason that is not in the table."""
        self.outcomes.append(KeyOutcome(origin=self._origin(entry), fate="irrelevant", why=why))

    def refuse(self, entry: ConfigEntry, why: str, fix: str) -> None:
        """Report a value that changes the training and has no counterpart."""
        self.report("FSDP-E062", entry, f"{entry.key} is {entry.value.text}: {why}.", fix)

    def differs(self, entry: ConfigEntry, reason: str, fix: str = "") -> None:
        """Report that a value is read as something that is not exactly the same: a warning with a fix, or a note."""
        self.report("FSDP-W070" if fix else "FSDP-N071", entry, f"{entry.key} is {entry.value.text}: {reason}.", fix)

    def contradicts(self, entry: ConfigEntry, reason: str, fix: str = "Keep one of them.") -> None:
        """Report a value that contradicts another key or argument."""
        self.report("FSDP-E066", entry, f"{entry.key} is {entry.value.text}, {reason}.", fix)

    def finish(self) -> None:
        """Add the problems that concern the whole file."""
        converts = self.document.converts
        if self.unfilled:
            keys = ", ".join(origin.spelling for origin, _ in self.unfilled)
            flags = dict.fromkeys(f"--{name}" for _, names in self.unfilled for name in names)
            message = f"only the arguments of the Trainer know the values of {keys}."
            fix = f"Give the arguments of the script: {' '.join(flags)}."
            code = "FSDP-E063" if converts else "FSDP-N069"
            self.problems.append(Problem(code=code, message=message, fix=fix, origin=self.unfilled[0][0]))
        if self.unknown:
            names = format_names([entry.key for entry in self.unknown])
            message = f"the table of the keys of {self.dialect_of.title} does not have {names}."
            fix = "Check the spelling. If a newer version has the key, check that it has no effect on sharding."
            self.report("FSDP-W072", self.unknown[0], message, fix)
        given = self.document.arguments()
        needed = self.included_arguments if self.dialect_of.own_script else self.arguments
        missing = {name: value for name, value in needed.items() if name not in given}
        if missing and not converts:
            words = " ".join(f"--{name} {format_value(value, 'none')}" for name, value in missing.items())
            message = "the file sets arguments of the Trainer, which the script must be given."
            self.report_file("FSDP-W068", message, f"Pass {words} to the script.")
        counts = [(fate, sum(outcome.fate == fate for outcome in self.outcomes)) for fate in _TEXTS]
        texts = [_TEXTS[fate].format(plural(count, "key")) for fate, count in counts if count]
        message = f"the settings of {self.dialect_of.title} are read as settings of FSDP"
        self.report_file("FSDP-N067", f"{message}: {', '.join(texts)}." if texts else f"{message}.", "")

    def add_row(self, row: DialectKey, entry: ConfigEntry) -> None:
        """Add a key with the fate ``sets`` or ``arguments``, and record what it becomes."""
        num_settings, num_problems = len(self.settings), len(self.problems)
        self.row, self.becomes = row, []
        handlers = self.dialect_of.handlers
        by_fate = DialectReading.add_targets if row.values else handlers.get(row.fate, DialectReading.add_targets)
        handler = handlers.get(row.path) or handlers.get(" ".join(row.to)) or by_fate
        handler(self, entry)
        if not any(problem.severity == "error" for problem in self.problems[num_problems:]):
            new = [shown_setting(setting.name, setting.value) for setting in self.settings[num_settings:]]
            self._record(row, entry, (*new, *self.becomes))

    def add_targets(self, entry: ConfigEntry) -> None:
        """Set what the row of the key names to the value of the key."""
        value = self.translated(entry)
        for name in self.row.to if value is not None else ():
            if self.row.fate == "sets":
                self.add(name, entry, value=value)
            elif word_of(entry.value.value) not in vocabulary.NULL_WORDS | {AUTO}:  # the Trainer has its own default
                self.set_argument(name, entry, value=value)

    def translated(self, entry: ConfigEntry) -> object:
        """Return the value that the row of the key has for a value, ``...`` if it has no values, or report an error."""
        row = self.row
        value = row.values.get(word_of(entry.value.value).rpartition(".")[2])
        value = value or row.values.get("off" if is_off(entry.value) else "on")
        if value is not None or not row.values:
            return value or ...
        if row.fate == "arguments":
            reason = f"the Trainer has none of this name; known are {', '.join(row.values)}"
            self.refuse(entry, reason, f"Remove the section, and choose {row.to[0]} of TrainingArguments.")
        else:
            self.expect(entry, ", ".join(row.values), setting=canonical_setting(row.to[0]))
        return None

    def _record(self, row: DialectKey, entry: ConfigEntry, becomes: tuple[str, ...] = ()) -> None:
        self.outcomes.append(KeyOutcome(origin=self._origin(entry), fate=row.fate, becomes=becomes, why=row.why))

    def _refuse(self, row: DialectKey, entry: ConfigEntry) -> None:
        is_off_here = word_of(entry.value.value) in row.allowed if row.allowed else is_off(entry.value)
        if is_off_here or (row.path.endswith("_size") and entry.value.text == "1"):
            self.ignore(entry, "It is turned off.")
        else:
            self.refuse(entry, row.why, row.fix)

    def _without_auto(self, row: DialectKey, entry: ConfigEntry) -> ConfigEntry | None:
        """Return the entry with the argument that replaces ``auto``; ``None`` if the Trainer's default applies."""
        if not row.auto or word_of(entry.value.value) != AUTO:
            return entry
        given = self.document.arguments()
        values = [given.get(name) for name in row.auto]
        if any(value is not None for value in values):
            value = entry_of("", values[0] if len(values) == 1 else values).value
            return replace(entry, value=replace(value, line=entry.line))
        if given:
            self._record(replace(row, why=f"The default of {' and '.join(row.auto)} applies."), entry)
        else:
            self.unfilled.append((self._origin(entry), row.auto))
        return None

    def _report_unknown(self, path: str, entry: ConfigEntry) -> None:
        message = f"'{one_line(entry.key)}' is not a key of {self.dialect_of.title}."
        section, _, key = path.rpartition(".")
        rows = self.dialect_of.table.rows.values()
        known = {row.path.rpartition(".")[2]: row for row in rows if row.path.rpartition(".")[0] == section}
        nearest = nearest_word(key, known)
        if self.dialect_of.own_script and (not nearest or known[nearest].fate in ("arguments", "irrelevant")):
            self.ignore(entry, f"It is not in the table of the keys of {self.dialect_of.title}.")
            self.unknown.append(entry)
        else:
            self.report("FSDP-E061", entry, message, vocabulary.did_you_mean(nearest, "Remove it."))

    def report_file(self, code: str, message: str, fix: str) -> None:
        """Add a problem of the whole file."""
        self.problems.append(Problem(code=code, message=message, fix=fix, origin=Origin(source=self.source)))


_TEXTS: Final[Mapping[Fate, str]] = {
    "sets": "{} of FSDP",
    "arguments": "{} for the Trainer",
    "irrelevant": "{} without effect",
}
"""Fate -> how a note counts its keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDialect:
    """One dialect.

    Attributes:
        name: name of its module and of its table: ``deepspeed``.
        title: name in messages: ``DeepSpeed``.
        marks: returns the entries of a document that only this dialect has; none if it is another dialect.
        read: reads a document, usually with :meth:`DialectReading.read_tree`, and then what several keys imply.
        handlers: path, ``to`` of a row, or fate of a row without values -> function that reads these keys; the first of
            them applies. A key without one sets what its row names to its value.
        own_script: whether the file is read by the training script too, so that it knows its arguments and its keys.
    """

    name: str
    title: str
    marks: Callable[[DialectDocument], Sequence[ConfigEntry]]
    read: Callable[[DialectReading], None]
    handlers: Mapping[str, Callable[[DialectReading, ConfigEntry], None]] = field(default_factory=dict)
    own_script: bool = False

    @property
    def table(self) -> KeyTable:
        """The table of all keys."""
        return load_table(self.name)


def _is_for_launcher(flag: str) -> bool:
    """Whether a flag is one of the launcher, or one that configures FSDP."""
    if flag in WORDS["launcher_flags"] | WORDS["switches"] or flag.startswith("fsdp") or flag == "set":
        return True
    return flag not in WORDS["flags_with_optional_value"] and find_row(flag, _LAUNCHER_SCOPES) is not None


def leaves(table: KeyTable, entries: Sequence[ConfigEntry], section: str = "") -> Iterator[tuple[str, ConfigEntry]]:
    """Yield each key that has a row, and each unknown one, as its path in the table and its entry.

    The key of the entry is the path as written: ``zero_optimization.stage``.
    """
    for entry in entries:
        written = f"{section}.{entry.key.strip()}" if section else entry.key.strip()
        path = table.known(written)
        if entry.value.is_mapping and entry.value.value and table.is_section(path):
            yield from leaves(table, entry.value.value, written)
        else:
            yield path, replace(entry, key=written)


def marked_by(names: Collection[str]) -> Callable[[DialectDocument], list[ConfigEntry]]:
    """Return a function that returns the entries of a document with these names."""
    return lambda document: marks_of(document.root, names)


def shown_setting(name: str, value: object) -> str:
    """Return a setting or an argument with its value, for the list of what the keys become."""
    return f"{name}={format_value(value, 'none')}"


def is_off(node: Node) -> bool:
    """Whether a value turns a feature off: empty, false, 0, none, or a section with ``enabled: false``."""
    if node.is_mapping:
        inner = {entry.key: entry.value for entry in node.value}
        if "enabled" in inner:
            return is_off(inner["enabled"])
        return all(value.is_mapping and is_off(value) for value in inner.values())
    return node.is_empty or word_of(node.value) in vocabulary.FALSE_WORDS | vocabulary.NULL_WORDS


def typed_value(value: Any) -> Any:
    """Return the number, bool or text that a text is: ``1e-4``, which is text in YAML 1.1, and flags."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal, also if one of them is text: ``"1e-4"`` and ``0.0001``."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return word_of(one) == word_of(other)
