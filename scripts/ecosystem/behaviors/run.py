"""Runs behaviors one after the other on this rank: ``run.py GROUP/FUNCTION …``. Each has its own folder and seed.

Rank 0 writes ``behaviors/GROUP/FUNCTION/numbers.json``; a rank whose behavior raises writes ``error-rank0.txt``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate.state import AcceleratorState, GradientState
from transformers import set_seed

HERE = Path(__file__).resolve().parent
# Modules in this folder have names of packages.
sys.path[:] = [str(HERE.parents[2]), *(path for path in sys.path if Path(path).resolve() != HERE)]


def main() -> None:
    start, environ, rank = Path.cwd(), dict(os.environ), int(os.environ.get("RANK", "0"))
    # Accelerator.end_training() ends the process group. The ranks keep it for the next behavior.
    dist.destroy_process_group = lambda *_args: None
    for name in sys.argv[1:]:
        folder = start / "behaviors" / name
        os.chdir(folder)
        try:
            set_seed(0)
            found = numbers_of(call(name))
        except BaseException:
            (folder / f"error-rank{rank}.txt").write_text(traceback.format_exc())
        else:
            done = folder / f"numbers-rank{rank}.json"
            done.with_suffix(".tmp").write_text(json.dumps(found))
            done.with_suffix(".tmp").rename(done)
        print(f"{name}: rank {rank} has ended", flush=True)
        os.chdir(start)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environ)
        torch.set_default_dtype(torch.float32)
        gc.collect()


def call(name: str) -> Any:
    from scripts.ecosystem.behaviors.common import train_row

    group, function = name.split("/")
    if (
        row := yaml.safe_load((HERE / "behaviors.yaml").read_text(encoding="utf-8")).get(group, {}).get(function)
    ) is not None:
        return train_row(**row)
    return getattr(importlib.import_module(f"scripts.ecosystem.behaviors.{group}"), function)()


def numbers_of(result: Any) -> dict[str, float]:
    """Return what is compared: the history of a Trainer, or the numbers that a loop returns."""
    if isinstance(result, dict):
        return {name: float(value) for name, value in result.items()}
    if isinstance(result, list):
        return {f"{number} loss": float(value) for number, value in enumerate(result)}
    return {
        f"{number} step {row['step']} {name}": float(value)
        for number, row in enumerate(result.state.log_history)
        for name, value in row.items()
        if isinstance(value, (int, float))
    }


if __name__ == "__main__":
    main()
