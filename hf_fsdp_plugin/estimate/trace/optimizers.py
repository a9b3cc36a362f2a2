"""The optimizer of a workload."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.estimate.workload import Workload


def make_optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Return the optimizer of a workload for all trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loop: dict[str, Any] = {
        "for_loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, None: {},
    }[workload.update_loop]  # fmt: skip
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-4, **loop)
    return torch.optim.SGD(parameters, lr=1e-4, **loop)
