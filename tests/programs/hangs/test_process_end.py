"""How a rank ends: its error file, its child processes, and requests for its stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_fsdp_plugin.hangs.process_end import write_error_file
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE


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
    stacks.open(path, records_crashes=False)
    stacks.close()
    request_stack(path, os.getpid())
print("goes on")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
