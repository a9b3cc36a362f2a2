"""The part of tests/unit/integrations/test_watch.py that starts processes or computes for seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hf_fsdp_plugin.hangs.calls import read_calls, record
from hf_fsdp_plugin.integrations.failure_watch import watch
from tests.unit.integrations.test_watch import armed_files


def test_children_of_a_rank_are_no_ranks(as_rank: Path) -> None:
    files = armed_files()
    code = "from hf_fsdp_plugin.integrations.failure_watch import watch as w; w().arm(); print(w().armed is not None)"
    env = {**os.environ, "TMPDIR": str(as_rank)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    nested = subprocess.run(
        [sys.executable, "-c", code], env={**env, "MASTER_PORT": "2"}, capture_output=True, text=True, check=True
    )
    assert nested.stdout == "True\n", "a rank of another launcher that the rank has started"
    read, write = os.pipe()
    if not (child := os.fork()):
        record().resume_at(5)
        watch().failed(ValueError("of the child"))
        os.write(write, f"{watch().armed is not None} {record().is_open}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"False False"
    os.close(read)
    os.close(write)
    counts = read_calls(0, files.calls).counts
    assert counts is not None and counts.before == 0 and not files.failure.exists()


STUCK = """
import atexit, sys
atexit.register(print, "the interpreter ended as usual")
from hf_fsdp_plugin.integrations.failure_watch import watch
watch().arm()
watch()._thread.stop = lambda: False
print("trained")
"""


def test_rank_whose_request_does_not_end_exits_with_success(as_rank: Path) -> None:
    """A request to the store that returned while the interpreter ends would abort the process: exit code 134."""
    env = {**os.environ, "TMPDIR": str(as_rank), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", STUCK], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "trained\n")
