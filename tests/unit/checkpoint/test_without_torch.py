"""Checkpoints are inspected and verified without importing torch."""

from __future__ import annotations

import subprocess
import sys


def test_readers_load_no_torch() -> None:
    modules = ("checking.inspection", "checking.verify")
    program = "; ".join(f"import hf_fsdp_plugin.checkpoint.{module}" for module in modules)
    program = f"import sys; {program}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
