"""What one rank trains in one optimizer step: sizes of a micro-batch, accumulation and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["adamw", "sgd", "adafactor", "adamw_8bit", "muon"]
UpdateLoop = Literal["for_loop", "foreach", "fused"]
"""How the optimizer runs over the parameters: torch's arguments ``foreach`` and ``fused``, or neither."""
Attention = Literal["eager", "sdpa", "flash_attention_2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One optimizer step of one rank.

    Attributes:
        micro_batch: samples per rank and forward pass.
        seq_len: tokens per sample, with padding.
        accumulation: micro-batches per optimizer step.
        sync_each_batch: whether gradients are reduced after every micro-batch. If not, ranks keep whole gradients of
            all units until the last micro-batch (``no_sync``, Accelerate's default).
        optimizer: adamw_8bit is bitsandbytes' ``AdamW8bit``.
        update_loop: ``None`` for the default: ``fused`` for AdamW on CUDA, as the Trainer's; else torch's on the
            device, ``foreach`` on accelerators and ``for_loop`` on the CPU.
        clip_norm: whether gradients are clipped by their norm before the step (the Trainer's default).
        autocast: whether the script runs the forward pass under ``Accelerator.autocast()`` in mixed precision. Neither
            the Trainer nor this package's ``prepare`` does: FSDP casts parameters and inputs.
        attention: Transformers' ``attn_implementation``.
    """

    micro_batch: int
    seq_len: int
    accumulation: int = 1
    sync_each_batch: bool = False
    optimizer: Optimizer = "adamw"
    update_loop: UpdateLoop | None = None
    clip_norm: bool = True
    autocast: bool = False
    attention: Attention = "sdpa"

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.seq_len
