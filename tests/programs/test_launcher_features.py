"""The part of tests/unit/test_launcher_features.py that starts processes or computes for seconds."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.unit.test_launcher_features import ROOT


def test_cells_name_tests_that_are_collected() -> None:
    from scripts.launcher_features import FEATURES, LAUNCHERS, NO, OWN, Shown

    assert all(tuple(cells) == LAUNCHERS for cells in FEATURES.values())
    cells = [cell for row in FEATURES.values() for cell in row.values()]
    assert {cell for cell in cells if isinstance(cell, str)} <= {NO, OWN}
    nodes = {cell.node for cell in cells if isinstance(cell, Shown)}
    files = sorted({node.partition("::")[0] for node in nodes})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}  # -v would change what is printed
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert nodes - set(done.stdout.splitlines()) == set()
