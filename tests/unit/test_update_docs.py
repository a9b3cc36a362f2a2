"""The generated documents in docs/ are up to date."""

from __future__ import annotations

import re

import pytest

from scripts import pictures, update_docs


def test_generated_documents_are_up_to_date() -> None:
    stale = {path.name for path in update_docs.outdated()}
    assert not stale, "run: python -m scripts.update_docs"
    assert "[FSDP-E701](#fsdp-e701)" in update_docs.problems()


def test_pictures_are_up_to_date() -> None:
    assert not pictures.outdated(), "run: python -m scripts.pictures"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_small_and_in_a_document(name: str) -> None:
    path = pictures.FOLDER / f"{name}.png"
    assert 10_000 < path.stat().st_size < 150_000 and path.read_bytes().startswith(b"\x89PNG")
    texts = [document.read_text(encoding="utf-8") for document in update_docs.DOCS.glob("*.md")]
    assert sum(len(re.findall(rf"!\[[^\]]+\]\(pictures/{name}\.png\)", text)) for text in texts) == 1
