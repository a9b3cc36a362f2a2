"""What one rank trains in one optimizer step, and what its optimizer allocates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.unit_sizes import ParameterShard

Optimizer = Literal["adamw", "sgd", "adafactor", "adamw_8bit", "muon"]
UpdateLoop = Literal["for_loop", "foreach", "fused"]
"""How the optimizer runs over the parameters: torch's arguments ``foreach`` and ``fused``, or neither."""
Attention = Literal["eager", "sdpa", "flash_attention_2"]

_STEP: Final = 4
"""Bytes of the step count, an fp32 tensor per parameter (``_init_group`` in ``torch/optim/adam.py``)."""
_MIN_8BIT: Final = 4096
"""Smallest number of elements whose state bitsandbytes keeps in 8 bits (``min_8bit_size`` of ``Optimizer2State``)."""
_BLOCK: Final = 256
"""Elements of a block that share a scale in bitsandbytes' 8-bit state."""
_CODE_BOOKS: Final = 2 * 256 * 4
"""Bytes of the two tables from 8-bit codes to fp32 values."""


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
        attention: Transformers' ``attn_implementation``.
    """

    micro_batch: int
    seq_len: int
    accumulation: int = 1
    sync_each_batch: bool = False
    optimizer: Optimizer = "adamw"
    update_loop: UpdateLoop | None = None
    clip_norm: bool = True
    attention: Attention = "sdpa"

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.seq_len


def update_loop(workload: Workload, device_type: str) -> UpdateLoop:
    """Return how the optimizer runs over the parameters.

    Unless the workload sets it: the Trainer's default for AdamW on CUDA (``optim`` of TrainingArguments is
    ``adamw_torch_fused``), else torch's default on the device.
    """
    if workload.update_loop is not None:
        return workload.update_loop
    if device_type == "cuda" and workload.optimizer == "adamw":
        return "fused"
    return "for_loop" if device_type == "cpu" else "foreach"


def state_bytes(optimizer: Optimizer, shards: Iterable[ParameterShard]) -> int:
    """Return the bytes of an optimizer's state for the trainable shards of a rank.

    ``adamw``: two tensors like the parameter. ``sgd``: none, as momentum is 0 by default. ``adafactor`` (Transformers):
    sums of rows and columns of whole matrices, which every rank has. ``adamw_8bit``: two bytes per element and two fp32
    scales per 256 elements. ``muon``: one tensor for matrices, and AdamW's two for other parameters.
    """
    return sum(_state_of(optimizer, shard) for shard in shards if shard.trainable) + (
        _CODE_BOOKS if optimizer == "adamw_8bit" else 0
    )


def _state_of(optimizer: Optimizer, shard: ParameterShard) -> int:
    size = prod(shard.shape) * shard.dtype.itemsize
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":
        if len(shard.whole) < 2:
            return prod(shard.whole) * 4
        *rows, columns = shard.whole
        return (prod(rows) + prod(rows[:-1]) * columns) * 4
    if optimizer == "adamw_8bit" and prod(shard.shape) >= _MIN_8BIT:
        return 2 * (prod(shard.shape) + ceil(prod(shard.shape) / _BLOCK) * 4)
    if optimizer == "adamw_8bit":
        return 2 * prod(shard.shape) * 4
    if optimizer == "muon" and len(shard.whole) == 2:
        return size
    return 2 * size + _STEP


def update_bytes(workload: Workload, device_type: str, shards: Sequence[ParameterShard]) -> int:
    """Return the bytes of temporary tensors at the worst moment of an update.

    ``for_loop``: a step of AdamW computes ``sqrt`` of the second moment and its quotient, and keeps the quotient until
    the next parameter's is computed. ``foreach``: the square roots of all parameters. ``fused``: none. Adafactor
    gathers one parameter and its gradient, and computes the update in fp32; Muon orthogonalizes one matrix in bf16.
    """
    trained = [shard for shard in shards if shard.trainable]
    if not trained or workload.optimizer in ("adamw_8bit", "sgd"):
        return 0
    if workload.optimizer == "adafactor":
        # parameter, gradient, its square and the update in fp32 (``Adafactor.step`` of Transformers)
        return max(prod(shard.whole) for shard in trained) * 4 * 4
    if workload.optimizer == "muon":
        matrices = [prod(shard.whole) for shard in trained if len(shard.whole) == 2]
        # gradient, iterate and its two products in bf16 (``_zeropower_via_newtonschulz`` of torch/optim/_muon.py)
        return max(matrices, default=0) * 4 * 2
    return _adamw(update_loop(workload, device_type), [prod(shard.shape) * shard.dtype.itemsize for shard in trained])


def _adamw(loop: UpdateLoop, sizes: list[int]) -> int:
    if loop == "fused":
        return 0
    if loop == "foreach":
        return sum(sizes)
    return max([2 * sizes[0], *(before + 2 * size for before, size in pairwise(sizes))])


def nearest_multiples(count: int, divisor: int) -> str:
    """Return the multiples of a divisor below and above a number that is not one itself, such as ``64 or 72``."""
    below = count - count % divisor
    return f"{below} or {below + divisor}" if below > 0 else str(divisor)
