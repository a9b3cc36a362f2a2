"""The output of ranks is read to its end, whatever happens to the log and to the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.launcher.processes import RankOutput
from hf_fsdp_plugin.launcher.rank_environment import RankJob

NUM_BYTES = 300_000  # more than a pipe holds


def job_of(**options: Any) -> RankJob:
    return RankJob(command=(), num_local=1, env={}, show_first=True, **options)


def run_rank(output: RankOutput, code: str) -> subprocess.Popen[bytes]:
    """Run code as rank 0 with this output, until it exits."""
    stdout, stderr, _ = output.open(0, is_first=True)
    with open(stdout, "w") as out, open(stderr, "w") as err:  # as torch's agent does
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=out, stderr=err)
        assert process.wait(30) == 0
        output.finish()
    return process


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_full_log_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    notices: list[object] = []
    output = RankOutput(job_of(log_dir=tmp_path, notice=notices.append), tmp_path)
    run_rank(output, f"print('x' * {NUM_BYTES})")
    assert len(notices) == 1 and "FSDP-W745" in str(notices[0]) and "rank_0.log is incomplete" in str(notices[0])
    assert capfd.readouterr().out.count("x") == NUM_BYTES


def test_log_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").mkdir()
    notices: list[object] = []
    run_rank(RankOutput(job_of(log_dir=tmp_path, notice=notices.append), tmp_path), "print('shown')")
    assert len(notices) == 1 and "FSDP-W745" in str(notices[0])


def test_exited_reader_is_noticed_and_pipe_is_read(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.unit.launcher.test_rank_output import RankOutput, job_of, run_rank
output = RankOutput(job_of(show_all=True), Path({str(tmp_path)!r}))
run_rank(output, "print('x\\\\n' * {NUM_BYTES})")
sys.exit(0 if output.reader_exited else 1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(30), errors) == (0, b"")
