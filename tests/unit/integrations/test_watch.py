"""Arming the diagnosis in a process: which processes are ranks, what is recorded of failures, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin import SpecError
from hf_fsdp_plugin.hangs import process_end
from hf_fsdp_plugin.hangs.calls import Counts, read_calls, record
from hf_fsdp_plugin.hangs.watch_files import RankFiles, find_peers, remove_files, start_of
from hf_fsdp_plugin.integrations.failure_watch import watch
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.integrations.watch_thread import WatchedRank
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE, FILES_VARIABLE, LOG_VARIABLE
from hf_fsdp_plugin.runs.attempts import Restarts


def armed() -> WatchedRank:
    watch().arm()
    assert watch().armed is not None
    return watch().armed


def armed_files() -> RankFiles:
    return armed().files


def turn() -> None:
    assert watch()._thread is not None
    watch()._thread._turn()


def test_process_without_a_rank_is_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    watch().arm()
    assert watch().armed is None and not record().is_open


def test_rank_is_armed_once_and_leaves_nothing(as_rank: Path) -> None:
    files = armed_files()
    watch().arm()
    assert armed_files() is files and record().is_open and record().main == threading.get_ident()
    assert [peer.pid for peer in find_peers(files.stem.parent)] == [os.getpid()]
    assert (files.stem.parent.stat().st_mode & 0o777) == 0o700
    assert read_calls(0, files.calls).counts == Counts(0, 0) and files.stacks.exists()
    watch().close()
    assert list(as_rank.iterdir()) == [] and not record().is_open
    record().resume_at(0)


def test_flight_record_is_written_before_the_end(
    as_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path))

    def exit_after_hang(seconds: float = 0.0) -> None:
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

    monkeypatch.setattr(process_end, "exit_after_hang", exit_after_hang)
    own = armed()
    own.exit_after_hang()
    assert list(tmp_path.glob("fsdp_nccl*")) == []  # CPU ranks
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    own.exit_after_hang()
    check_flight_record(tmp_path)
    watch().close()


def check_flight_record(folder: Path) -> None:
    [path] = folder.glob("fsdp_nccl*_rank_0.json")
    assert "version" in json.loads(path.read_text())
    path.unlink()


def test_flight_record_is_written_once_when_nothing_moves(
    as_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    files = armed_files()
    turn()
    assert list(tmp_path.glob("fsdp_nccl*")) == []
    files.standstill.touch()
    turn()
    check_flight_record(tmp_path)  # and the process runs on
    turn()
    assert list(tmp_path.glob("fsdp_nccl*")) == []
    watch().close()


def test_rank_under_the_launcher_keeps_its_files(as_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILES_VARIABLE, str(as_rank / "rank_0"))
    RankFiles(as_rank / "rank_0").restarts.write_text(json.dumps(asdict(Restarts(run_id="a"))))
    files = armed_files()
    assert files.stem == as_rank / "rank_0" and watch().has_launcher and current_run().restarts.run_id == "a"
    assert FILES_VARIABLE not in os.environ, "children of the rank are none"
    watch().close()
    assert files.calls.exists()
    remove_files(files.stem)  # which the launcher does


def test_process_forked_by_native_code_writes_nothing(as_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not call its hooks of a fork then."""
    files = armed_files()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        watch().failed(ValueError("of the child"))
        watch().script_ended()
        watch()._at_exit()
    assert watch()._thread is not None and not (
        watch()._thread._stopped.is_set() or files.failure.exists() or files.ended.exists()
    )


def test_disarmed_watch_ignores_failures_and_exit(as_rank: Path) -> None:
    watch().failed(ValueError("before"))
    files = armed_files()
    watch().close()
    watch().close()
    watch().failed(ValueError("after"))
    watch().script_ended()
    watch()._at_exit()
    assert list(as_rank.iterdir()) == [] and not files.failure.exists()


@pytest.mark.parametrize("lives", [True, False])
def test_hang_of_earlier_ranks_does_not_end_new_ones(as_rank: Path, lives: bool) -> None:
    own = armed()
    files = own.files
    watch().close()
    files.stem.parent.mkdir(parents=True, mode=0o700)
    start = start_of(os.getpid()) if lives else 1
    content = {"rank": 1, "pid": os.getpid(), "start": start, "host": socket.gethostname()}
    other = RankFiles(files.stem.with_name("rank_1"))
    other.process.write_text(json.dumps(content))
    files.hang.write_text("{}")
    watch()._open(own)
    assert files.hang.exists() == lives
    watch()._pid = os.getpid()
    watch().close()
    other.process.unlink()


@pytest.mark.parametrize("name", ["HF_FSDP_HANG_TIMEOUT", "HF_FSDP_EXIT_TIMEOUT"])
def test_limit_that_is_no_number_is_refused(as_rank: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "soon")
    with pytest.raises(SpecError) as caught:
        watch().arm()
    assert caught.value.problems[0].code == "FSDP-E674" and f"{name} is 'soon'" in str(caught.value)


def test_limit_of_zero_records_no_collectives(as_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FSDP_HANG_TIMEOUT", "0")
    armed_files()
    assert not record().is_open


def test_failure_is_recorded_for_torchs_agent(as_rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error_file = as_rank / "error.json"
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(error_file))
    files = armed_files()
    try:
        raise ValueError("no batch")
    except ValueError as error:
        watch().failed(error)
        watch().failed(error)
    failure = json.loads(files.failure.read_text())
    assert failure["message"] == "ValueError: no batch" and failure["frames"][-1]["file"] == __file__
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: no batch" and int(message["extraInfo"]["timestamp"]) > 0
    assert f"{Path(__file__).name}:" in message["extraInfo"]["py_callstack"]
    watch().failed(SpecError([Problem(code="FSDP-E674", message="later", fix="none")]))
    assert "later" not in error_file.read_text(), "the first one stays"


def test_lost_connection_names_the_rank_that_failed_first(as_rank: Path) -> None:
    files = armed_files()
    other = RankFiles(files.stem.with_name("rank_1"))
    other.process.write_text(files.process.read_text().replace('"rank": 0', '"rank": 1'))
    place = {"file": "/train.py", "line": 7, "name": "f", "code": "", "library": False}
    cause = {"time": 1.0, "type": "ValueError", "frames": [place], "traceback": "", "kind": "exception"}
    other.failure.write_text(json.dumps({**cause, "message": "ValueError: no batch"}))
    error = RuntimeError("Connection closed by peer")
    watch().failed(error)
    assert error.__notes__ == ["hf-fsdp: rank 1 failed first at /train.py:7: ValueError: no batch"]
    other.process.unlink()
    other.failure.unlink()


def test_lost_connection_names_a_rank_that_is_gone(as_rank: Path) -> None:
    files = armed_files()
    other = RankFiles(files.stem.with_name("rank_1"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    content = json.loads(files.process.read_text()) | {"rank": 1, "pid": gone.pid}
    other.process.write_text(json.dumps(content))
    error = RuntimeError("Connection closed by peer")
    watch().failed(error)
    assert "rank 1 " in error.__notes__[0] and "FSDP-E734" in error.__notes__[0]
    other.process.unlink()


def test_rank_that_is_told_to_end_still_names_the_cause(as_rank: Path) -> None:
    """A launcher sends SIGTERM when it has seen another rank exit, often before this one has."""
    files = armed_files()
    other = RankFiles(files.stem.with_name("rank_1"))
    sleeper = subprocess.Popen(["sleep", "60"])
    content = json.loads(files.process.read_text()) | {"rank": 1, "pid": sleeper.pid, "start": start_of(sleeper.pid)}
    other.process.write_text(json.dumps(content))

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sleeper.kill()
        sleeper.wait()

    timer = threading.Timer(0.3, end)
    timer.start()
    error = RuntimeError("Connection closed by peer")
    watch().failed(error)
    timer.join()
    assert "rank 1 " in error.__notes__[0] and "FSDP-E734" in error.__notes__[0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    other.process.unlink()
