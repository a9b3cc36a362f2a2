"""The rows that ranks share, and the file of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.metrics.rows import NUM_ROWS, RankRows, Row, newest_rows, share_rows
from hf_fsdp_plugin.metrics.run_file import RUN_FILE, RunFile, numbers_in


def filled(num_rows: int) -> RankRows:
    rows = share_rows(0, ["a"])[0]
    for step in range(num_rows):
        rows.add(Row(step=step + 1, forward=step / 2))
    return rows


def test_ranks_are_compared_at_their_newest_common_step() -> None:
    ranks = {0: filled(NUM_ROWS + 7), 1: filled(NUM_ROWS + 5)}
    found = newest_rows(ranks)
    assert {row.step for row in found.values()} == {NUM_ROWS + 5}
    assert found[0] == found[1] == Row(step=NUM_ROWS + 5, forward=(NUM_ROWS + 4) / 2)


def test_ranks_without_a_row_have_no_common_step() -> None:
    assert newest_rows({0: filled(3), 1: filled(0)}) == {}
    assert newest_rows({}) == {}


def test_rows_have_no_file_after_they_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    rows = share_rows(0, ["a", "b"])
    assert list(rows) == [0]
    assert not list(tmp_path.iterdir())


def test_run_file_gets_one_object_a_line(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "new")
    file.write("start", world_size=2, machines=["a"])
    file.write("log", step=1, loss=0.5)
    lines = [json.loads(line) for line in (tmp_path / "new" / RUN_FILE).read_text().splitlines()]
    assert [each.pop("time") > 0 for each in lines] == [True, True]
    assert lines == [
        {"event": "start", "world_size": 2, "machines": ["a"]},
        {"event": "log", "step": 1, "loss": 0.5},
    ]


def test_run_file_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    file = RunFile(tmp_path / "file")
    file.write("start")
    file.write("log")
    assert capsys.readouterr().err.count("cannot write") == 1


def test_log_entries_that_json_lacks_are_left_out() -> None:
    logs = {"loss": 1.5, "step": 3, "nan": math.nan, "text": "a", "flag": True, "tensor": torch.tensor(2.0)}
    assert numbers_in(logs) == {"loss": 1.5, "step": 3, "tensor": 2.0}
    assert numbers_in({"many": torch.zeros(2)}) == {}
