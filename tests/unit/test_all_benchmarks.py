"""``python -m scripts.bench``: what it runs, its summary, and its exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = ROOT / "python -m scripts.bench"


@pytest.fixture(autouse=True)
def own_logs(tmp_path, monkeypatch):
    """The logs stay after a run, for the user."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def run(*words: str, script: Path = ALL) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, timeout=120)


def test_every_result_is_written_by_a_listed_benchmark():
    listed = {line.split()[0] for line in run("--list").stdout.splitlines()}
    results = {path.stem for path in (ROOT / "docs/results").glob("*.json")}
    assert results - {"gpu_check"} <= listed


def test_most_benchmarks_have_quick_sizes():
    lines = [line.split() for line in run("--list", "--quick").stdout.splitlines()]
    quick = {line[0] for line in lines if len(line) > 2}
    assert len(quick) > 20 and {"load", "step_overhead", "unexpressed", "generated_values"} <= quick


@pytest.mark.parametrize("words", [["--only", "none"], ["--only"], ["--fast"]])
def test_wrong_usage_exits_2(words):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("all.sh: ")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Return the script in a folder with three benchmarks: one passes, one fails, and one never ends."""
    folder = tmp_path / "scripts/bench"
    folder.mkdir(parents=True)
    bodies = {
        "works": "print('fine')",
        "fails": "raise SystemExit('no disk')",
        "sleeps": "import time; time.sleep(600)",
    }
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(f'# make_parser(__doc__, "{name}") has "--quick"\n{body}\n')
    (folder / "update_results.py").write_text("open('rendered', 'w')\n")
    shutil.copy(ALL, folder / "all.sh")
    text = (folder / "all.sh").read_text().replace("names+=(generated_values hangs_healthy ecosystem matrix peers)", "")
    text = text.replace("QUICK_MINUTES=10", "QUICK_MINUTES=${LIMIT:-10}").replace("--kill-after=30", "--kill-after=1")
    (folder / "all.sh").write_text(text)
    return folder / "all.sh"


def test_failure_does_not_end_the_others(suite):
    done = run("--quick", "--only", "fails", "--only", "works", script=suite)
    summary = [line.split() for line in done.stdout.splitlines() if "exit code" in line]
    assert done.returncode == 1 and "no disk" in done.stderr
    assert {row[0]: row[1] for row in summary} == {"works": "passed", "fails": "failed"}
    assert not Path(suite.parents[2] / "rendered").exists()  # quick results are not rendered


def test_results_are_rendered_after_a_run(suite):
    done = run("--only", "works", script=suite)
    assert done.returncode == 0 and (suite.parents[2] / "rendered").exists()
    assert json.dumps(done.stdout).count("passed") == 1


def test_time_limit_ends_a_benchmark(suite, monkeypatch):
    monkeypatch.setenv("LIMIT", "0.01")
    done = run("--quick", "--only", "sleeps", script=suite)
    assert done.returncode == 1 and "time limit   exit code 124" in done.stdout


def test_interrupt_prints_the_summary_and_exits_130(suite, tmp_path):
    process = subprocess.Popen(["bash", str(suite), "--quick", "--only", "sleeps"], stdout=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("hf_fsdp_bench.*/sleeps.log")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped" in out
