"""Documents name files, tests and codes that exist, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_named_python_files_exist(name: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / name).read_text(encoding="utf-8"))
    folders = (ROOT, ROOT / "hf_fsdp_plugin", ROOT / "hf_fsdp_plugin" / "integrations")
    assert [file for file in named if not any((folder / file).is_file() for folder in folders)] == ["private.py"] * (
        named.count("private.py")
    )


def test_compatibility_table_names_existing_tests() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8"))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "gloo").glob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_readme_has_fewer_than_1000_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 1000


def test_test_names_have_at_most_60_characters() -> None:
    names = re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py")), re.M)
    assert [name for name in names if len(name) > 60] == []
