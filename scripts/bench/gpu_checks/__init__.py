"""The checks of gpu_check.py, one file per subject. Every check also runs on CPU ranks, where it shows less."""

from __future__ import annotations

import copy
import gc

from scripts.bench.gpu_checks import (  # noqa: F401  (add checks)  # noqa: F401
    adapters,
    groups,
    launched,
    layers,
    loading,
    memory,
    recovery,
    saving,
    speed,
    training,
)
from scripts.bench.gpu_checks.base import CHECKS, Case, Check, Skipped, device_module, on_accelerator, reset_process

__all__ = ["CHECKS", "Case", "Check", "Skipped", "run_check"]


def run_check(case: Case) -> Case:
    """Run the check of a case on this rank, and return its figures.

    Raises:
        Skipped: the check cannot run here.
        RuntimeError: the check failed.
    """
    try:
        return CHECKS[case["check"]].function(copy.deepcopy(case))
    finally:
        from hf_fsdp_plugin.integrations.saving import manager

        manager().close()  # its buffers are pinned for the next save
        reset_process()
        if on_accelerator(case):
            gc.collect()
            device_module(case).empty_cache()
