"""Every problem code is documented, and every documented code is used and tested."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import hf_fsdp_plugin
from hf_fsdp_plugin.problems import AREAS, CODE
from hf_fsdp_plugin.tools.explain.verb import parse_page, read_entries

PACKAGE = Path(hf_fsdp_plugin.__file__).parent
TESTS = Path(__file__).parents[1]
ENTRY = re.compile(r"(?s)(?!Example:)\S.*?\n\nExample:\n\n```\w+\n.+?\n```\n.*\nRemedy: \S.*")


def codes_in(folder: Path) -> set[str]:
    files = [path for path in folder.rglob("*.py") if path.name not in ("explain.py", Path(__file__).name)]
    files += folder.glob("vocabulary.yaml")
    return {found[0] for path in files for found in CODE.finditer(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("area", sorted(AREAS.values()))
def test_page_entries_have_meaning_example_remedy(area: str) -> None:
    text = (PACKAGE / "problem_pages" / f"{area}.md").read_text(encoding="utf-8")
    entries = parse_page(text, area)
    assert len(entries) == len(re.findall(r"(?m)^## ", text)), "a heading is not '## FSDP-X000: title'"
    assert [entry.code[-3:] for entry in entries] == sorted(entry.code[-3:] for entry in entries)
    for entry in entries:
        assert AREAS[entry.code[-3]] == area, entry.code
        assert ENTRY.fullmatch(entry.text), entry.code


def test_code_number_has_one_letter() -> None:
    numbers = Counter(code[-3:] for code in codes_in(PACKAGE) | set(read_entries()))
    assert {number for number, count in numbers.items() if count > 1} == set()


def test_every_code_is_documented_and_every_entry_is_used() -> None:
    assert codes_in(PACKAGE) ^ set(read_entries()) == set()


def test_every_code_is_in_a_test() -> None:
    assert set(read_entries()) - codes_in(TESTS) == set()
