"""The table of sharding strategies. What depends on a strategy is derived from its row.

Texts about strategies are also in ``tools/config/questions.py``, ``tools/bench`` and ``tools/profile``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Strategy:
    """One sharding strategy.

    Attributes:
        name: canonical name.
        number: the number in ``fsdp_sharding_strategy``, which is the value of torch's enum member.
        torch_name: name of the member of ``torch.distributed.fsdp.ShardingStrategy``.
        is_sharded: whether gradients and optimizer state are sharded.
        reshards_after_forward: whether gathered parameters are freed after a unit's forward and gathered again for its
            backward.
        hybrid: whether the shard groups are replicated over a second axis of the mesh.
    """

    name: str
    number: int
    torch_name: str
    reshards_after_forward: bool
    is_sharded: bool = True
    hybrid: bool = False

    @property
    def about(self) -> str:
        """Description: ``full_shard: parameters, gradients, optimizer state``."""
        parameters = "parameters, " if self.reshards_after_forward else ""
        sharded = f"{parameters}gradients, optimizer state" if self.is_sharded else "nothing"
        return f"{self.name}: {sharded}{' (per replica)' if self.hybrid else ''}"

    def counterpart(self, *, hybrid: bool | None = None, reshard: bool | None = None) -> Strategy:
        """Return the strategy that differs only in the given properties. ``no_shard`` returns itself."""
        return strategy_of(
            sharded=self.is_sharded,
            hybrid=self.hybrid if hybrid is None else hybrid,
            reshard=self.reshards_after_forward if reshard is None else reshard,
        )


_ROWS: Final = (
    Strategy("full_shard", 1, "FULL_SHARD", reshards_after_forward=True),
    Strategy("shard_grad_op", 2, "SHARD_GRAD_OP", reshards_after_forward=False),
    Strategy("no_shard", 3, "NO_SHARD", reshards_after_forward=False, is_sharded=False),
    Strategy("hybrid_shard", 4, "HYBRID_SHARD", reshards_after_forward=True, hybrid=True),
    Strategy("hybrid_shard_zero2", 5, "_HYBRID_SHARD_ZERO2", reshards_after_forward=False, hybrid=True),
)
STRATEGIES: Final[Mapping[str, Strategy]] = {row.name: row for row in _ROWS}
"""Canonical name -> strategy."""

BY_TORCH_NAME: Final[Mapping[str, Strategy]] = {row.torch_name: row for row in _ROWS}
"""Member name of torch's ``ShardingStrategy`` -> strategy."""

DEFAULT_STRATEGY: Final = STRATEGIES["full_shard"]


def strategy_of(*, sharded: bool, hybrid: bool, reshard: bool) -> Strategy:
    """Return the strategy with these properties. Without sharding, ``hybrid`` and ``reshard`` have no effect."""
    if not sharded:
        return STRATEGIES["no_shard"]
    rows = [row for row in STRATEGIES.values() if row.is_sharded]
    return next(row for row in rows if row.hybrid == hybrid and row.reshards_after_forward == reshard)
