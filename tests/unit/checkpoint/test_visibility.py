"""Names that another machine has created, and that this machine sees later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint import folders
from hf_fsdp_plugin.problems import CheckpointError


def test_delayed_name_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client of NFS, which remembers that a name did not exist until the folder is read."""
    path, listed = tmp_path / "checkpoint-4", []
    exists, listdir = Path.exists, os.listdir

    def listing(folder: Path) -> list[str]:
        listed.append(Path(folder))
        return listdir(folder)

    path.mkdir()
    monkeypatch.setattr(Path, "exists", lambda self: exists(self) and (self != path or len(listed) > 2))
    monkeypatch.setattr(os, "listdir", listing)
    folders.check_visible(path, "created")
    assert listed == [tmp_path] * 3


def test_name_that_stays_invisible_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folders, "TIMEOUT", 0.05)
    monkeypatch.setattr(folders, "_ANNOUNCED", 0.02)
    with pytest.raises(CheckpointError, match=r"rank 0 created .*checkpoint-4, but this rank cannot see it.*FSDP-E405"):
        folders.check_visible(tmp_path / "absent" / "checkpoint-4", "created")
    assert capsys.readouterr().err.count("checkpoint-4, which rank 0 sees, for up to 0.05 seconds") == 1
