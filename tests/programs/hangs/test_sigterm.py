"""SIGTERM in a rank: its thread has time to say why it comes, and the process ends by it in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_fsdp_plugin.hangs.process_end import write_error_file
from hf_fsdp_plugin.hangs.python_stacks import read_stack
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE

HELD = """
import os, signal, sys, threading, time
from pathlib import Path
from hf_fsdp_plugin.hangs.process_end import delayed_sigterm, hold_sigterm
stacks = Path(sys.argv[1])
held = hold_sigterm(stacks)
def end(): os.kill(os.getpid(), signal.SIGTERM)
def wait():
    if held.wait(20): print("why", flush=True)
    held.release()
thread = threading.Thread(target=wait)
thread.start()
"""
ARMED = """
import ctypes, os, signal, sys, time
sys.setswitchinterval(1e-4)
from hf_fsdp_plugin.integrations.failure_watch import watch
watch().arm()
print("armed", flush=True)
"""


def run(code: str, path: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", HELD + code, str(path)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("times", [1, 3])
def test_thread_says_why_while_the_main_thread_is_in_native_code(tmp_path: Path, times: int) -> None:
    line = f"for _ in range({times}): end()\nimport ctypes; ctypes.CDLL(None).sleep(20); print('goes on')"
    assert run(line, tmp_path / "stacks") == (-signal.SIGTERM, "why\n")
    assert [frame.name for frame in read_stack(tmp_path / "stacks")] == ["<module>", "end"]


def test_sigterm_is_held_beside_many_open_files(tmp_path: Path) -> None:
    code = HELD.replace(
        "stacks = Path(sys.argv[1])",
        "stacks = Path(sys.argv[1])\nimport resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]",
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "end(); thread.join()", str(tmp_path / "stacks")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "why\n"), done.stderr


def test_signal_at_the_end_of_the_thread_is_not_lost(tmp_path: Path) -> None:
    line = "held.wake(); thread.join(); print('free', flush=True); end()"
    assert run(line, tmp_path / "stacks") == (-signal.SIGTERM, "free\n")
    code = HELD.replace("held.wait(20)", "time.sleep(1)") + "end(); thread.join(); print('goes on')"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_handler_of_the_script_stays(tmp_path: Path, when: str) -> None:
    own = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('saved'))\n"
    if when == "before":
        code = own + HELD.partition("def end")[0] + "assert held is None\nos.kill(os.getpid(), signal.SIGTERM)"
    else:
        code = HELD + own + "end(); held.wake(); thread.join(); end()"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "saved\n" * (1 if when == "before" else 2)), done.stderr


def test_search_for_a_cause_delays_the_end(tmp_path: Path) -> None:
    line = "held.wake(); thread.join()\nwith delayed_sigterm() as is_told:\n    end(); print(is_told())\nend()"
    assert run(line, tmp_path / "stacks") == (-signal.SIGTERM, "True\n")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of one machine, armed."""
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env = {**os.environ, **variables, "TMPDIR": str(tmp_path)}
    processes = []
    for rank in range(2):
        line = "import ctypes\nwhile True: ctypes.CDLL(None).sleep(1)"
        if rank == 1:
            line = "time.sleep(float(sys.argv[1]))\nos.abort()"
        script = tmp_path / f"train_{rank}.py"
        script.write_text(ARMED + line)
        command = [sys.executable, script, "0.5"]
        processes.append(
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=-1, stderr=-1, text=True, cwd=tmp_path)
        )
        assert processes[-1].stdout is not None and processes[-1].stdout.readline() == "armed\n"
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_rank_that_is_ended_names_the_one_that_has_crashed(ranks: list[subprocess.Popen[str]]) -> None:
    assert ranks[1].wait(20) == -signal.SIGABRT
    ranks[0].terminate()
    text = ranks[0].communicate(timeout=20)[1]
    first = "rank 1 failed first at train_1.py:8 `os.abort()` after 0 optimizer steps: killed by SIGABRT"
    assert text.startswith(f"hf-fsdp: {first}. The ranks were in different places: rank 0 was at ")
    assert text.count("SIGABRT") == 1 and ranks[0].returncode == -signal.SIGTERM


def test_rank_that_is_ended_alone_says_nothing_and_ends_soon(ranks: list[subprocess.Popen[str]]) -> None:
    begin = time.monotonic()
    ranks[0].terminate()
    assert ranks[0].communicate(timeout=20) == ("", "") and ranks[0].returncode == -signal.SIGTERM
    assert time.monotonic() - begin < 10


def test_hang_is_the_cause_of_ranks_killed_in_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped rank is killed before the one that has found the hang exits."""
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(tmp_path / "error.json"))
    write_error_file("hang: rank 1 is late", seconds_ago=1)
    killed = ProcessFailure(local_rank=1, pid=2, exitcode=-9, error_file="")
    found = ProcessFailure(local_rank=0, pid=1, exitcode=75, error_file=str(tmp_path / "error.json"))
    assert ChildFailedError("train.py", {1: killed, 0: found}).get_first_failure()[1] is found


def test_end_after_a_hang_leaves_no_worker(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "from hf_fsdp_plugin.hangs.process_end import exit_after_hang\n"
        "if __name__ == '__main__':\n"
        "    worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)\n"
        "    worker.start()\n"
        "    exit_after_hang()\n"
    )
    # The worker inherits the output, so that the call waits for its end, too.
    assert subprocess.run([sys.executable, script], capture_output=True, timeout=60).returncode == 75


def test_request_for_a_stack_after_the_recording_ends_nothing(tmp_path: Path) -> None:
    """The other ranks of a run may ask for the stack of a rank whose script has just ended."""
    code = """
import os, sys
from pathlib import Path
from hf_fsdp_plugin.hangs.python_stacks import StackFile, request_stack
path, stacks = Path(sys.argv[1]), StackFile()
for _ in range(2):
    stacks.open(path, crashes="print")
    stacks.close()
    request_stack(path, os.getpid())
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
