"""The gradient scaler of an Accelerator whose models are sharded by a plan."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.torch_private.grad_scaler import ShardedGradScaler


def replace_scaler(accelerator: Any) -> None:
    """Replace the scaler of fp16 training, before optimizers are prepared. Does nothing without a scaler.

    Accelerate's scalers raise, or skip a step on some ranks only, for parameters that FSDP does not shard and for fused
    optimizers.
    """
    if accelerator.scaler is None or isinstance(accelerator.scaler, ShardedGradScaler):
        return
    handler = accelerator.scaler_handler
    settings = handler.to_kwargs() if handler is not None else {}
    accelerator.scaler = ShardedGradScaler(accelerator.device.type, **settings)
