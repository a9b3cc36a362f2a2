"""Optimizer state in host memory: exact losses, the memory of two windows, no waits, and saves of the host's copy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.optimization import Adafactor

from hf_fsdp_plugin.backends.optimizers import offloaded_steps
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.support.ranks import Ranks
from tests.support.tiny import MODELS, parallel_config, tiny_llama
from tests.support.training import OptimizerOf, adamw, fresh_accelerator, loss_of, sgd, train

WINDOW = 16 << 10
"""Bytes of a window in these tests, so that small models have several."""


def _config(version: int, *, offload: bool, strategy: str = "full_shard", ranks: int = 2, **other: Any) -> Any:
    return parallel_config(strategy, version, ranks, use_cpu=False, fsdp_offload_optimizer=offload, **other)


def of_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW with two groups, of matrices and of vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def of_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(model.parameters(), lr=1e-3, relative_step=False, beta1=0.9)


def both(version: int, optimizer_of: OptimizerOf, accumulation: int = 1, **config: Any) -> tuple[Any, Any, Any]:
    """Losses, norms and weights with state in host memory and on the device, and what the first report says of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded_steps, "WINDOW", WINDOW)
        found = [
            train("llama", _config(version, offload=offload, **config), optimizer_of, accumulation=accumulation)
            for offload in (True, False)
        ]
    report = next(row for row in found[0]["report"]["settings"] if row["setting"] == "offload.optimizer")
    return *({key: each[key] for key in ("losses", "norms", "weights")} for each in found), report


CASES = {
    "adamw": (of_adamw, {}),
    "foreach": (partial(of_adamw, foreach=True, amsgrad=True), {"accumulation": 2}),
    "fused": (partial(of_adamw, fused=True), {"fsdp_use_orig_params": True}),
    "sgd": (sgd, {"mixed_precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_offload_does_not_change_training(two_accelerator_ranks: Ranks, version: int, case: str) -> None:
    optimizer_of, options = CASES[case]
    for offloaded, plain, report in two_accelerator_ranks.run(both, version, optimizer_of, **options):
        assert offloaded["losses"] == plain["losses"] and offloaded["norms"] == plain["norms"]
        assert all(torch.equal(value, plain["weights"][key]) for key, value in offloaded["weights"].items())
        assert (report["observed"], report["status"]) == (True, "applied")
