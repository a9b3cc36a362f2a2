"""``python -m scripts.bench``: what it runs, its summary, and its exit codes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.main import parse_arguments
from scripts.bench.measure import throughput
from scripts.bench.registry import BENCHMARKS

ROOT = Path(__file__).parents[2]
MEASURE = ROOT / "scripts" / "bench" / "measure"
RUNNER = """
import sys
from scripts.bench import __main__ as runner
from scripts.bench.registry import Benchmark
runner.chosen = lambda names: [Benchmark(name=name, program=f"{name}.py", shell=sys.executable, arguments=f"{name}.py",
                                         minutes=LIMIT, quick="") for name in names]
runner.QUICK_MINUTES = LIMIT
runner.ROOT = runner.Path.cwd()
runner.record = lambda name, result: open("recorded", "a").write(f"{name} {result}\\n")
runner.update_tables = lambda: open("rendered", "w").close() or 0
raise SystemExit(runner.main())
"""


@pytest.fixture(autouse=True)
def own_logs(tmp_path, monkeypatch):
    """The logs stay after a run, for the user."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_every_result_has_a_row():
    results = {path.stem for path in (ROOT / "docs/results").glob("*.json")}
    assert results - {"gpu_check", "last_runs", "slow_tests", "uncovered"} <= {row.name for row in BENCHMARKS}


def test_every_program_that_writes_a_result_has_a_row():
    written = {
        name
        for path in MEASURE.glob("*.py")
        for name in re.findall(r'make_parser\(__doc__, "(\w+)"\)', path.read_text(encoding="utf-8"))
    }
    assert len(written) > 25 and written <= {row.name for row in BENCHMARKS}


def test_most_benchmarks_have_quick_sizes():
    quick = {row.name for row in BENCHMARKS if row.command(quick=True, out="x") is not None}
    assert len(quick) > 20 and {"load", "step_overhead", "unexpressed", "generated_values"} <= quick


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [row.name for row in BENCHMARKS if row.quick is not None])
def test_benchmark_runs_with_small_sizes(name: str):
    command = [sys.executable, "-m", "scripts.bench", "--quick", "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_flags_of_throughput_are_flags_of_bench(tmp_path, monkeypatch):
    def run_bench(command: list[str], **options: object) -> None:
        assert command[3] == "bench"
        parsed.append(parse_arguments("bench", command[4:]))
        raise InterruptedError

    parsed: list[Any] = []
    monkeypatch.setattr(subprocess, "run", run_bench)
    monkeypatch.setattr(sys, "argv", ["throughput", "--blocks", "7", "--out", str(tmp_path / "throughput.json")])
    with pytest.raises(InterruptedError):
        throughput.main()
    assert parsed[0].blocks == 7


def test_list_says_what_each_benchmark_measures():
    lines = run("--list").stdout.splitlines()
    assert len(lines) >= len(BENCHMARKS) and all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("words", [["--only", "none"], ["--only"], ["--fast"], ["none"]])
def test_wrong_usage_exits_2(words):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Return a folder with three programs: one passes, one fails, and one never ends."""
    (tmp_path / "works.py").write_text("print('fine')")
    (tmp_path / "fails.py").write_text("raise SystemExit('no disk')")
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    return tmp_path


def command_of(limit: float, *words: str) -> list[str]:
    return [sys.executable, "-c", RUNNER.replace("LIMIT", str(limit)), *words]


def run_suite(suite: Path, *words: str, limit: float = 10) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_of(limit, *words), cwd=suite, capture_output=True, text=True, timeout=120)


def test_failure_does_not_end_the_others(suite):
    done = run_suite(suite, "--quick", "--only", "fails", "--only", "works")
    summary = [line.split() for line in done.stdout.splitlines() if "exit code" in line]
    assert done.returncode == 1 and "no disk" in done.stderr
    assert {row[0]: row[1] for row in summary} == {"works": "passed", "fails": "failed"}
    assert not (suite / "rendered").exists()  # quick results are not rendered


def test_results_are_rendered_after_a_run(suite):
    done = run_suite(suite, "--only", "works")
    assert done.returncode == 0 and (suite / "rendered").exists()
    assert (suite / "recorded").read_text() == "works passed\n"
    assert done.stdout.count("passed") == 1


def test_time_limit_ends_a_benchmark(suite):
    done = run_suite(suite, "--quick", "--only", "sleeps", limit=0.01)
    assert done.returncode == 1 and "time limit   exit code 124" in done.stdout


def test_interrupt_prints_the_summary_and_exits_130(suite):
    command = command_of(10, "--quick", "--only", "sleeps")
    process = subprocess.Popen(command, cwd=suite, stdout=subprocess.PIPE, text=True)
    while not list(suite.glob("hf_fsdp_bench.*/sleeps.log")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped" in out
