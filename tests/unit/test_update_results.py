"""The tables in docs/results.md are generated from docs/results/*.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "update_results.py"
HEAD = {"date": "2026-01-01", "machine": "a machine", "versions": {"torch": "2.13.0"}, "command": "measure it"}


def update(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    paths = ["--document", str(tmp_path / "results.md"), "--results", str(tmp_path)]
    return subprocess.run([sys.executable, str(SCRIPT), *paths, *flags], capture_output=True, text=True, check=False)


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
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_result_has_machine_and_command(tmp_path: Path) -> None:
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(SCRIPT.parent)!r}); import update_results as u\n"
        f"u.TABLES['speed'] = u.plain; u.write_result('speed', pathlib.Path({str(tmp_path / 'a.json')!r}), {{'x': 1}})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["command"] == "python scripts/bench/speed.py" and found["load_average_of_15_minutes"] >= 0
    assert {"date", "machine", "versions"} <= found.keys() and "| x | 1 |" in done.stdout


def test_gpu_check_has_a_row_for_each_case_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from update_results import gpu_check

    case = {"check": "training", "version": 2, "strategy": "no_shard", "ranks": 1, "backend": "nccl", "offload": False}
    cases = [
        {**case, "precision": "bf16", "status": "passed"},
        {**case, "precision": "fp16", "status": "failed", "text": "not\nfinite"},
        {**case, "check": "pinned_saves", "precision": "bf16", "status": "passed", "ranks": 2},
        {**case, "precision": "bf16", "status": "refused", "text": "one device", "ranks": 2, "shared": True},
    ]
    assert gpu_check({"cases": cases})[2:] == [
        "| FSDP2 no_shard |  | passed | failed |",
        "| FSDP2 pinned saves, 2 ranks (nccl) |  | passed |  |",
        "| FSDP2 no_shard, 2 ranks on one GPU (nccl) |  | refused |  |",
        "",
        "- FSDP2 no_shard, fp16: not finite",
        "- FSDP2 no_shard, 2 ranks on one GPU (nccl), bf16: one device",
    ]
