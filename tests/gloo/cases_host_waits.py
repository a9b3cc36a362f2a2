"""Functions for tests/gloo/test_host_waits.py that run on ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from bench import host_waits_ranks as bench


def count_in_steps(version: int, case: str) -> dict[str, list[int]]:
    """Number of host waits in each step, stock and with the plugin."""
    options = {**bench.SETTINGS, **bench.STEP_CASES[case], "FSDP_VERSION": str(version)}
    return {who: [len(waits) for waits in bench.steps(who, options)] for who in ("stock", "plugin")}


def count_in_checkpoints(folder: Path, version: int, num_layers: int) -> dict[str, int]:
    """Number of host waits of the plugin in loading, saving and resuming."""
    options = {**bench.SETTINGS, "FSDP_VERSION": str(version)}
    waits = bench.load_save_resume("plugin", folder / str(num_layers), num_layers, options)
    dist.barrier()
    return {phase: len(found) for phase, found in waits.items()}
