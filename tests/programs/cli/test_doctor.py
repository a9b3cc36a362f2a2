"""The part of tests/unit/cli/test_doctor.py that starts processes or computes for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.json_schema import assert_valid

ROOT = Path(__file__).parents[3]
RUN = "import sys; sys.argv[0] = 'hf-fsdp'; from hf_fsdp_plugin.cli.main import main; sys.exit(main(sys.argv[1:]))"


def doctor(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    command = [sys.executable, "-c", RUN, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def test_doctor_lists_versions_and_contracts() -> None:
    done = doctor("--json")
    found = json.loads(done.stdout)
    assert_valid("doctor", found)
    assert (done.returncode, found["ok"], found["problems"]) == (0, True, [])
    assert {"torch", "transformers", "accelerate"} <= set(found["versions"])
    assert {entry["status"] for entry in found["contracts"]} <= {"holds", "not installed", "not in this version"}
    assert len(found["contracts"]) > 200


@pytest.mark.parametrize(
    "error", ["ImportError('libcudart.so.13: cannot open shared object file')", "OSError('undefined symbol')"]
)
def test_broken_torch_is_a_problem_without_traceback(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    done = doctor(path=tmp_path)
    assert done.returncode == 1
    assert "FSDP-E624" in done.stdout and error.split("'")[1] in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
