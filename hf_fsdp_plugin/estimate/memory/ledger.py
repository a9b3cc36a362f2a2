"""Memory in use by kind while a step is followed, and the moments with the most memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_fsdp_plugin.estimate.memory.tracker import Usage
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Bytes in use now by kind. Records the largest usage of each place of the step.

    Attributes:
        live: bytes by kind.
        where: the current place, such as ``forward of model.layers.3``.
        moments: the place with the most memory first recorded at each place, in the order of the step.
    """

    live: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_KINDS, 0))
    where: str = ""
    moments: list[Moment] = field(default_factory=list)

    def at(self, where: str) -> None:
        """Begin another place."""
        if where != self.where:
            self.where = where
            self.moments.append(Moment(where=where, bytes_by_kind=dict(self.live)))

    def add(self, kind: MemoryKind, size: int) -> None:
        """Allocate memory."""
        self.live[kind] += size
        if size > 0:
            self._record(self.live)

    def free(self, kind: MemoryKind, size: int) -> None:
        self.live[kind] -= size

    def run(self, peak: Usage, end: Usage) -> None:
        """Run operators that allocate and free activations and whole gradients."""
        during = dict(self.live)
        during["activations"] += peak.activations
        during["grads"] += peak.grads
        self._record(during)
        self.live["activations"] += end.activations
        self.live["grads"] += end.grads

    def _record(self, usage: dict[MemoryKind, int]) -> None:
        if sum(usage.values()) > self.moments[-1].bytes:
            self.moments[-1] = Moment(where=self.where, bytes_by_kind=dict(usage))
