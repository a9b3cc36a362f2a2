"""Formatting of counts, sizes, lists of names and tables."""

import pytest

from hf_fsdp_plugin.text import (
    format_bytes,
    format_count,
    format_memory,
    format_names,
    format_table,
    plural,
    shorten,
    truncate_lines,
)
from hf_fsdp_plugin.tools.common import wrap_items


@pytest.mark.parametrize(
    ("num_bytes", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1000 B"),
        (1024, "1.02 kB", "1.0 KiB"),
        (999_999, "1 MB", "976.6 KiB"),
        (538_234_880, "538 MB", "513.3 MiB"),
        (1024**3 - 1, "1.07 GB", "1.0 GiB"),
        (2 * 10**18, "2000 PB", "1818989.4 TiB"),
    ],
)
def test_format_bytes_uses_decimal_or_binary_units(num_bytes, decimal, binary):
    assert (format_bytes(num_bytes), format_memory(num_bytes)) == (decimal, binary)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (3_542_016, "3.54 M"), (999_700, "1000 k"), (7 * 10**9, "7 B")]
)
def test_format_count_has_three_digits(count, text):
    assert format_count(count) == text


def test_format_names_counts_the_rest():
    assert format_names([]) == ""
    assert format_names(["a", "b"], limit=2) == "a, b"
    assert format_names(range(7)) == "0, 1, 2, 3 and 3 more"


def test_format_table_aligns_columns():
    rows = [("name", "size", "state"), ("a", "10", "kept"), ("bcdef", "9", "")]
    assert format_table(rows).splitlines() == ["name   size  state", "a      10    kept", "bcdef  9"]
    assert format_table(rows, right={1}).splitlines()[1:] == ["a        10  kept", "bcdef     9"]


def test_plural_depends_on_count():
    assert [plural(n, "rank") for n in (0, 1, 2, 1024)] == ["0 ranks", "1 rank", "2 ranks", "1,024 ranks"]
    assert plural(2, "entry", "entries") == "2 entries"


def test_shorten_keeps_both_ends():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefghij", 6) == "ab…hij"


def test_wrap_items_breaks_between_items_only():
    assert wrap_items(["a 1", "bb 2", "c 3"], 10) == ["a 1, bb 2,", "c 3"]
    assert wrap_items(["longer than the width"], 10) == ["longer than the width"]
    assert wrap_items(["a", "b"], 7, label="all: ") == ["all: a,", "     b"]
    assert wrap_items([], 10) == []


def test_truncate_lines_counts_the_rest():
    assert truncate_lines(["  a", "  b"], 2) == ["  a", "  b"]
    assert truncate_lines("abc", 1) == ["a", "  … and 2 more"]
