"""The table of sharding strategies. Everything that depends on a strategy is derived from its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

State = Literal["parameters", "gradients", "optimizer state"]
_ALL: Final[tuple[State, ...]] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One sharding strategy.

    Attributes:
        name: canonical name.
        number: the number in ``fsdp_sharding_strategy``; the value of torch's enum member.
        torch_name: the member of ``torch.distributed.fsdp.ShardingStrategy``.
        sharded: the state that is sharded between a unit's forward and its backward. Empty: nothing is ever sharded.
        hybrid: whether the shard groups are replicated over a second axis of the mesh.
        spellings: other names, in lower case, without a leading underscore.
    """

    name: str
    number: int
    torch_name: str
    sharded: tuple[State, ...]
    hybrid: bool = False
    spellings: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        return bool(self.sharded)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered parameters are freed after a unit's forward and gathered again for its backward."""
        return "parameters" in self.sharded

    @property
    def about(self) -> str:
        """``full_shard: parameters, gradients, optimizer state``."""
        return f"{self.name}: {', '.join(self.sharded) or 'nothing'}{' (per replica)' if self.hybrid else ''}"

    def counterpart(self, *, hybrid: bool | None = None, reshard: bool | None = None) -> Strategy | None:
        """The strategy that differs from this one only in the given properties; ``None`` where there is none."""
        hybrid = self.hybrid if hybrid is None else hybrid
        state: set[str] = {*self.sharded}
        if reshard is not None and self.is_sharded:
            state = state | {"parameters"} if reshard else state - {"parameters"}
        return next((row for row in STRATEGIES.values() if row.hybrid == hybrid and {*row.sharded} == state), None)


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
"""Name of a member of torch's ``ShardingStrategy`` -> strategy."""

DEFAULT: Final = STRATEGIES["full_shard"]


def strategy_of(*, sharded: bool, hybrid: bool, reshard: bool) -> Strategy:
    """The strategy of a unit whose mesh and reshard flag are known."""
    if not sharded:
        return next(row for row in STRATEGIES.values() if not row.is_sharded)
    found = DEFAULT.counterpart(hybrid=hybrid, reshard=reshard)
    assert found is not None, "every combination of hybrid and reshard has a row"
    return found
