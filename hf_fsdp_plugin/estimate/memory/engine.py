"""What each FSDP version allocates and frees at the events of a unit. Subclasses follow torch's sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from hf_fsdp_plugin.estimate.memory.ledger import Ledger
from hf_fsdp_plugin.estimate.memory.profile import Stage
from hf_fsdp_plugin.estimate.memory.shards import UnitSizes
from hf_fsdp_plugin.plan.model import FsdpPlan


class Engine(ABC):
    """State of all units of a rank during a step.

    Attributes:
        ledger: memory in use.
        syncs: whether gradients are reduced in the current backward.
    """

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitSizes], ledger: Ledger) -> None:
        self.plan, self.ledger = plan, ledger
        self.sizes = {unit.name: unit for unit in sizes}
        self.syncs = True
        self.offloads = plan.offload_params and plan.device_type != "cpu"
        self.gathered: set[str] = set()
        self.order: list[str] = []
        """Units in the order in which their forwards ended."""
        self.accumulated: dict[str, int] = {}
        """Unit -> bytes of whole gradients that are kept while gradients accumulate."""
        self.reduced: set[str] = set()
        """Units with a sharded gradient."""

    @abstractmethod
    def pre_forward(self, name: str) -> None: ...

    @abstractmethod
    def post_forward(self, name: str) -> None: ...

    @abstractmethod
    def pre_backward(self, name: str) -> None: ...

    @abstractmethod
    def post_backward(self, name: str, grads: int) -> None:
        """Complete the backward of a unit.

        Args:
            grads: bytes of the unit's whole gradients, which the ledger contains.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Complete the forward of the root."""

    def run(self, stage: Stage) -> None:
        """Run the operators of a stage, after :class:`Engine` has acted at its start."""
        self.ledger.run(stage.peak, stage.end)

    def end_backward(self) -> None:
        """Complete the backward of the root."""
        self.order.clear()

    def zero_grad(self) -> None:
        """Free the sharded gradients."""
        for name in self.reduced:
            if not self.offloads:
                self.ledger.free("grads", self.sizes[name].grad_shard)
        self.reduced.clear()

    def release(self, name: str) -> None:
        """Free the gathered parameters of a unit."""
        if name in self.gathered:
            self.gathered.remove(name)
            self.ledger.free("gathered", self.sizes[name].gathered)

    def copy_of_collective(self, size: int) -> None:
        """Allocate and free the copy that gloo makes: of an all-gather's output, and of a reduce-scatter's input.

        See ``newLikeFlat`` in ``AsyncAllgatherWork`` and ``reduce_scatter_tensor_coalesced`` in ProcessGroupGloo.cpp.
        NCCL makes none.
        """
        if self.plan.device_type == "cpu":
            self.ledger.add("gathered", size)
            self.ledger.free("gathered", size)

    def predecessor(self, name: str) -> str | None:
        """Return the unit whose forward ended before that of `name`."""
        at = self.order.index(name) if name in self.order else 0
        return self.order[at - 1] if at > 0 else None

    def keep_reduced(self, name: str) -> None:
        """Keep the reduced gradient, which the ledger contains as a new one; add it to an existing one."""
        if self.offloads or name in self.reduced:
            self.ledger.free("grads", self.sizes[name].grad_shard)
        self.reduced.add(name)
