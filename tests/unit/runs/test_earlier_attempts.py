"""What machines know of the attempts before, from files as ranks leave them, and what they agree on."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles
from hf_fsdp_plugin.runs.identity import (
    Offer,
    RunIdentity,
    make_offer,
    merge_offers,
    remember_run,
)
from hf_fsdp_plugin.runs.restart_policy import Restarts

KILLED = "ended without an error record"
CRASH = """\
import os, sys
from pathlib import Path
from hf_fsdp_plugin.hangs.python_stacks import stack_file
stack_file().open(Path(sys.argv[1]), crashes="record", takes_over=True)
os.kill(os.getpid(), int(sys.argv[2]))
"""


def failure(name: str = "RuntimeError", line: int = 7, **more: Any) -> dict[str, Any]:
    frames = [{"file": "/work/train.py", "line": line, "name": "main", "library": False}]
    how = {"kind": "exception", "type": name, "message": f"{name}: no", "frames": frames, "traceback": "", "time": 1.0}
    return how | more


class Machine:
    """A machine that starts its ranks again and again."""

    def __init__(self, folder: Path, number: int = 0, **identity: Any) -> None:
        self.run, self.number, self.identity = folder / f"machine_{number}", number, identity
        self.starts, self.folder = 0, folder

    def start(self, attempt: int) -> Offer:
        """Return what its lowest rank offers in an attempt."""
        self.folder = self.run / f"{attempt}-{self.starts}"
        self.folder.mkdir(parents=True)
        self.starts, self.attempt = self.starts + 1, attempt
        identity = RunIdentity(**{"id": f"run{self.number}", "max_restarts": 5, "attempt": attempt, **self.identity})
        offer = make_offer(self.folder, identity, rank=2 * self.number, machine=self.number)
        return Offer.from_text(offer.to_text())

    def leave(self, rank: int, how: dict[str, Any] | None = None, *, before: int = 0, steps: int = 0) -> RankFiles:
        """Leave the files of a rank that has ended."""
        files = RankFiles(self.folder / f"rank_{rank}")
        files.calls.write_bytes(struct.pack("10Q", 3, 0, 0, 0, 0, 0, 0, steps, 9, before))
        if how is not None:
            files.failure.write_text(json.dumps(how))
        return files

    def agree(self, *offers: Offer) -> Restarts:
        agreed = Offer.from_text(merge_offers(offers).to_text())
        remember_run(self.folder, agreed, self.attempt)
        return agreed.known


def texts(restarts: Restarts) -> list[str]:
    return [each.failure for each in restarts.failures]


def test_killed_rank_is_the_cause_and_its_steps_are_counted(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    assert one.agree(one.start(0)) == Restarts(run_id="run0", max_restarts=5)
    one.leave(0, failure(message="RuntimeError: Connection closed by peer"), steps=5)
    one.leave(1, steps=5)
    found = one.agree(one.start(1))
    assert texts(found) == [f"rank 1: {KILLED}"] and (found.failures[0].steps, found.failures[0].same_as) == (5, "")
    assert found.title == "restart 1 of 5" and found.last_failure == f"rank 1: {KILLED} after step 5 of the run"
    one.leave(1, failure(), before=3, steps=1)
    found = one.agree(one.start(2))
    assert texts(found) == [f"rank 1: {KILLED}", "rank 1: RuntimeError: no"]
    assert found.to_report(4)["lost_steps"] == 2 and found.run_id == "run0"
    assert [path.name for path in one.run.iterdir() if path.is_dir()] == ["2-2"], "files of assessed attempts go"


def crash(files: RankFiles, number: int) -> None:
    """Leave the stack of a process that a signal has ended, as faulthandler writes it."""
    done = subprocess.run([sys.executable, "-c", CRASH, str(files.stacks), str(number)], check=False)
    assert done.returncode == -number


def test_crash_is_known_by_its_stack(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    crash(one.leave(1, steps=2), signal.SIGSEGV)
    stopped = one.leave(0, steps=2)
    stopped.stacks.write_text('main 0x1\nCurrent thread 0x1 (most recent call first):\n  File "/a.py", line 1 in f\n')
    found = one.agree(one.start(1)).failures[0]
    assert (found.failure, found.same_as) == ("rank 1: killed by SIGSEGV", "SIGSEGV")


@pytest.mark.parametrize("given", [False, True])
def test_third_attempt_after_the_same_failure_is_refused(tmp_path: Path, given: bool) -> None:
    one = Machine(tmp_path, given=given)
    one.agree(one.start(0))
    one.leave(0, failure(), steps=5)
    assert one.agree(one.start(1)).refusal is None
    one.leave(0, failure(), before=3, steps=2)
    refused = one.agree(one.start(2))
    assert refused.refusal is not None and refused.refusal.code == "FSDP-E714"
    assert "two attempts have failed in the same way after step 5" in refused.refusal.message
    one.leave(0, failure("SpecError", kind="spec"))
    again = one.agree(one.start(3))
    assert again.refusal == refused.refusal, "the agent starts the ranks again, and they refuse again"


def test_other_step_and_other_place_are_not_the_same_failure(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    for attempt, (line, steps) in enumerate([(7, 5), (7, 6), (8, 6)]):
        one.leave(0, failure(line=line), steps=steps)
        assert one.agree(one.start(attempt + 1)).refusal is None


def test_import_error_before_the_first_step_is_refused_at_once(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    one.leave(0, failure("ImportError"))
    refused = one.agree(one.start(1)).refusal
    assert refused is not None and "ImportError before the first optimizer step" in refused.message


@pytest.mark.parametrize("identity", [{"given": True}, {"requeued": "job"}])
def test_user_who_starts_a_refused_run_again_is_not_refused(tmp_path: Path, identity: dict[str, Any]) -> None:
    one = Machine(tmp_path, **identity)
    one.agree(one.start(0))
    for refused in (False, True):
        one.leave(0, failure(), steps=5)
        assert (one.agree(one.start(0)).refusal is not None) == refused
    one.leave(0, failure("SpecError", kind="spec"))
    found = one.agree(one.start(0))
    assert found.refusal is None and len(found.failures) == 2, "the cause may have been removed"
    one.leave(0, failure(), steps=5)
    assert one.agree(one.start(0)).refusal is None
    one.leave(0, failure(), steps=5)
    assert one.agree(one.start(0)).refusal is not None


def test_attempts_without_files_are_counted(tmp_path: Path) -> None:
    """Ranks can be killed during their first imports, and the folder for temporary files can be another one."""
    one = Machine(tmp_path)
    one.agree(one.start(0))
    one.leave(0, failure(), steps=5)
    found = one.agree(one.start(2))
    assert texts(found) == ["rank 0: RuntimeError: no", "an attempt of which no record is left"]
    assert texts(one.agree(one.start(3)))[2:] == ["an attempt of which no record is left"]
    other = Machine(tmp_path, 1)
    assert texts(other.agree(other.start(2))) == ["an attempt of which no record is left"] * 2
    identity = RunIdentity(id="a", attempt=1)
    assert merge_offers([make_offer(None, identity, rank=0, machine=0)]).known.count == 1


def test_attempts_without_an_agreement_are_counted(tmp_path: Path) -> None:
    """Ranks can fail before their process group exists, so that they only leave their files."""
    one = Machine(tmp_path)
    for attempt in range(3):
        one.start(attempt)
        one.leave(0, failure(line=attempt), steps=attempt)
    assert texts(one.agree(one.start(3))) == ["rank 0: RuntimeError: no"] * 3


def test_run_that_has_ended_well_did_not_fail(tmp_path: Path) -> None:
    one = Machine(tmp_path, given=True)
    one.agree(one.start(0))
    one.leave(0, steps=5).ended.write_text("")
    assert one.agree(one.start(0)).count == 0


def test_hang_is_named_by_its_message(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    one.leave(0, steps=3)
    message = "hang: rank 1 did not call it"
    same_as = "FSDP-E728 in all-gather of layers.0"
    hang = FoundHang(text=message, message=message, same_as=same_as)
    assert hang.claim(RankFiles(one.folder / "rank").hang)
    found = one.agree(one.start(1)).failures[0]
    assert (found.failure, found.same_as, found.steps) == (message, same_as, 3)


def test_machine_that_knows_most_wins(tmp_path: Path) -> None:
    """Machine 0 is lost and starts again with another agent, whose id is another one. It has rank 0 again."""
    old, other = Machine(tmp_path, 0), Machine(tmp_path, 1)
    offers = [old.start(0), other.start(0)]
    assert [machine.agree(*offers).run_id for machine in (old, other)] == ["run0"] * 2
    other.leave(2, failure(message="RuntimeError: Connection closed by peer"), steps=4)
    (tmp_path / "restarted").mkdir()
    new = Machine(tmp_path / "restarted", 0, id="another")
    offers = [new.start(0), other.start(1)]
    found = [machine.agree(*offers) for machine in (new, other)]
    assert found[0] == found[1] and found[0].run_id == "run0" and found[0].failures[0].steps == 4


def test_first_cause_of_all_machines_is_reported(tmp_path: Path) -> None:
    machines = [Machine(tmp_path, number) for number in (0, 1)]
    offers = [machine.start(0) for machine in machines]
    for machine in machines:
        machine.agree(*offers)
    machines[0].leave(0, failure(message="RuntimeError: Connection reset"), steps=6)
    machines[1].leave(3, failure(), steps=5)
    offers = [machines[0].start(0), machines[1].start(1)]  # torch counts the restart where a rank has failed
    found = machines[0].agree(*reversed(offers))
    assert texts(found) == ["rank 3: RuntimeError: no"] and (found.failures[0].machine, found.failures[0].steps) == (
        1,
        6,
    )
    assert len(found.failures) == 1


def test_machine_that_was_not_in_the_last_attempt_says_nothing(tmp_path: Path) -> None:
    stays, spare = Machine(tmp_path, 0), Machine(tmp_path, 1)
    offers = [stays.start(0), spare.start(0)]
    stays.agree(*offers), spare.agree(*offers)
    spare.leave(2, failure("OSError"), steps=1)
    stays.leave(0, failure(), steps=1)
    stays.agree(stays.start(1))
    stays.leave(0, failure("ValueError"), steps=2)
    found = stays.agree(stays.start(2), spare.start(0))
    assert texts(found) == ["rank 0: RuntimeError: no", "rank 0: ValueError: no"]


@pytest.mark.parametrize("content", ["{", "[]", '{"known": {}, "num_agreed": 1, "attempt": 0}'])
def test_damaged_memory_is_ignored(tmp_path: Path, content: str) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    (one.run / "run.json").write_text(content)
    one.leave(0, failure(), steps=5)
    assert texts(one.agree(one.start(1))) == ["rank 0: RuntimeError: no"]


@pytest.mark.parametrize("content", ["{", "[]", '{"time": 1.0}'])
def test_damaged_record_of_a_failure_is_an_unknown_one(tmp_path: Path, content: str) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    one.leave(0, steps=5).failure.write_text(content)
    found = one.agree(one.start(1))
    assert found.count == 1 and texts(found)[0] in (f"rank 0: {KILLED}", "an attempt of which no record is left")


def test_folder_that_is_gone_does_not_end_the_training(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    identity = RunIdentity(id="run0", attempt=1, max_restarts=5)
    offer = make_offer(tmp_path / "gone" / "1-1", identity, rank=0, machine=0)
    remember_run(tmp_path / "gone" / "1-1", merge_offers([offer]), 1)
    assert merge_offers([offer]).known.count == 1


def test_message_of_a_machine_does_not_grow_with_its_ranks(tmp_path: Path) -> None:
    sizes = []
    for number, ranks in enumerate((1, 64)):
        one = Machine(tmp_path, number)
        one.agree(one.start(0))
        for rank in range(ranks):
            one.leave(rank, failure(), steps=5)
        sizes.append(len(one.start(1).to_text()))
    assert sizes[1] <= sizes[0] + 8


def test_seconds_are_those_until_the_next_start(tmp_path: Path) -> None:
    one = Machine(tmp_path)
    one.agree(one.start(0))
    registered = one.leave(0, failure(), steps=5).process
    registered.touch()
    os.utime(registered, (time.time() - 31, time.time() - 31))
    assert 30 <= one.agree(one.start(1)).failures[0].seconds < 60
    assert os.listdir(one.run)
