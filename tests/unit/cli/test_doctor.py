"""``hf-fsdp doctor``: what it finds wrong, and its output on the installed versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_schema import assert_valid

from hf_fsdp_plugin.cli.doctor import check_builds, check_contracts

ROOT = Path(__file__).parents[3]
RUN = "import sys; sys.argv[0] = 'hf-fsdp'; from hf_fsdp_plugin.cli.main import main; sys.exit(main(sys.argv[1:]))"


def doctor(*arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    command = [sys.executable, "-c", RUN, "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def row(status: str, without: str) -> dict[str, Any]:
    return {"target": "torch.nn:_name", "status": status, "without": without, "use": "a test", "replaced": False}


@pytest.mark.parametrize(
    ("status", "without", "codes"),
    [
        ("holds", "refused", []),
        ("not installed", "refused", []),
        ("not in this version", "off", []),
        ("missing", "refused", ["FSDP-E620"]),
        ("missing", "off", ["FSDP-W621"]),
        ("missing", "unobservable", ["FSDP-W621"]),
        ("changed", "refused", ["FSDP-N626"]),
    ],
)
def test_missing_contract_is_a_problem_by_its_effect(status: str, without: str, codes: list[str]) -> None:
    assert [problem.code for problem in check_contracts([row(status, without)])] == codes


@pytest.mark.parametrize(
    ("versions", "cuda", "driver", "codes"),
    [
        ({"torch": "2.13.0+cpu"}, None, False, []),
        ({"torch": "2.13.0+cpu"}, None, True, ["FSDP-W625"]),
        ({"torch": "2.15.0"}, "13.2", True, []),
        ({"torch": "2.15.0+cu132", "torchvision": "0.30.0+cu132"}, "13.2", True, []),
        ({"torch": "2.15.0+cu132", "torchvision": "0.30.0+cpu"}, "13.2", True, ["FSDP-W625"]),
    ],
)
def test_builds_that_do_not_fit_are_warnings(versions: Any, cuda: str | None, driver: bool, codes: list[str]) -> None:
    assert [problem.code for problem in check_builds(versions, cuda, driver)] == codes


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
