"""The table of sharding strategies. Everything that depends on a strategy is derived from its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

_State = Literal["parameters", "gradients", "optimizer state"]
_ALL: Final[tuple[_State, ...]] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One sharding strategy.

    Attributes:
        name: canonical name.
        number: the number in ``fsdp_sharding_strategy``, which is the value of torch's enum member.
        torch_name: name of the member of ``torch.distributed.fsdp.ShardingStrategy``.
        sharded: the state that is sharded between a unit's forward and backward; empty if nothing is sharded.
        hybrid: whether the shard groups are replicated over a second axis of the mesh.
    """

    name: str
    number: int
    torch_name: str
    sharded: tuple[_State, ...]
    hybrid: bool = False

    @property
    def is_sharded(self) -> bool:
        return bool(self.sharded)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered parameters are freed after a unit's forward and gathered again for its backward."""
        return "parameters" in self.sharded

    @property
    def about(self) -> str:
        """Description: ``full_shard: parameters, gradients, optimizer state``."""
        return f"{self.name}: {', '.join(self.sharded) or 'nothing'}{' (per replica)' if self.hybrid else ''}"

    def counterpart(self, *, hybrid: bool | None = None, reshard: bool | None = None) -> Strategy:
        """Return the strategy that differs only in the given properties. ``no_shard`` returns itself."""
        return strategy_of(
            sharded=self.is_sharded,
            hybrid=self.hybrid if hybrid is None else hybrid,
            reshard=self.reshards_after_forward if reshard is None else reshard,
        )


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Strategy(name="full_shard", number=1, torch_name="FULL_SHARD", sharded=_ALL),
            Strategy(name="shard_grad_op", number=2, torch_name="SHARD_GRAD_OP", sharded=_ALL[1:]),
            Strategy(name="no_shard", number=3, torch_name="NO_SHARD", sharded=()),
            Strategy(name="hybrid_shard", number=4, torch_name="HYBRID_SHARD", sharded=_ALL, hybrid=True),
            Strategy(
                name="hybrid_shard_zero2", number=5, torch_name="_HYBRID_SHARD_ZERO2", sharded=_ALL[1:], hybrid=True
            ),
        )
    }
)
"""Canonical name -> strategy."""

BY_TORCH_NAME: Final[Mapping[str, Strategy]] = MappingProxyType({row.torch_name: row for row in STRATEGIES.values()})
"""Member name of torch's ``ShardingStrategy`` -> strategy."""

DEFAULT_STRATEGY: Final = STRATEGIES["full_shard"]


def strategy_of(*, sharded: bool, hybrid: bool, reshard: bool) -> Strategy:
    """Return the strategy with these properties. Without sharding, ``hybrid`` and ``reshard`` have no effect."""
    if not sharded:
        return STRATEGIES["no_shard"]
    rows = [row for row in STRATEGIES.values() if row.is_sharded]
    return next(row for row in rows if row.hybrid == hybrid and row.reshards_after_forward == reshard)
