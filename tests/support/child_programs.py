"""Lines that run at the start of child processes."""

from __future__ import annotations

from pathlib import Path

import pytest


def in_children(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Run lines at the start of each Python process that this one starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import os, signal, sys, time\n{program}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # the folder is compared before and after
