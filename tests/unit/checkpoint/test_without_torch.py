"""Checkpoints are inspected and verified, and configs are read, without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

VERBS = (
    "check", "completion", "config", "convert", "doctor", "explain", "inspect", "migrate", "profile", "schema",
    "verify",
)  # fmt: skip
MODULES = {
    "readers": [f"checkpoint.checking.{name}" for name in ("completeness", "hashes")],
    "verbs": [f"tools.{name}.verb" for name in VERBS],
}


@pytest.mark.parametrize("what", MODULES)
def test_modules_load_no_torch(what: str) -> None:
    program = "; ".join(f"import hf_fsdp_plugin.{module}" for module in MODULES[what])
    program = f"import sys; {program}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
