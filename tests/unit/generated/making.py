"""Makes keys and values: valid ones in every documented form, and others close to them or foreign to them.

Every function takes a ``random.Random``, so that the same code serves the long runs and the tests with hypothesis.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.unit.generated.settings_document import Documented

LOOKALIKES = {
    "a": "а", "c": "с", "e": "еé", "o": "оο０", "p": "р", "i": "іıİ", "k": "K", "s": "ſѕ", "d": "ԁ", "l": "ⅼ1",
    "_": "＿‿", "-": "‑–—", " ": "\u00a0\u2003", "1": "１¹①٠", "2": "２²٢", "3": "³३", "4": "４", "0": "０О",
    ".": "．․", ",": "‚，", "x": "х", "u": "υ", "t": "т",
}  # fmt: skip
"""Character -> characters that look like it, or that become it in lower or upper case."""
AFFIXES = (
    ".", "..", "-", "--", "_", "__", " ", ",", "'", '"', "[", "]", "(", ")", "{", "}", "0", "1", "x", "é", "\u200b",
    "\u00a0", "torch.", "not.", "no", "no_", "ShardingStrategy.", "StateDictType.", "fsdp_", "fsdp.", "%", "!", "#",
    "&a ", "*", "\\", "/", ":", ": ", "\n", "\t", "=", "true", "0x", "1e", "e1", "k", "M", "_000", ",000", ".0", ".5",
    "+", "null",
)  # fmt: skip
WORDS = (
    "", " ", "none", "None", "null", "NULL", "~", "true", "false", "True", "FALSE", "yes", "no", "on", "off", "y",
    "n", "t", "f", "auto", "default", "unset", "maybe", "0", "1", "2", "3", "-1", "+1", "00", "010", "1.0", "2.5",
    "1e1", "1e400", "1e-7", "nan", "inf", "-inf", ".nan", ".inf", "NaN", "Infinity", "0x10", "0b1", "0o7", "1_0",
    "1,0", "2,4", "0,1,2", "8:12", "²", "१", "1k", "1K", "1.5M", "0.1B", "100_000", "1,000,000", "9" * 20, "9" * 41,
    "9" * 400, "2024-99-99", "2024-01-01", "[]", "{}", "[1]", "{a: 1}", "['A', 'B']", "[A)", "'x'", '"full_shard"',
    "${X}", "$(x)", "<x>", "!!int 1", "@x", "`x`", "full_shard auto_wrap", "torch", "torch.", ".", "-", "_",
    "None.None", "class", "False", "A,,B", ",", "A B", "a.b.C", "not an ip!!", "10.0.0.1", "256.1.1.1", "::1",
    "host:29500", "-host", "all", "0,0", "a,b", "gpu-1", "warp9", "(", "*", "x" * 300, "\x00", "a\nb", "\ud800", "🙂",
    "ｆｕｌｌ", "\u202etrue", "\ufeffbf16",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 4, 5, 6, 8, -1, -2, 100, 65535, 65536, 2**31, 2**63 - 1, 2**63, -(2**63), 10**40, 10**4299, 10**5000,
    0.0, 1.0, 2.0, -0.0, -1.0, 0.1, 2.5, 1e8, 1e18, 1e19, 1e300, -1e300, float("nan"), float("inf"), float("-inf"),
    5e-324,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, [], {}, (), [[]], [{}], [None], [""], ["true"], [1], [1, 2], ["A", "B"], ["A", None], {"a": 1},
    {"": ""}, {"a": {"b": []}}, {1: 2}, {None: None}, {"fsdp_version": 2}, b"", b"true", b"\xff", bytearray(b"1"), 1j,
    {"A", "B"}, frozenset(), range(3), ["x"] * 50, [[[[1]]]],
)  # fmt: skip
DEEP: list[Any] = []
for _ in range(60):
    DEEP = [DEEP]


def pick(random: Random, items: Sequence[Any]) -> Any:
    return items[random.randrange(len(items))]


def written_key(random: Random, setting: Documented, *, prefixed: bool | None = None) -> str:
    """A key of a setting in one of the documented forms; with or without prefix if ``prefixed`` is given."""
    key = pick(random, setting.keys)
    if prefixed or (prefixed is None and setting.prefix and random.random() < 0.7):
        key = setting.prefix + key
    if random.random() < 0.1:
        key = pick(random, (key.upper(), key.title()))
    if random.random() < 0.1:
        key = "".join(pick(random, "-_") if character == "_" else character for character in key)
    return key


def valid(random: Random, setting: Documented) -> Any:
    """A value that is meant to be accepted."""
    value = _VALID[setting.kind](random, setting)
    if isinstance(value, str) and random.random() < 0.1:
        value = pick(random, (" ", "\t", "  ")) * random.randrange(2) + value + " " * random.randrange(2)
    return value


def mutated(random: Random, text: str) -> str:
    """The text with one to three changes."""
    for _ in range(1 + (random.random() < 0.3) + (random.random() < 0.1)):
        place = random.randrange(len(text) + 1)
        change = random.randrange(9)
        if change == 0:
            text = text[:place] + text[place + 1 :]
        elif change == 1:
            text = text[:place] + pick(random, string.printable) + text[place:]
        elif change == 2:
            text = text[:place] + pick(random, string.printable) + text[place + 1 :]
        elif change == 3:
            text = pick(random, AFFIXES) + text
        elif change == 4:
            text = text + pick(random, AFFIXES)
        elif change == 5:
            text = text[:place] + pick(random, AFFIXES) + text[place:]
        elif change == 6:
            found = [i for i, character in enumerate(text) if character.lower() in LOOKALIKES]
            if found:
                place = pick(random, found)
                text = text[:place] + pick(random, LOOKALIKES[text[place].lower()]) + text[place + 1 :]
        elif change == 7:
            text = text[:place] + text[place : place + 2][::-1] + text[place + 2 :]
        else:
            text = pick(random, (text + text, f"{text} {text}", text[::-1], f"'{text}'", f"[{text}]", f"<{text}: 1>"))
    return text


def value(random: Random, setting: Documented, settings: Sequence[Documented]) -> Any:
    """Any value: valid, close to a valid one, or foreign."""
    chance = random.random()
    if chance < 0.4:
        return valid(random, setting)
    if chance < 0.7:
        near = valid(random, setting)
        if isinstance(near, (list, tuple)) and near:
            near = list(near)
            near[random.randrange(len(near))] = mutated(random, str(near[0]))
            return near
        if isinstance(near, (int, float)) and not isinstance(near, bool) and random.random() < 0.3:
            return pick(random, (-near, near + 1, near - 1, near * 10, near / 2, near + 0.5, [near], {near: near}))
        return mutated(random, str(near))
    if chance < 0.85:
        return pick(random, WORDS)
    if chance < 0.9:
        return pick(random, NUMBERS)
    if chance < 0.95:
        return valid(random, pick(random, settings))
    return DEEP if chance > 0.998 else pick(random, OTHERS)


def _choice(random: Random, setting: Documented) -> Any:
    word = pick(random, pick(random, list(setting.spellings.values())))
    if word.isdigit():
        return pick(random, (word, int(word), float(word)))
    if word in ("true", "false") and random.random() < 0.5:
        return word == "true"
    word = "".join(pick(random, "__- ") if c == "_" and word[0] != "_" else c for c in word)
    if setting.text_prefixes and random.random() < 0.2:
        word = pick(random, setting.text_prefixes).rstrip(".") + "." + word
    return _case(random, word)


def _case(random: Random, word: str) -> str:
    how = random.randrange(4)
    return (word, word.upper(), word.title(), "".join(pick(random, (c, c.upper())) for c in word))[how]


def _bool(random: Random, setting: Documented) -> Any:
    word = pick(random, ("true", "yes", "on", "1", "false", "no", "off", "0"))
    if word in "10":
        return pick(random, (word, int(word)))
    return pick(random, (word in ("true", "yes", "on"), _case(random, word)))


def _integer(random: Random, setting: Documented) -> Any:
    low = setting.minimum or 0
    number = low + pick(random, (random.randrange(10), random.randrange(10**4), random.randrange(2**63 - 10)))
    if setting.maximum is not None:
        number = min(number, setting.maximum)
    return pick(random, (number, number, str(number), f"+{number}", f"{number}.0"))


def _count(random: Random, setting: Documented) -> Any:
    number = random.randrange(1, 1000)
    text = pick(
        random,
        ("{}", "{}k", "{}K", "{}M", "{}b", "{}G", "{}t", "{}e3", "{}E+6", "{},000", "{}_000_000", "{}.5k", "{}.25e6"),
    )
    return pick(random, (number, number * 10**6, float(number), text.format(number), text.format(number)))


def _size(random: Random, setting: Documented) -> Any:
    return pick(random, ("auto", "AUTO", -1, "-1")) if random.random() < 0.2 else _integer(random, setting)


def _names(random: Random, setting: Documented) -> Any:
    names = [pick(random, "ABTxé") + pick(random, ("Layer", "Block", "_1", "")) for _ in range(random.randrange(1, 4))]
    form = random.randrange(5)
    return (names, ",".join(names), ", ".join(names) + ",", str(names), tuple(names))[form]


def _devices(random: Random, setting: Documented) -> Any:
    numbers = random.sample(range(16), random.randrange(1, 4))
    return pick(random, ("all", "ALL", ",".join(map(str, numbers)), numbers, numbers[0], "GPU-1a2b-3c", ["0", "1"]))


_VALID = {
    "choice": _choice, "bool": _bool, "integer": _integer, "count": _count, "size": _size, "names": _names,
    "devices": _devices,
    "one": lambda random, setting: pick(random, (1, "1", 1.0, "1.0", "+1")),
    "text": lambda random, setting: pick(random, (".*lora.*", "x", r"a\.b", "(a|b)+$", "[0-9]")),
    "mapping": lambda random, setting: pick(random, ({}, {"a": 1}, {"a": {"b": [1]}})),
    "any": lambda random, setting: pick(random, (1, "x", {"a": 1}, ["x"], True)),
    "reshard": lambda random, setting: pick(random, (True, False, "true", "FULL_SHARD", 2, "hybrid_shard")),
    "section": lambda random, setting: pick(random, ({}, {"a": 1}, "bf16")),
    "flag": lambda random, setting: pick(random, (_bool(random, setting), "auto", "full")),
    "options": lambda random, setting: options(random),
}  # fmt: skip
"""Kind of a value -> a function that makes a valid one."""


def options(random: Random) -> Any:
    """A value of ``fsdp``: options in any order and form."""
    words = [pick(random, ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"))]
    words += [word for word in ("auto_wrap", "offload") if random.random() < 0.5]
    random.shuffle(words)
    words = [_case(random, word) for word in words]
    return pick(random, (" ".join(words), ",".join(words), ", ".join(words), words, True, False, "true", ""))
