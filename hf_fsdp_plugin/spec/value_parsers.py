"""Parses values into the types of their settings, with one function per kind of setting."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

import hf_fsdp_plugin.vocabulary as vocabulary
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.sources.config_tree import ObjectText, one_line
from hf_fsdp_plugin.sources.interface import Setting, SourceSettings
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.vocabulary import BLANKS, BY_NAME, FALSE_WORDS, TRUE_WORDS, SettingRow, look_up, value_key, word_of

MAX_INTEGER = 2**63 - 1
MAX_DIGITS = 40
_INTEGER = re.compile(r"([+-]?) (0|[1-9]\d*) (\.0+)? () ()", re.ASCII | re.VERBOSE)
_COUNT = re.compile(
    r"""([+-]?)
    (0|[1-9]\d* | [1-9]\d{0,2}(?:,\d{3})+ | [1-9]\d{0,2}(?:_\d{3})+)  # 1000, 1,000 or 1_000; 010 is octal in YAML 1.1
    (\.\d+)? (e[+-]?\d{1,3})? ([kmbgt]?)""",
    re.ASCII | re.VERBOSE,
)
UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_DEVICE = re.compile(r"0|[1-9]\d{0,4}|(?:gpu|mig)-[0-9a-z/-]+", re.ASCII)
"""A number, or the UUID of a GPU or of a part of one, as in ``CUDA_VISIBLE_DEVICES``."""


class InvalidValue(ValueError):
    """A value that is not valid for its setting: the expected values, the remedy and the code of the problem."""

    def __init__(self, expected: str, fix: str = "", *, code: str = "FSDP-E101") -> None:
        super().__init__(expected)
        self.expected, self.fix, self.code = expected, fix, code


def setting_to_json(value: Any) -> Any:
    """Return a value of a setting as JSON."""
    if isinstance(value, Mapping):
        return {str(key): setting_to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [setting_to_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no NaN and no infinity
    return value if value is None or isinstance(value, (str, int, float)) else str(value)  # such as a date of YAML


def parse_settings(source: SourceSettings) -> SourceSettings:
    """Return the settings of a source with typed values and its level, and a problem for each invalid value."""
    settings: list[Setting] = []
    problems: list[Problem] = []
    inactive: list[Problem] = []
    for setting in source.settings:
        row = BY_NAME.get(setting.name)  # None for internal names such as AUTO_WRAP
        try:
            value = setting.value if row is None else parse_value(row, setting.value)
        except InvalidValue as invalid:
            shown = one_line(repr(setting.value) if isinstance(setting.value, str) else str(setting.value))
            message = f"{setting.origin.spelling} is {shown}; expected {invalid.expected}."
            fix = invalid.fix or f"Correct {setting.origin.spelling}, or remove it."
            (inactive if setting.inactive else problems).append(setting.problem(invalid.code, message, fix))
            continue
        is_strategy = setting.name == "sharding.reshard" and isinstance(value, str)
        name = "sharding.strategy" if is_strategy else setting.name
        settings.append(replace(setting, name=name, value=value, level=source.level))
    if any(problem.code == "FSDP-E122" for problem in (*problems, *inactive)):
        # The product of the other axes is not the world size.
        settings = [setting for setting in settings if not setting.name.startswith("mesh.")]
    return SourceSettings(
        source=source.source,
        settings=settings,
        problems=[*source.problems, *problems],
        family=source.family,
        level=source.level,
        inactive_problems=[*source.inactive_problems, *inactive],
        enables_fsdp=any(setting.enables_fsdp for setting in source.settings),
    )


def parse_value(row: SettingRow, raw: Any) -> Any:
    """Return the typed value. Raises ``InvalidValue``."""
    return _PARSERS[row.kind](row, raw)


def _parse_bool(row: SettingRow, raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = _word(raw)
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    if unsupported := vocabulary.UNSUPPORTED_VALUES.get((row.name, word)):
        raise InvalidValue(f"true or false. {word} {unsupported.why}", unsupported.fix, code=unsupported.code)
    raise InvalidValue("true or false", _nearest_known(word, ("true", "false")))


def _parse_integer(row: SettingRow, raw: Any) -> int:
    return _parse_number(raw, _INTEGER, "an integer, such as 8", row.minimum)


def _parse_size(row: SettingRow, raw: Any) -> int | str:
    if _word(raw) in ("auto", "-1"):
        return "auto"
    try:
        return _parse_integer(row, raw)
    except InvalidValue as invalid:
        raise InvalidValue(f"auto, or {invalid.expected}") from None


def _parse_one(row: SettingRow, raw: Any) -> int:
    if _parse_number(raw, _INTEGER, "1") != 1:
        unsupported = vocabulary.UNSUPPORTED_VALUES[row.name, "above 1"]
        raise InvalidValue(f"1, {unsupported.why}", unsupported.fix, code=unsupported.code)
    return 1


def _parse_number(raw: Any, form: re.Pattern[str], expected: str, minimum: int | None = None) -> int:
    word = "" if isinstance(raw, bool) else _word(raw)
    if isinstance(raw, int) and word:
        number = Decimal(raw)
    elif isinstance(raw, float) and raw.is_integer():
        number = Decimal(int(raw))
    elif len(word) <= MAX_DIGITS and (match := form.fullmatch(word)) is not None:
        sign, digits, fraction, exponent, unit = match.groups(default="")
        number = Decimal(sign + re.sub("[,_]", "", digits) + fraction + exponent) * UNITS[unit]
    else:
        raise InvalidValue(expected)
    if abs(number) > MAX_INTEGER:
        raise InvalidValue(f"an integer of at most {MAX_INTEGER}")
    if number != number.to_integral_value():
        raise InvalidValue(expected)
    if minimum is not None and number < minimum:
        raise InvalidValue(f"an integer of at least {minimum}")
    return int(number)


def _parse_choice(row: SettingRow, raw: Any) -> Any:
    _word(raw)
    if (found := look_up(row.choices, raw, row.prefixes)) is not None:
        return int(found) if found.isdigit() else found
    forms = [value for value in row.choices if value != "auto"]
    known = [form for value, others in row.choices.items() for form in (value.lower(), *others) if not form.isdigit()]
    expected = f"{', '.join(forms[:-1])} or {forms[-1]}"
    if row.choices is vocabulary.STRATEGY_CHOICES:
        expected = f"{', '.join(forms)} or 1 to {len(forms)}"
    raise InvalidValue(expected, _nearest_known(value_key(raw, row.prefixes), known))


def _parse_reshard(row: SettingRow, raw: Any) -> bool | str:
    """Parse a bool, or the name or number of a strategy: ``accelerate to-fsdp2`` copies numbers to this key."""
    word = _word(raw)
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS or value_key(raw) == "no_reshard":
        return False
    if found := look_up(vocabulary.STRATEGY_CHOICES, raw, row.prefixes):
        return found
    forms = ("true", "false", *STRATEGIES)
    raise InvalidValue("true, false or a strategy", _nearest_known(value_key(raw, row.prefixes), forms))


def _parse_names(row: SettingRow, raw: Any) -> tuple[str, ...]:
    """Parse a name, names with commas, a list, or a Python list as text, which stock launchers put in variables."""
    expected = "a class name, a list of them, or several separated by commas"
    names: dict[str, None] = {}
    for item in raw if isinstance(raw, list) else [raw]:
        if not _is_text(item):
            raise InvalidValue(expected)
        text = vocabulary.without_pair(item.strip(BLANKS), ("[]", "()", "{}")).removesuffix(",")
        given = [vocabulary.without_pair(name.strip(BLANKS), vocabulary.QUOTES) for name in text.split(",")]
        if "" in given:
            raise InvalidValue(expected)
        names |= dict.fromkeys(given)
    return tuple(names)


def _parse_devices(row: SettingRow, raw: Any) -> str:
    """Parse ``all``, or numbers or UUIDs of GPUs as text with commas or as a list."""
    items = raw if isinstance(raw, list) else str(_word(raw)).split(",")
    devices = [_word(item) for item in items]
    if devices == ["all"]:
        return "all"
    expected = "all, or different numbers separated by commas, such as 0,1"
    if any(isinstance(item, bool) for item in (raw, *items)) or not all(map(_DEVICE.fullmatch, devices)):
        raise InvalidValue(expected)
    if len(set(devices)) < len(devices):
        raise InvalidValue(expected, f"Write {','.join(dict.fromkeys(devices))}.")
    written = [str(item).strip(BLANKS) for item in (raw if isinstance(raw, list) else str(raw).split(","))]
    return ",".join(written)


def is_class_name(name: str) -> bool:
    """Whether Python can have a class of this name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _parse_text(row: SettingRow, raw: Any) -> str:
    text = raw.strip(BLANKS) if _is_text(raw) else None
    if text is None or any(character in text for character in "\n\r\0"):
        raise InvalidValue("text in one line")
    return text


def _parse_mapping(row: SettingRow, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidValue("a mapping with keys and values")
    return raw


def _is_text(raw: Any) -> bool:
    return isinstance(raw, str) and not isinstance(raw, ObjectText)


def _word(raw: Any) -> str:
    if isinstance(raw, (list, dict)):
        raise InvalidValue("a single value, not a list or a mapping")
    return word_of(raw)


def _nearest_known(word: str, known: Iterable[str]) -> str:
    return vocabulary.did_you_mean(vocabulary.nearest_word(word[:MAX_DIGITS], known))


_PARSERS: Mapping[vocabulary.ValueKind, Callable[[SettingRow, Any], Any]] = {
    "bool": _parse_bool, "integer": _parse_integer, "size": _parse_size,
    "count": lambda row, raw: _parse_number(raw, _COUNT, "an integer, such as 100000000, 1e8 or 100M", row.minimum),
    "choice": _parse_choice, "names": _parse_names, "mapping": _parse_mapping, "any": lambda row, raw: raw,
    "reshard": _parse_reshard, "one": _parse_one, "mode": _parse_choice,
    "devices": _parse_devices, "text": _parse_text,
}  # fmt: skip
