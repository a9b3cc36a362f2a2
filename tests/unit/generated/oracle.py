"""Decides from docs/settings.md alone whether a key and a value are accepted, and which value they set.

Nothing here is imported from the package: the tests compare its answers with these.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import yaml

from tests.unit.generated.settings_document import Document, Documented

BLANKS = " \t\r\n\f\v"
PATTERNS = ("wrap.ignored_modules", "precision.fp32_modules")
"""Settings that are regular expressions."""
NULL_WORDS = ("", "none", "null", "~")
"""Texts without content."""
WITHOUT_NULL = ("--set", "command line")
"""Sources that have no null; a text without content is refused there as in a file."""


@dataclass(frozen=True)
class Verdict:
    """What the document states about one value."""

    answer: Literal["accepted", "refused", "not set"]
    value: Any = None

    def __str__(self) -> str:
        if self.answer != "accepted":
            return self.answer
        try:
            return f"accepted as {self.value!r}"
        except ValueError:
            return "accepted as a number of thousands of digits"


REFUSED, NOT_SET = Verdict("refused"), Verdict("not set")


def accepted(value: Any) -> Verdict:
    return Verdict("accepted", value)


class Oracle:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.true, self.false = document.true_and_false
        self.units = document.units
        self._by_key = {(s.section, key): s for s in document.settings for key in s.keys}
        self._by_name = {s.name: s for s in reversed(document.settings)}

    def key(self, written: str, section: str) -> Documented | None:
        """The setting that a key means in a section; ``None`` if the key is not documented there."""
        plain = lower(written)
        if (named := self._by_name.get(plain)) is not None:
            return named if named.is_setting else None
        plain = plain.replace("-", "_").replace(" ", "_")
        for candidate in (plain, plain.removeprefix(self.prefix(section))):
            if found := self._by_key.get((section, candidate)):
                return found
        return None

    def name(self, written: str) -> Documented | None:
        return self._by_name.get(lower(written))

    def prefix(self, section: str) -> str:
        return self.document.section(section)[0].prefix

    def decide(self, setting: Documented, raw: Any, source: str = "config") -> Verdict:
        """What a value of a setting means in a source. ``raw`` is as YAML, JSON or Python have it."""
        if source == "environment" and isinstance(raw, str) and not raw.strip():
            return NOT_SET
        if setting.kind == "options":
            return self._options(setting, raw)
        if setting.is_ignored or (setting.kind == "section" and raw in (None, {})):
            return Verdict("accepted", raw)
        if raw is None:
            return REFUSED if source in WITHOUT_NULL else NOT_SET
        if isinstance(raw, str) and lower(raw) in NULL_WORDS and lower(raw) not in _all_spellings(setting):
            return NOT_SET if source == "environment" else REFUSED
        if (
            not isinstance(raw, (str, bool, int, float))
            and raw in ([], (), {})
            and setting.kind not in ("mapping", "any")
        ):
            return REFUSED
        return getattr(self, f"_{setting.kind}")(setting, raw)

    def _choice(self, setting: Documented, raw: Any) -> Verdict:
        text = text_of(raw, whole=True)
        if text is None:
            return REFUSED
        word = lower(text)
        before, dot, after = word.partition(".")
        if dot and before in {prefix.rstrip(".").lower() for prefix in setting.text_prefixes}:
            word = word if after.isdigit() else after
        word = re.sub("(?<=[a-z0-9])(-| +)(?=[a-z0-9])", "_", word) if re.search("[a-z]", word) else word
        for value, spellings in setting.spellings.items():
            if word in spellings:
                return REFUSED if value in setting.refused else accepted(int(value) if value.isdigit() else value)
        return REFUSED

    def _bool(self, setting: Documented, raw: Any) -> Verdict:
        word = lower(text_of(raw) or "")
        return accepted(word in self.true) if word in self.true | self.false else REFUSED

    def _flag(self, setting: Documented, raw: Any) -> Verdict:
        word = lower(text_of(raw) or "")
        verdict = accepted(True) if word in ("auto", "full") else self._bool(setting, raw)
        is_refused = setting.name.rpartition(".")[2] in self._by_name["launch.mixed_precision"].refused
        return REFUSED if is_refused and verdict.value else verdict

    def _integer(self, setting: Documented, raw: Any) -> Verdict:
        return self._in_range(setting, raw, re.compile(r"[+-]?(0|[1-9][0-9]*)(\.0+)?"))

    def _count(self, setting: Documented, raw: Any) -> Verdict:
        groups = r"0|[1-9][0-9]*|[1-9][0-9]{0,2}(,[0-9]{3})+|[1-9][0-9]{0,2}(_[0-9]{3})+"
        return self._in_range(setting, raw, re.compile(rf"[+-]?({groups})(\.[0-9]+)?(e[+-]?[0-9]{{1,3}})?[kmbgt]?"))

    def _in_range(self, setting: Documented, raw: Any, form: re.Pattern[str]) -> Verdict:
        number = self._number(raw, form)
        low, high = setting.minimum, setting.maximum
        if number is None or (low is not None and number < low) or (high is not None and number > high):
            return REFUSED
        return accepted(number)

    def _number(self, raw: Any, form: re.Pattern[str]) -> int | None:
        if isinstance(raw, bool):
            return None
        if isinstance(raw, int) or (isinstance(raw, float) and raw.is_integer()):
            return int(raw) if abs(raw) <= 2**63 - 1 else None
        word = lower(text_of(raw) or "")
        if len(word) > 40 or not form.fullmatch(word):
            return None
        unit = self.units.get(word[-1], 1)
        number = Fraction(re.sub("[,_a-df-z]", "", word)) * unit
        return int(number) if number.denominator == 1 and abs(number) <= 2**63 - 1 else None

    def _size(self, setting: Documented, raw: Any) -> Verdict:
        if lower(text_of(raw) or "") in ("auto", "-1") and setting.section != "distributed":
            return accepted("auto")
        return self._integer(setting, raw)

    def _one(self, setting: Documented, raw: Any) -> Verdict:
        verdict = self._integer(setting, raw)
        return verdict if verdict.value == 1 else REFUSED

    def _names(self, setting: Documented, raw: Any) -> Verdict:
        names: list[str] = []
        for item in raw if isinstance(raw, (list, tuple)) else [raw]:
            if not isinstance(item, str):
                return REFUSED
            text = item.strip(BLANKS)
            if text[:1] + text[-1:] in ("[]", "()", "{}"):
                text = text[1:-1].strip(BLANKS)
            for part in text.removesuffix(",").split(","):
                part = part.strip(BLANKS)
                if len(part) > 1 and part[0] == part[-1] and part[0] in "'\"":
                    part = part[1:-1].strip(BLANKS)
                if not part.isidentifier() or keyword.iskeyword(part):
                    return REFUSED
                names.append(part)
        return accepted(tuple(dict.fromkeys(names))) if names else REFUSED

    def _devices(self, setting: Documented, raw: Any) -> Verdict:
        if isinstance(raw, bool):
            return REFUSED
        items = list(raw) if isinstance(raw, (list, tuple)) else (text_of(raw) or "").split(",")
        texts = [(text_of(item) or "").strip(BLANKS) for item in items]
        if any(isinstance(item, bool) for item in items):
            return REFUSED
        if [lower(text) for text in texts] == ["all"]:
            return accepted("all")
        form = re.compile("0|[1-9][0-9]{0,4}|(gpu|mig)-[0-9a-z/-]+")
        valid = all(form.fullmatch(lower(text)) for text in texts) and len({lower(t) for t in texts}) == len(texts)
        return accepted(",".join(texts)) if valid and texts else REFUSED

    def _text(self, setting: Documented, raw: Any) -> Verdict:
        if not isinstance(raw, str) or re.search("[\n\r\0]", raw.strip(BLANKS)):
            return REFUSED
        try:
            re.compile(raw.strip(BLANKS) if setting.name in PATTERNS else "")
        except (re.error, RecursionError, OverflowError):
            return REFUSED
        return accepted(raw.strip(BLANKS))

    def _mapping(self, setting: Documented, raw: Any) -> Verdict:
        return accepted(raw) if isinstance(raw, Mapping) else REFUSED

    def _any(self, setting: Documented, raw: Any) -> Verdict:
        return accepted(raw)

    def _reshard(self, setting: Documented, raw: Any) -> Verdict:
        word = lower(text_of(raw) or "")
        if word in self.true | self.false:
            return accepted("full_shard" if word in self.true else "shard_grad_op")
        if word.replace("-", "_").replace(" ", "_") == "no_reshard":
            return accepted("shard_grad_op")
        return self._choice(self._by_name["sharding.strategy"], raw)

    def _section(self, setting: Documented, raw: Any) -> Verdict:
        if setting.name == "precision.policy" and not isinstance(raw, Mapping):
            return self._choice(self._by_name["precision.param"], raw)
        return accepted(raw) if isinstance(raw, Mapping) else REFUSED

    def _options(self, setting: Documented, raw: Any) -> Verdict:
        """What ``fsdp`` means. The value has the settings that it sets: ``{"launch.distributed_type": "NO"}``."""
        if raw is None:
            return NOT_SET
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        texts = [text_of(item) for item in items]
        if isinstance(raw, str):
            text = _unquoted(raw.strip(BLANKS))
            inner = text[1:-1] if text[:1] + text[-1:] == "[]" else None
            texts = [_unquoted(item.strip(BLANKS)) for item in inner.split(",")] if inner is not None else [text]
        if None in texts:
            return REFUSED
        words = [lower(word) for word in re.split(rf"[{BLANKS},]+", " ".join(map(str, texts))) if word]
        if not words or (len(words) == 1 and words[0] in self.false):
            return accepted({"launch.distributed_type": "NO"})
        return self._read_options([self._option(word) for word in words])

    def _option(self, word: str) -> str:
        before, dot, after = word.partition(".")
        prefixes = {prefix.lower() for prefix in self._by_name["sharding.strategy"].text_prefixes}
        is_prefix = dot and before + dot in prefixes and after not in self.true | self.false
        word = after if is_prefix else word
        return word.replace("-", "_")

    def _read_options(self, words: list[str]) -> Verdict:
        strategies = self._by_name["sharding.strategy"].spellings
        names = {s: name for name, group in strategies.items() for s in group if not s.isdigit()}
        found: dict[str, Any] = {"launch.distributed_type": "FSDP"}
        while words:
            length = next(
                (n for n in (4, 3, 2, 1) if "_".join(words[:n]) in {*names, "auto_wrap"} and n <= len(words)), 1
            )
            option, words = "_".join(words[:length]), words[length:]
            if option in names:
                if found.setdefault("sharding.strategy", names[option]) != names[option]:
                    return REFUSED
            elif option == "offload":
                found["offload.params"] = True
            elif option != "auto_wrap" and option not in self.true:
                return REFUSED
        return accepted(found)


def _unquoted(text: str) -> str:
    return text[1:-1].strip(BLANKS) if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _all_spellings(setting: Documented) -> set[str]:
    return {spelling for group in setting.spellings.values() for spelling in group}


def lower(text: str) -> str:
    """Text without blanks around it, with ASCII letters in lower case. Other text is not changed."""
    text = text.strip(BLANKS)
    return text.lower() if text.isascii() else text


def text_of(raw: Any, *, whole: bool = False) -> str | None:
    """The text of a value; ``None`` if it has none. With ``whole``, 1.0 is the text 1."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if whole and isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    if isinstance(raw, (int, float)):
        try:
            return str(raw)
        except ValueError:
            return None
    return None


def yaml_value(text: str) -> Any:
    """The value of a plain scalar in a YAML file: as in YAML 1.1, but numbers must be written in decimal."""
    try:
        value = yaml.safe_load(text)
    except ValueError:  # not a date of the calendar, or more digits than Python converts
        return text
    decimal = r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not re.fullmatch(decimal, text, re.I):
        return text
    return value if value is None or isinstance(value, (bool, int, float, str)) else text
