"""A checkpoint of two ranks, and the folder to merge it into."""

from __future__ import annotations

from pathlib import Path

import pytest
from merge_inputs import save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = save(tmp_path / "run" / "checkpoint-1")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "merged"
