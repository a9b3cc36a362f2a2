"""The rows that ranks share, and the file of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from hf_fsdp_plugin.metrics.rows import NUM_ROWS, JobRows, RankRows, Row, newest_rows, share_rows
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


def test_numbers_of_a_log_can_be_written_as_json() -> None:
    logs = {"loss": 1.5, "step": 3, "text": "a", "flag": True, "tensor": torch.tensor(2.0)}
    assert numbers_in(logs) == {"loss": 1.5, "step": 3, "tensor": 2.0}
    lost = {"loss": math.nan, "grad_norm": torch.tensor(math.inf), "gap": -math.inf}
    assert numbers_in(lost) == {"loss": "nan", "grad_norm": "inf", "gap": "-inf"}
    assert numbers_in({"many": torch.zeros(2)}) == {}


def test_machines_exchange_rows_of_the_same_step() -> None:
    store, machines = HashStore(), ["a", "a", "b", "b"]
    ranks = {rank: filled(0) for rank in range(4)}
    first, other = (JobRows(rank, {rank: ranks[rank], rank + 1: ranks[rank + 1]}, machines, lambda: store, 0.0)
                    for rank in (0, 2))  # fmt: skip
    found = []
    for step in range(1, 45):
        for rank, rows in ranks.items():
            if rank < 2 or step > 2:  # the other machine is late
                rows.add(Row(step=rows.count + 1, tokens=rank))
        other.newest()
        found.append(first.newest())
    steps = [{row.step for row in each.values()} for each in found]
    assert max(map(len, steps)) == 1
    assert sorted(set(map(frozenset, steps)) - {frozenset()}, key=min) == [{9}, {17}, {25}, {33}, {41}]
    assert {rank: row.tokens for rank, row in found[-1].items()} == {0: 0, 1: 1, 2: 2, 3: 3}


def test_machine_that_does_not_answer_delays_nobody() -> None:
    ranks = {0: filled(5)}
    job = JobRows(0, ranks, ["a", "b"], HashStore, 0.0)
    assert [job.newest() for _ in range(3)] == [{}, {}, {}]
