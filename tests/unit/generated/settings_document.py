"""Reads docs/settings.md: the tables of the settings, and the words in the table of values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[3] / "docs" / "settings.md"
SECTIONS = {
    "`fsdp_config`": "fsdp",
    "`parallelism_config`": "parallelism",
    "`dynamo_config`": "dynamo",
    "`fp8_config`": "fp8",
    "`fsdp_mixed_precision_policy`": "precision",
    "the top level of Accelerate's file": "launch",
    "`TrainingArguments`": "training",
    "`DistributedConfig` of Transformers": "distributed",
}
"""Beginning of a heading -> name of the section in the tests."""
_TITLE = re.compile(r"## In (.+?)(?:, prefix `(?P<prefix>\w+)`)?$")
_RANGE = re.compile(r"(?P<kind>\w+)(?:, at least (?P<low>\d+))?(?:, at most (?P<high>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Documented:
    """One row of a table of settings.

    Attributes:
        kind: ``choice`` if the values are listed, otherwise the word in the column.
        spellings: canonical value -> all its spellings.
        text_prefixes: what may stand before a value and a dot.
        is_setting: whether the name is a setting of its own, which has a default.
        refused: listed values that are not supported.
        is_ignored: whether the key is known, but has no effect, whatever its value is.
    """

    section: str
    prefix: str
    name: str
    keys: tuple[str, ...]
    kind: str
    minimum: int | None = None
    maximum: int | None = None
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text_prefixes: tuple[str, ...] = ()
    is_setting: bool = True
    is_ignored: bool = False
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Document:
    text: str

    @cached_property
    def settings(self) -> tuple[Documented, ...]:
        return tuple(_settings(self.text))

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Kind of a value -> the rule."""
        table = self.text.partition("## How values are written")[2].partition("\n## ")[0]
        return {row[0]: row[1] for row in _rows(table)}

    def section(self, name: str) -> tuple[Documented, ...]:
        return tuple(setting for setting in self.settings if setting.section == name)

    @cached_property
    def true_and_false(self) -> tuple[frozenset[str], frozenset[str]]:
        """The words that mean true, and those that mean false."""
        true, false = self.kinds["bool"].split(";")
        return frozenset(words(true)), frozenset(words(false))

    @cached_property
    def units(self) -> Mapping[str, int]:
        """Unit of a count -> its factor."""
        listed = words(self.kinds["count"].partition(" units ")[2].partition(", if")[0])
        factors = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
        return {unit: factors[unit] for unit in listed}


def read_document(path: Path = PATH) -> Document:
    return Document(path.read_text(encoding="utf-8"))


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", text))


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _settings(text: str) -> Iterator[Documented]:
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        title = _TITLE.match(part.partition("\n")[0])
        if title is None:
            continue
        section = next(name for start, name in SECTIONS.items() if title[1].startswith(start))
        rows = _rows(part)
        assert next(rows) == ["setting", "keys", "values", "default", "meaning"]
        for cells in rows:
            yield _setting(section, title["prefix"] or "", *cells)


def _setting(section: str, prefix: str, name: str, keys: str, values: str, default: str, about: str) -> Documented:
    common: dict[str, Any] = {
        "section": section, "prefix": prefix, "name": name.strip("`"), "keys": words(keys),
        "is_setting": default != "–",
        "is_ignored": values == "any" and "refused" not in about,
        "refused": frozenset(re.findall(r"(\w+) is refused", about)),
    }  # fmt: skip
    values, _, prefixes = values.partition("; also after ")
    common["text_prefixes"] = words(prefixes)
    if not values.startswith("`"):
        match = _RANGE.fullmatch(values)
        assert match is not None, f"{name}: unknown values {values!r}"
        limits = {"minimum": match["low"], "maximum": match["high"]}
        return Documented(**common, kind=match["kind"], **{k: int(v) for k, v in limits.items() if v is not None})
    groups = [words(group) for group in values.split(", ")]
    spellings = {group[0]: tuple(dict.fromkeys(word.lower() for word in group)) for group in groups}
    return Documented(**common, kind="choice", spellings=spellings)
