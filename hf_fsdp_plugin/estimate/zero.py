"""The formulas for ZeRO of the literature: parameters, gradients and optimizer state of a rank, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_FP32: Final = 4
_ADAM_TENSORS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroRow:
    """Bytes of a rank at one stage.

    Attributes:
        scheme: ``DDP``, ``ZeRO-1``, ``ZeRO-2`` or ``ZeRO-3``.
        fsdp: the closest strategy of FSDP; empty for ZeRO-1, which FSDP has not.
    """

    scheme: str
    fsdp: str
    params: float
    optimizer: float
    grads: float

    @property
    def total(self) -> float:
        return self.params + self.optimizer + self.grads


SHARDED: Final[Mapping[str, tuple[str, bool, bool, bool]]] = {
    "DDP": ("no_shard", False, False, False),
    "ZeRO-1": ("", False, True, False),
    "ZeRO-2": ("shard_grad_op", False, True, True),
    "ZeRO-3": ("full_shard", True, True, True),
}
"""Scheme -> closest strategy of FSDP, and whether parameters, optimizer state and gradients are sharded."""


def zero_table(num_params: float, world_size: int) -> tuple[ZeroRow, ...]:
    """Return the memory of DDP and of the stages of ZeRO with AdamW, everything in fp32.

    Each parameter takes 4 bytes, its gradient 4, and the state of AdamW 8. A stage divides what it shards by the number
    of ranks (Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, figure 1,
    with K = 8 instead of 12, as there are no separate fp16 copies).

    Args:
        num_params: number of parameters.
        world_size: number of ranks, at least 1.
    """
    whole = num_params * _FP32

    def of(size: float, is_sharded: bool) -> float:
        return size / world_size if is_sharded else size

    return tuple(
        ZeroRow(
            scheme=scheme,
            fsdp=fsdp,
            params=of(whole, params),
            optimizer=of(_ADAM_TENSORS * whole, optimizer),
            grads=of(whole, grads),
        )
        for scheme, (fsdp, params, optimizer, grads) in SHARDED.items()
    )


DIFFERENCES: Final = (
    "Real training differs: these formulas assume fp32 everywhere and even shards, and leave out activations, logits, "
    "the gathered parameters of the units in use, buffers of all-gathers and reduce-scatters, the buckets of DDP, and "
    "temporary tensors of the update. FSDP's shard_grad_op keeps whole parameters only between forward and backward, "
    "so its shards are those of ZeRO-3."
)
