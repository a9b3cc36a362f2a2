"""Runs checks of scripts/gpu_check.sh on ranks of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


def run(case: dict[str, Any], fault: str = "") -> Any:
    """Return the figures of a case, which raises an error if it fails, the codes of its refusal, or why it is skipped.

    Args:
        fault: what is wrong in this package: a ``wait`` in each step, loaded ``weights``, or predicted ``memory``.
    """
    import hf_fsdp_plugin as hfp
    from scripts.bench.gpu_checks import Skipped, run_check

    try:
        with _faulty(fault):
            return run_check(case)
    except Skipped as error:
        return str(error)
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]


@contextmanager
def _faulty(fault: str) -> Iterator[None]:
    import torch

    from hf_fsdp_plugin.tools.bench.rank import Loop
    from scripts.bench.gpu_checks import loading, memory

    step, load, measure = Loop.step, loading._load, memory.measure

    def waiting_step(self: Any, batch: Any) -> Any:
        loss = step(self, batch)
        if self.hooked:
            loss.item()
        return loss

    def wrong_load(*args: Any, stock: bool) -> Any:
        seconds, model = load(*args, stock=stock)
        if not stock:
            with torch.no_grad():
                loading.local(next(model.parameters())).add_(1)
        return seconds, model

    def other_memory(*args: Any) -> dict[str, int]:
        return {name: 2 * size for name, size in measure(*args).items()}

    faults = {
        "wait": (Loop, "step", waiting_step),
        "weights": (loading, "_load", wrong_load),
        "memory": (memory, "measure", other_memory),
    }
    if not fault:
        yield
        return
    target, name, replacement = faults[fault]
    with patch.object(target, name, replacement):
        yield
