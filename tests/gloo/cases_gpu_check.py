"""Runs checks of scripts/gpu_check.sh on CPU ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(case: dict[str, Any]) -> Any:
    """Return the measurements of a case, which raises an error if it fails, or the codes of its refusal."""
    import hf_fsdp_plugin as hfp

    sys.path.insert(0, str(BENCH))
    try:
        import gpu_checks_launched  # noqa: F401  (adds its checks)
        from gpu_checks import run_check

        return run_check(case)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    finally:
        sys.path.remove(str(BENCH))
