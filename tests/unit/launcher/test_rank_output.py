"""The output of ranks: what is shown, and what is in the files of --log_dir."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.launcher.rank_processes import RankJob, RankOutput

NUM_BYTES = 300_000


def job_of(**options: Any) -> RankJob:
    return RankJob(command=(), num_local=1, env={}, **{"shown": "first", **options})


def run_rank(output: RankOutput, code: str) -> subprocess.Popen[bytes]:
    """Run code as rank 0 with this output, until it exits."""
    stdout, stderr = output.open(0, is_first=True)
    with open(stdout, "w") as out, open(stderr, "w") as err:  # as torch's agent does
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=out, stderr=err)
        assert process.wait(30) == 0
        output.finish()
    return process


def test_log_contains_what_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_rank(RankOutput(job_of(log_dir=tmp_path), tmp_path), "import sys; print('a\\nb'); print('c', file=sys.stderr)")
    assert capfd.readouterr() == ("a\nb\n", "c\n")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"rank_0.stdout.log": "a\nb\n", "rank_0.stderr.log": "c\n"}


def test_output_of_all_ranks_has_whole_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_rank(RankOutput(job_of(shown="all"), tmp_path), "print('a\\nb', end='')")
    assert capfd.readouterr().out == "[rank 0] a\n[rank 0] b\n"


def test_exited_reader_is_noticed(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.unit.launcher.test_rank_output import RankOutput, job_of, run_rank
output = RankOutput(job_of(shown="all"), Path({str(tmp_path)!r}))
run_rank(output, "print('x\\\\n' * {NUM_BYTES})")
sys.exit(0 if output.reader_exited else 1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(30), errors) == (0, b"")
