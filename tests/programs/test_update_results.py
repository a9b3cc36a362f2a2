"""The tables in docs/results.md and docs/checkpoints.md are generated from docs/results/*.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts.bench.tables.update_results"
HEAD = {"date": "2026-01-01", "machine": "a machine", "versions": {"torch": "2.13.0"}, "command": "measure it"}


def update(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = ["--document", str(tmp_path / "results.md"), "--results", str(tmp_path)]
    command = [sys.executable, "-m", SCRIPT, *paths, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "results.md"
    path.write_text("before\n<!-- results:begin speed -->\nold\n<!-- results:end speed -->\nafter\n")
    return path


def test_block_is_filled_from_the_file_of_its_name(tmp_path: Path, document: Path) -> None:
    (tmp_path / "speed.json").write_text(json.dumps({**HEAD, "step_seconds": 0.5}))
    assert update(tmp_path).returncode == 0
    assert "| step seconds | 0.5 |" in document.read_text()
    assert "`measure it`, 2026-01-01, a machine; torch 2.13.0." in document.read_text()
    assert document.read_text().startswith("before\n") and document.read_text().endswith("after\n")


def test_block_without_a_file_is_not_measured_yet(tmp_path: Path, document: Path) -> None:
    assert update(tmp_path).returncode == 0
    assert "old" not in document.read_text()
    assert "Not measured yet." in document.read_text()


def test_check_detects_an_outdated_document(tmp_path: Path, document: Path) -> None:
    outdated = update(tmp_path, "--check")
    assert outdated.returncode == 1
    assert "is out of date" in outdated.stderr
    assert "old" in document.read_text()
    update(tmp_path)
    assert update(tmp_path, "--check").returncode == 0


def test_project_results_are_up_to_date() -> None:
    command = [sys.executable, "-m", SCRIPT, "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_result_has_machine_and_command(tmp_path: Path) -> None:
    program = (
        f"import pathlib; from {SCRIPT.rpartition('.')[0]} import update_results as u\n"
        f"u.TABLES['speed'] = u.plain; u.write_result('speed', pathlib.Path({str(tmp_path / 'a.json')!r}), {{'x': 1}})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["command"] == "python -m scripts.bench speed" and found["load_average_of_15_minutes"] >= 0
    assert {"date", "commit", "machine", "versions"} <= found.keys() and "| x | 1 |" in done.stdout


def test_gpu_check_has_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench.tables.update_results import gpu_check

    row = {"name": "scaler fp16", "version": 2, "ranks": 1, "status": "passed", "reason": "scale 65536", "code": "a"}
    rows = [
        row,
        {**row, "version": 1, "status": "failed", "reason": "not\nfinite | NaN"},
        {**row, "name": "nccl bf16", "status": "skipped", "reason": "not seen: needs 2 devices"},
        {**row, "name": "training bf16 one GPU", "ranks": 2, "shared": True, "reason": "", "code": "b"},
    ]
    head, _, *lines = gpu_check({"rows": rows})
    assert head.startswith("**One GPU.** One rank has nobody to communicate with")
    assert lines[2:] == [
        "| scaler fp16 | 1 | passed | failed |",
        "| nccl bf16 | 1 | skipped |  |",
        "| training bf16 one GPU | 2 | passed |  |",
        "",
        "2 passed, 1 failed, 1 skipped. Rows are of 2 versions of the code.",
        "",
        "- scaler fp16, FSDP2: scale 65536",
        "- scaler fp16, FSDP1, failed: not finite / NaN",
        "- nccl bf16, FSDP2, skipped: not seen: needs 2 devices",
    ]
    assert not gpu_check({"rows": [{**row, "ranks": 2}]})[0].startswith("**One GPU.**")
