"""The list of functions that no test executes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import uncovered


def region(statements: int, covered: int) -> dict[str, dict[str, int]]:
    return {"summary": {"num_statements": statements, "covered_lines": covered}}


def test_reasons_of_functions_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = {
        "": region(9, 9),
        "used": region(3, 1),
        "A.old": region(2, 0),
        "new": region(2, 0),
        "doc": region(0, 0),
    }
    (tmp_path / "coverage.json").write_text(json.dumps({"files": {"a.py": {"functions": functions}}}))
    out = tmp_path / "uncovered.json"
    out.write_text(json.dumps({"uncovered": {"a.py::A.old": "needs a GPU", "a.py::removed": "was for torch 2.10"}}))
    monkeypatch.setattr(sys, "argv", ["uncovered", str(tmp_path / "coverage.json"), "--write", "--out", str(out)])
    assert uncovered.main() == 0
    assert "2 of 3 functions are not executed, 1 without a reason" in capsys.readouterr().out
    assert json.loads(out.read_text())["uncovered"] == {"a.py::A.old": "needs a GPU", "a.py::new": ""}
