"""Parses values into the types of their settings, with one function per kind of setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

from hf_fsdp_plugin.sources.tree import shorten
from hf_fsdp_plugin.spellings import FALSE_WORDS, TRUE_WORDS, look_up, value_key, word_of
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import STRATEGY_CHOICES, Kind, Row

MAX_INTEGER = 2**63 - 1
_INTEGER = re.compile(
    r"""([+-]?)
    (0|[1-9]\d* | [1-9]\d{0,2}(?:,\d{3})+ | [1-9]\d{0,2}(?:_\d{3})+)  # 1000, 1,000 or 1_000; 010 is octal in YAML 1.1
    (\.\d*)? (e[+-]?\d{1,3})? ([kmbgt]?)""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
LARGE: Final = frozenset({"wrap.min_num_params"})
"""Settings whose numbers are often written as 1e8 or 100M."""
UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


class NoValue(Exception):
    """The text means null, for example ``None`` in an environment variable."""


class InvalidValue(ValueError):
    """A value that is not valid for its setting: the expected values, the remedy and the code of the problem."""

    def __init__(self, expected: str, fix: str = "", *, code: str = "FSDP-E101") -> None:
        super().__init__(expected)
        self.expected, self.fix, self.code = expected, fix, code


def parse_value(row: Row, raw: Any) -> Any:
    """Return the typed value. Raises ``InvalidValue``, or ``NoValue`` if the text means null."""
    return _PARSERS[row.kind](row, raw)


def _bool(row: Row, raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = _word(raw)
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    _raise_if_null(word)
    raise InvalidValue("true or false", _did_you_mean(word, ("true", "false")))


def _integer(row: Row, raw: Any) -> int:
    number = _number(raw, "an integer, such as 100000000, 1e8 or 100M" if row.name in LARGE else "an integer")
    if row.minimum is not None and number < row.minimum:
        raise InvalidValue(f"an integer of at least {row.minimum}")
    return number


def _size(row: Row, raw: Any) -> int | str:
    word = _word(raw)
    if word in ("auto", "-1"):
        return "auto"
    try:
        return _integer(row, raw)
    except InvalidValue as invalid:
        raise InvalidValue(f"auto, or {invalid.expected}") from None


def _one(row: Row, raw: Any) -> int:
    number = _number(raw, "1")
    if number != 1:
        raise InvalidValue(
            "1, because the plugin supports data parallelism only (replicate × shard)",
            "Set it to 1, or train this model without the plugin.",
            code="FSDP-E122",
        )
    return number


def _number(raw: Any, expected: str) -> int:
    if isinstance(raw, bool):
        raise InvalidValue(expected)
    if isinstance(raw, int):
        number = Decimal(raw)
    else:
        word = _word(raw)
        _raise_if_null(word)
        match = _INTEGER.fullmatch(word)
        if match is None or len(word) > 40:
            raise InvalidValue(expected)
        sign, digits, fraction, exponent, unit = match.groups(default="")
        number = Decimal(sign + re.sub("[,_]", "", digits) + fraction + exponent) * UNITS[unit.lower()]
    if abs(number) > MAX_INTEGER:
        raise InvalidValue(f"an integer of at most {MAX_INTEGER}")
    if number != number.to_integral_value():
        raise InvalidValue(expected)
    return int(number)


def _choice(row: Row, raw: Any) -> Any:
    found = look_up(row.choices, raw)
    if found is not None:
        return int(found) if found.isdigit() else found
    word = _word(raw)
    _raise_if_null(word)
    forms = [value for value in row.choices if value not in ("auto", "fp8")]  # fp8 is refused with its own reason
    if row.choices is STRATEGY_CHOICES:
        raise InvalidValue(f"{', '.join(forms)} or 1 to {len(forms)}", _nearest(value_key(raw), row.choices, forms))
    raise InvalidValue(_or(forms), _nearest(value_key(raw), row.choices, _spellings(row.choices)))


def _mode(row: Row, raw: Any) -> str:
    mode = str(_choice(row, raw))
    if mode == "fp8":
        raise InvalidValue(
            "no, bf16 or fp16. fp8 is implemented inside the model (torchao, TransformerEngine), not by FSDP",
            "Set mixed_precision: bf16.",
            code="FSDP-E121",
        )
    return mode


def _reshard(row: Row, raw: Any) -> bool | str:
    """Parse a bool, or the name or number of a strategy: ``accelerate to-fsdp2`` copies numbers to this key."""
    word = value_key(raw)
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS or word == "no_reshard":
        return False
    if found := look_up(STRATEGY_CHOICES, raw):
        return found
    _raise_if_null(word)
    forms = ("true", "false", *STRATEGIES)
    raise InvalidValue("true, false or a strategy", _did_you_mean(word, forms))


def _names(row: Row, raw: Any) -> tuple[str, ...]:
    """Parse a name, names with commas, a list, or a Python list as text, which stock launchers put in variables."""
    items = raw if isinstance(raw, list) else [raw]
    names: dict[str, None] = {}
    for item in items:
        if not isinstance(item, str):
            raise InvalidValue("a class name, a list of them, or several separated by commas")
        text = item.strip()
        if text.startswith(("[", "{", "(")) and text.endswith(("]", "}", ")")):
            text = text[1:-1]
        for name in text.split(","):
            if clean := name.strip().strip("'\"").strip():
                names[clean] = None
    if not names or list(names) in (["None"], ["null"]):
        raise NoValue
    return tuple(names)


def _text(row: Row, raw: Any) -> str:
    if isinstance(raw, dict):
        raise InvalidValue("text")
    text = ",".join(str(item) for item in raw) if isinstance(raw, list) else str(raw).strip()
    if isinstance(raw, bool):
        text = text.lower()
    _raise_if_null(text.lower())
    if any(character in text for character in "\n\r\0"):
        raise InvalidValue("a single line of text")
    return text


def _mapping(row: Row, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidValue("a mapping with keys and values")
    return raw


def _is_number(word: str) -> bool:
    digits = word[1:] if word.startswith(("+", "-")) else word
    return digits.isascii() and digits.replace(".", "", 1).isdigit()


def _word(raw: Any) -> str:
    if isinstance(raw, (list, dict)):
        raise InvalidValue("a single value, not a list or a mapping")
    try:
        return word_of(raw)
    except ValueError:  # the integer has more digits than Python converts to text
        raise InvalidValue("a number of fewer digits") from None


def _raise_if_null(word: str) -> None:
    if word in ("none", "null", ""):
        raise NoValue


def _spellings(choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [form for value, others in choices.items() for form in (value.lower(), *others) if not form.isdigit()]


def _nearest(word: str, choices: Mapping[str, tuple[str, ...]], known: Any) -> str:
    """Return the nearest number of the choices for a number, and the most similar spelling for text."""
    numbers = sorted(int(way) for value, others in choices.items() for way in (value, *others) if way.isdigit())
    if not numbers or not _is_number(word):
        return _did_you_mean(word, known)
    number = float(word)
    return f"Did you mean {min(numbers, key=lambda choice: abs(choice - number))}?"


def _did_you_mean(word: str, known: Any) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {nearest[0]}?" if nearest else ""


def _or(forms: list[str]) -> str:
    return forms[0] if len(forms) == 1 else f"{', '.join(forms[:-1])} or {forms[-1]}"


_PARSERS: Mapping[Kind, Callable[[Row, Any], Any]] = {
    "bool": _bool, "integer": _integer, "size": _size, "choice": _choice, "names": _names, "text": _text,
    "mapping": _mapping, "any": lambda row, raw: raw, "reshard": _reshard, "one": _one, "mode": _mode,
}  # fmt: skip


def shown(raw: Any) -> str:
    """Return a value as text for messages. Strings are quoted."""
    return shorten(repr(raw)) if isinstance(raw, str) else shorten(str(raw))
