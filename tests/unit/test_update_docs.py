"""The generated documents in docs/ are up to date."""

from __future__ import annotations

from scripts import update_docs


def test_generated_documents_are_up_to_date() -> None:
    stale = {path.name for path in update_docs.outdated()}
    assert not stale, "run: python -m scripts.update_docs"
    assert "[FSDP-E701](#fsdp-e701)" in update_docs.problems()
