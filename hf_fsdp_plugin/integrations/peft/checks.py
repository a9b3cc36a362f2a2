"""Checks of a model with adapters before it is sharded."""

from __future__ import annotations

from typing import Final

from torch import nn

from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError

_READS_MATRICES: Final = ("ADALORA",)
"""Kinds of adapters that compute with whole parameters and gradients outside of the forward of a layer."""


def check_adapters(model: nn.Module) -> None:
    """Raise ``SpecError`` for adapters that would train with one rank's shards as if they were whole matrices."""
    configs = getattr(unwrapped(model), "peft_config", None)
    found = [
        f"{name!r} ({kind})"
        for name, config in (configs.items() if isinstance(configs, dict) else ())
        if (kind := str(getattr(config.peft_type, "value", config.peft_type))) in _READS_MATRICES
    ]
    if found:
        message = (
            f"the adapter {', '.join(found)} is not supported with FSDP: AdaLoRA computes its regularization and the "
            "importance of ranks from whole matrices and gradients, and each rank has only parts of them."
        )
        raise SpecError([Problem(code="FSDP-E630", message=message, fix="Use LoRA, or train without FSDP.")])
