"""The part of tests/unit/test_peers.py that starts processes or computes for seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.run_peers import Suite, run_file


@pytest.mark.slow
def test_suite_runs_without_and_with_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import math, subprocess, sys, unittest\n"
        "HAS = 'import sys; sys.exit(\"hf_fsdp_plugin.integrations.install\" not in sys.modules)'\n"
        "def test_it(): assert math.tau == 0\n"
        "def test_plugin(): assert 'hf_fsdp_plugin.integrations.install' in sys.modules\n"
        "def test_plugin_in_subprocess(): subprocess.run([sys.executable, '-c', HAS], check=True)\n"
        "def test_replaced(): assert math.floor(7.5) == 2\n"
        "@math.factorial\n"
        "def test_decorated(): pass\n"
    )
    suite = Suite(files=["test_it.py"], relaxed={"test_it.py": ["math:factorial", "math:floor=2"]})
    runs = {mode: run_file("test_it.py", suite, tmp_path, mode, tmp_path, (60, 120)) for mode in ("without", "with")}
    found = {
        mode: {test.rpartition(":")[2]: o for test, (o, _) in run["outcomes"].items()} for mode, run in runs.items()
    }
    same = {"test_it": "failed (AssertionError)", "test_replaced": "passed", "test_decorated": "passed"}
    assert found["without"] == {
        **same, "test_plugin": "failed (AssertionError)", "test_plugin_in_subprocess": "failed (CalledProcessError)",
    }, runs["without"]["log"]  # fmt: skip
    assert found["with"] == {**same, "test_plugin": "passed", "test_plugin_in_subprocess": "passed"}, runs["with"][
        "log"
    ]
