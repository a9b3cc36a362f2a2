"""The optimizers of a workload."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.tools.plan.estimate.types import Workload, update_loop


def make_optimizers(model: nn.Module, workload: Workload, device_type: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a workload, with the arguments that the Trainer passes. Muon needs AdamW for vectors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name = update_loop(workload, device_type)
    loop: dict[str, Any] = {"fused": True} if name == "fused" else {"foreach": name == "foreach"}
    if workload.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=1e-4, **loop)]
    if workload.optimizer == "adafactor":
        from transformers import Adafactor

        return [Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)]
    if workload.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(parameters, lr=1e-4)]
    if workload.optimizer == "muon":
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        others = [parameter for parameter in parameters if parameter.dim() != 2]
        return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, lr=1e-4, **loop)]
    return [torch.optim.AdamW(parameters, lr=1e-4, **loop)]
