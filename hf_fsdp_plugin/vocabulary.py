"""The table of settings in ``vocabulary.yaml``: names, values and accepted keys.

To support another key or value, add it to a row there; the defaults are in ``spec/fsdp_spec.py``. Keys are compared in
lower case, with ``-`` replaced by ``_`` and without the prefix of their scope: ``fsdp_offload_params``,
``OFFLOAD_PARAMS`` and ``--fsdp-offload-params`` are the same key. The functions before the table define how values are
compared.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml

from hf_fsdp_plugin.strategies import STRATEGIES

TRUE_WORDS: Final = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS: Final = frozenset({"false", "no", "off", "0"})
NULL_WORDS: Final = frozenset({"", "none", "null", "~"})
"""Text that programs write for a missing value."""

_SEPARATOR: Final = re.compile(r"(?<=[a-z0-9])(?:-| +)(?=[a-z0-9])")
"""Characters that may replace ``_`` inside a word: a hyphen or spaces, but not both, and not at the ends."""
BLANKS: Final = " \t\r\n\f\v"
"""Characters that are removed around keys and values. Other white space (no-break spaces) is part of the text."""
QUOTES: Final = ('""', "''")
"""Pairs of quotes, which launchers of jobs put around values."""


def lower(text: str) -> str:
    """Return text in lower case, without blanks around it. Letters outside ASCII are not changed into ASCII letters."""
    text = text.strip(BLANKS)
    return text.lower() if text.isascii() else text


def word_of(raw: Any) -> str:
    """Return a value as lower-case text without blanks around it."""
    return lower(str(raw))


def without_prefix(word: str, prefixes: Sequence[str]) -> str:
    """Return ``full_shard`` for ``shardingstrategy.full_shard``, if ``ShardingStrategy`` is one of the prefixes."""
    before, dot, after = word.partition(".")
    is_known = before in {prefix.lower() for prefix in prefixes}
    return after if dot and is_known and after and not after[0].isdigit() else word


def value_key(raw: Any, prefixes: Sequence[str] = ()) -> str:
    """Return a value in the form of a choice: ``full_shard`` for ``full shard`` and ``ShardingStrategy.FULL_SHARD``."""
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    word = word_of(raw)
    if not set(word) - set("+-.0123456789"):
        return word  # a sign or a decimal point is not a separator: -1 is not 1, and 2.5 is not 5
    return _SEPARATOR.sub("_", without_prefix(word, prefixes))


def look_up(choices: Mapping[str, tuple[str, ...]], raw: Any, prefixes: Sequence[str] = ()) -> str | None:
    """Return the choice that a text, number or bool represents; ``None`` if there is none."""
    key = value_key(raw, prefixes)
    for value, others in choices.items():
        if key == value.lower() or key in others:
            return value
    return None


def without_pair(text: str, pairs: Collection[str]) -> str:
    """Return a text without the pair of characters around it, such as quotes (``""``), and without blanks inside."""
    return text[1:-1].strip(BLANKS) if len(text) > 1 and text[0] + text[-1] in pairs else text


def nearest_word(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known word that is most similar to a misspelled one; empty if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), "")


def did_you_mean(nearest: str, otherwise: str = "") -> str:
    """Return the remedy for a misspelled word: the nearest known word, or `otherwise` if there is none."""
    return f"Did you mean {nearest}?" if nearest else otherwise


Scope = Literal["fsdp", "parallelism", "dynamo", "precision", "fp8", "launch", "training", "distributed"]
"""The scope in which a key is valid: in ``fsdp_config``, ``parallelism_config``, ``dynamo_config``, ``fp8_config`` or
the precision policy, at the top level of Accelerate's file, among the arguments of a training script, or in a
``DistributedConfig``.
"""

ValueKind = Literal[
    "bool", "integer", "count", "size", "choice", "names", "mapping", "any",  # plain values
    "devices", "text",
    "reshard",  # true, false or a strategy
    "one",      # a degree of parallelism, which must be 1
    "section",  # a section with another scope
    "options",  # fsdp="full_shard auto_wrap"
    "mode",     # mixed_precision, which sets two settings
    "flag",     # bf16=True, fp16=True
]  # fmt: skip

PREFIXES: Mapping[Scope, str] = {
    "fsdp": "fsdp_", "parallelism": "parallelism_config_", "dynamo": "dynamo_", "fp8": "fp8_",
    "precision": "", "launch": "", "training": "", "distributed": "",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One setting.

    Attributes:
        name: canonical name.
        about: meaning, for the documentation.
        spellings: keys without the prefix of the scope; the first one is recommended.
        choices: canonical value -> other spellings of it.
        prefixes: names of enumerations, or ``torch``, that may precede a choice: ``ShardingStrategy.FULL_SHARD``.
        opens: for sections, the scope of their keys.
        ignored: why the key has no effect. A value that is neither empty nor in `stock` is reported.
        stock: the values that Accelerate's own questionnaire writes for an ignored key, as lower-case text.
        internal: whether the setting has no field in ``FsdpSpec``. Other settings are derived from it.
    """

    name: str
    kind: ValueKind
    about: str
    scope: Scope
    spellings: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    opens: Scope | None = None
    internal: bool = False
    ignored: str = ""
    stock: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The recommended key: ``fsdp_offload_params``."""
        return PREFIXES[self.scope] + self.spellings[0]


STRATEGY_CHOICES: Mapping[str, tuple[str, ...]] = {
    row.name: tuple(name for name in (str(row.number), row.torch_name.lower()) if name != row.name)
    for row in STRATEGIES.values()
}


def _each_row(rows: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one row for each word of ``each``, which replaces ``{}``."""
    for name, fields in rows.items():
        for word in fields.get("each", "-").split():
            texts = {key: text.replace("{}", word) for key, text in fields.items() if isinstance(text, str)}
            yield name.replace("{}", word), {key: value for key, value in (fields | texts).items() if key != "each"}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _choices(given: str | Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    if given == "{strategies}":
        return STRATEGY_CHOICES
    table = dict.fromkeys(given.split(), "") if isinstance(given, str) else given
    return {value: _words(others) for value, others in table.items()}


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "spellings": _words, "prefixes": _words, "stock": _words, "choices": _choices,
    "minimum": int, "maximum": int, "internal": bool,
    "about": lambda text: text.replace("{strategies}", "; ".join(row.about for row in STRATEGIES.values())),
}  # fmt: skip
"""Field of a row -> the function that makes its value of text. Other fields are text."""


def _row_of(scope: Scope, name: str, fields: Mapping[str, Any]) -> SettingRow:
    values: dict[str, Any] = {"scope": scope, "name": name, "spellings": (name.rpartition(".")[2],)}
    values |= {key: _PARSERS.get(key, str)(value) for key, value in fields.items()}
    return SettingRow(**values)


class UnsupportedKey(NamedTuple):
    """A known key or value that is not supported: the code of the problem, the reason and the remedy."""

    code: str
    why: str
    fix: str


_text = Path(__file__).with_name("vocabulary.yaml").read_text(encoding="utf-8")
# All values are read as text: otherwise "no" and "off" would be bools.
_settings, _unsupported, _groups, TABLES = yaml.load_all(_text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
ROWS: tuple[SettingRow, ...] = tuple(
    _row_of(scope, name, fields) for scope, rows in _settings.items() for name, fields in _each_row(rows)
)
UNSUPPORTED_KEYS, UNSUPPORTED_VALUES = (
    {
        (group, name): UnsupportedKey(**fields)
        for group, rows in _unsupported[kind].items()
        for name, fields in _each_row(rows)
    }
    for kind in ("keys", "values")
)
"""Scope and key, and setting and value -> why the key or value is not supported."""
WORDS: Mapping[str, frozenset[str]] = {name: frozenset(_words(text)) for name, text in _groups.items()}
"""Name of a group -> its words. ``TABLES``: name of a table -> its content, as text."""
BY_NAME: Mapping[str, SettingRow] = {row.name: row for row in reversed(ROWS)}
BY_KEY: Mapping[tuple[Scope, str], SettingRow] = {(row.scope, key): row for row in ROWS for key in row.spellings}
TRAINING_FILE_MARKS = WORDS["training_file_marks"]
"""Keys that distinguish the config of a training script from Accelerate's file."""
PROGRAM_KEYS: Mapping[str, frozenset[str]] = {
    program: frozenset(_words(text)) for program, text in TABLES["program_keys"].items()
}
"""Program -> the keys of the top level, or below it with a dot, that only its configs have."""


def plain_key(key: str, scope: Scope) -> str:
    """Normalize a key: lower case, ``_`` for ``-`` and spaces, without the prefix of the scope."""
    return lower(key).replace("-", "_").replace(" ", "_").removeprefix(PREFIXES[scope])


def canonical_setting(name: str) -> str | None:
    """Return the setting of ``FsdpSpec`` for an internal name, for messages; ``None`` if there is none."""
    name = TABLES["derived"].get(name, name)
    for gathered in ("launch.extra", "launch.dynamo_config", "fp8.te_options"):
        if name.startswith(f"{gathered}."):
            return gathered
    row = BY_NAME.get(name)
    return None if row is None or row.internal else name


def find_row(key: str, scopes: Iterable[Scope]) -> SettingRow | None:
    """Return the row of a key in the first scope that has it, or of a canonical name; ``None`` if there is none."""
    for scope in scopes:
        if row := BY_KEY.get((scope, plain_key(key, scope))):
            return row
    row = BY_NAME.get(lower(key))
    return row if row is not None and not row.internal else None


def similar_key(key: str, scopes: Iterable[Scope]) -> str:
    """Return the known key most similar to a misspelled one, with its prefix; empty if none is similar."""
    known: dict[str, str] = {}
    for row in (row for scope in scopes for row in ROWS if row.scope == scope):
        for spelling in row.spellings:
            known.setdefault(spelling, PREFIXES[row.scope] + spelling)
            known.setdefault(PREFIXES[row.scope] + spelling, PREFIXES[row.scope] + spelling)
    return known.get(nearest_word(key.strip().lower().replace("-", "_"), known, cutoff=0.7), "")
