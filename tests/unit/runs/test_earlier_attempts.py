"""What machines know of the attempts before, from files as ranks leave them, and what they agree on."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.runs.attempts import Restarts
from hf_fsdp_plugin.runs.identity import RunIdentity, agree_on_attempts, keep_attempts, read_attempts


def failure(name: str = "RuntimeError") -> dict[str, Any]:
    how = {"kind": "exception", "type": name, "message": f"{name}: no", "frames": [], "traceback": "", "time": 1.0}
    return how


class Machine:
    """A machine that starts its ranks again and again."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        self.run, self.number = folder / f"machine_{number}", number
        self.starts, self.folder = 0, folder

    def start(self, attempt: int) -> Restarts:
        """Return what the machine knows in an attempt."""
        self.folder = self.run / f"{attempt}-{self.starts}"
        self.folder.mkdir(parents=True)
        self.starts += 1
        return read_attempts(self.folder, RunIdentity(id=f"run{self.number}", max_restarts=5, attempt=attempt))

    def leave(self, rank: int, how: dict[str, Any] | None = None, *, before: int = 0, steps: int = 0) -> RankFiles:
        """Leave the files of a rank that has ended."""
        files = RankFiles(self.folder / f"rank_{rank}")
        files.process.touch()
        files.calls.write_bytes(struct.pack("10Q", 3, 0, 0, 0, 0, 0, 0, steps, 9, before))
        if how is not None:
            files.failure.write_text(json.dumps(how))
        return files

    def agree(self, *of_machines: Restarts, attempt: int) -> Restarts:
        agreed = agree_on_attempts(of_machines, attempt)
        keep_attempts(self.folder, agreed)
        return agreed


def texts(restarts: Restarts) -> list[str]:
    return [each.failure for each in restarts.failures]


def test_steps_of_a_killed_rank_are_counted(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.agree(machine.start(0), attempt=0).count == 0
    machine.leave(0, failure(), steps=7)
    machine.leave(1, steps=8)
    known = machine.agree(machine.start(1), attempt=1)
    assert texts(known) == ["rank 0: RuntimeError: no"] and known.max_restarts == 5
    machine.leave(0, before=6, steps=3)
    known = machine.agree(machine.start(2), attempt=2)
    assert texts(known) == ["rank 0: RuntimeError: no", "rank 0: ended without an error record"]
    assert [(each.began, each.steps) for each in known.failures] == [(0, 8), (6, 9)]
    assert known.lost_steps(began=9) == [2, 0]
    assert [path.name for path in machine.run.iterdir()] == ["2-2"], "the files of earlier attempts are removed"


@pytest.mark.parametrize("attempt", [0, 2])
def test_attempts_without_files_are_counted(tmp_path: Path, attempt: int) -> None:
    machine = Machine(tmp_path)
    assert machine.agree(machine.start(attempt), attempt=attempt).count == attempt


def test_attempt_that_has_not_agreed_is_counted(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for attempt in range(3):
        known = machine.start(attempt)
        assert texts(known) == ["rank 0: RuntimeError: no"] * attempt
        machine.leave(0, failure())


def test_machine_that_was_in_most_attempts_is_used(tmp_path: Path) -> None:
    old, new = Machine(tmp_path, 1), Machine(tmp_path, 0)
    old.agree(old.start(0), attempt=0)
    old.leave(2, failure("ValueError"), steps=4)
    known = old.agree(new.start(0), old.start(0), attempt=0)
    assert known.run_id == "run1" and texts(known) == ["rank 2: ValueError: no"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"run_id": "a"}'])
def test_damaged_files_do_not_end_the_training(tmp_path: Path, content: str) -> None:
    machine = Machine(tmp_path)
    machine.agree(machine.start(0), attempt=0)
    files = machine.leave(0)
    files.restarts.write_text(content)
    files.failure.write_text(content)
    assert machine.start(1).count == 1


def test_folder_that_is_gone_does_not_end_the_training(tmp_path: Path) -> None:
    assert read_attempts(tmp_path / "gone" / "0-0", RunIdentity(id="a")) == Restarts(run_id="a")
    keep_attempts(tmp_path / "gone" / "0-0", Restarts())
