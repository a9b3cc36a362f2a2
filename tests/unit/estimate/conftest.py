"""Lets the tests import the library that traces a step, which the benchmarks use too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))
