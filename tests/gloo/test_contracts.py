"""Runs in which one private name of a library does not exist end as without the change, or are refused with a code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def outcomes(folder: Path, *arguments: str) -> dict[str, str]:
    """Return target -> how the run without it has ended."""
    out = folder / "names.json"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "renamed_names", "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return {row["target"].rpartition(".")[2]: row["outcome"] for row in json.loads(out.read_text())["names"]}


def test_each_kind_of_missing_name_has_its_effect(tmp_path: Path) -> None:
    group, handle = "_fsdp_param_group:FSDPParamGroup", "_flat_param:FlatParamHandle"
    names = [f"{group}.mesh_info", f"{handle}._reduce_dtype", "FlatParameter._fqns", "Accelerator.prepare"]
    assert outcomes(tmp_path, "--only", *names) == {
        "mesh_info": "a feature is off",
        "_reduce_dtype": "a feature is off",
        "_fqns": "refused",
        "prepare": "refused",
        "prepare_model": "refused",
        "prepare_optimizer": "refused",
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_missing_name_ends_in_a_traceback(tmp_path: Path) -> None:
    assert set(outcomes(tmp_path).values()) <= {"runs", "a feature is off", "refused"}
