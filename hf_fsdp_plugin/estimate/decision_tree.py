"""The rule of thumb that guides print: a strategy by the number of parameters alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from hf_fsdp_plugin.text import format_bytes, format_count

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner_rows import Advice, AdviceRow

_TREE: Final = (
    (3 * 10**9, "no_shard", False),
    (13 * 10**9, "shard_grad_op", False),
    (70 * 10**9, "full_shard", False),
    (None, "full_shard", True),
)
"""Largest number of parameters, strategy, and whether parameters are offloaded."""
_ROUNDED: Final = 1.03
"""A model is named by its rounded size: Llama 70B has 70.6 billion parameters."""


def tree_choice(num_params: int) -> tuple[str, bool]:
    """Return strategy and offload: DDP up to 3 B parameters, ZeRO-2 to 13 B, ZeRO-3 to 70 B, then with offload."""
    for largest, strategy, offload in _TREE:
        if largest is None or num_params <= largest * _ROUNDED:
            return strategy, offload
    raise AssertionError("the last row has no limit")


def compare_with_tree(advice: Advice, num_params: int) -> str:
    """Return whether the best row is the one of the decision tree, and if not, why."""
    strategy, offload = tree_choice(num_params)
    name = f"{strategy} with offload of parameters" if offload else strategy
    rule = f"The usual decision tree by size alone ({format_count(num_params)} parameters) gives {name}"
    best = advice.best
    if best is None:
        return f"{rule}, which does not fit either."
    if (best.choice.sharding.strategy, best.choice.offload_params) == (strategy, offload):
        return f"{rule}, as the planner does."
    if offload:
        return f"{rule}. It fits without offload here, which would copy all parameters over the host link in each pass."
    of_tree = _best_of(row for row in advice.rows if row.choice.sharding.strategy == strategy)
    if of_tree is None:
        return f"{rule}, which was not compared."
    if not of_tree.fits:
        return f"{rule}. It does not fit: it {of_tree.reason}."
    reason = f"it {'is ' if of_tree.tokens_per_second else ''}{of_tree.reason}"
    return f"{rule}. It fits with {format_bytes(of_tree.needed_bytes, binary=True)}, but {reason}."


def _best_of(rows: Iterable[AdviceRow]) -> AdviceRow | None:
    rows = list(rows)
    return next((row for row in rows if row.fits), rows[0] if rows else None)
