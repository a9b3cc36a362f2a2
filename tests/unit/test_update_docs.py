"""The generated documents in docs/ are up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_generated_documents_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import update_docs

    stale = {path.name for path in update_docs.outdated()}
    assert not stale, "run: python scripts/update_docs.py"
    assert "[FSDP-E701](#fsdp-e701)" in update_docs.problems()
    del sys.modules["update_docs"]
