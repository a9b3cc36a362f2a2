"""State of the optimizers, and temporary tensors of their updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, prod

import torch

from hf_fsdp_plugin.estimate.memory.shards import Shard
from hf_fsdp_plugin.estimate.workload import Optimizer, UpdateLoop, Workload

_STEP = 4
"""Bytes of the step count, an fp32 tensor per parameter (``_init_group`` in ``torch/optim/adam.py``)."""
_MIN_8BIT = 4096
"""Smallest number of elements whose state bitsandbytes keeps in 8 bits (``min_8bit_size`` of ``Optimizer2State``)."""
_BLOCK = 256
"""Elements of a block that share a scale in bitsandbytes' 8-bit state."""
_CODE_BOOKS = 2 * 256 * 4
"""Bytes of the two tables from 8-bit codes to fp32 values."""


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


def state_bytes(optimizer: Optimizer, shards: Iterable[Shard]) -> int:
    """Return the bytes of an optimizer's state for the trainable shards of a rank.

    ``adamw``: two tensors like the parameter. ``sgd``: none, as momentum is 0 by default. ``adafactor`` (Transformers):
    sums of rows and columns of whole matrices, which every rank has. ``adamw_8bit``: two bytes per element and two fp32
    scales per 256 elements. ``muon``: one tensor for matrices, and AdamW's two for other parameters.
    """
    return sum(_state_of(optimizer, shard) for shard in shards if shard.trainable) + (
        _CODE_BOOKS if optimizer == "adamw_8bit" else 0
    )


def _state_of(optimizer: Optimizer, shard: Shard) -> int:
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


def update_bytes(workload: Workload, device_type: str, shards: Sequence[Shard]) -> int:
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
        return max(matrices, default=0) * 4 * torch.bfloat16.itemsize
    return _adamw(update_loop(workload, device_type), [prod(shard.shape) * shard.dtype.itemsize for shard in trained])


def _adamw(loop: UpdateLoop, sizes: list[int]) -> int:
    if loop == "fused":
        return 0
    if loop == "foreach":
        return sum(sizes)
    return max([2 * sizes[0], *(before + 2 * size for before, size in pairwise(sizes))])
