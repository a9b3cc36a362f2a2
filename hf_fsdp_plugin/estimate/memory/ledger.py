"""Memory in use by kind while a step is followed, and the moments with the most memory."""

from __future__ import annotations

from hf_fsdp_plugin.estimate.memory.tracker import Usage
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment


class Ledger:
    """Bytes in use now by kind. Records the largest usage of each place of the step.

    Attributes:
        where: the current place, such as ``forward of model.layers.3``.
    """

    def __init__(self) -> None:
        self._live: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self._total = 0
        self.where = ""
        self._places: list[str] = []
        self._largest: list[int] = []
        self._kinds: list[dict[MemoryKind, int]] = []

    @property
    def num_places(self) -> int:
        return len(self._places)

    def moments(self, start: int = 0) -> tuple[Moment, ...]:
        """Return the largest moment of each place from `start` on, in the order of the step."""
        rows = zip(self._places[start:], self._kinds[start:], strict=True)
        return tuple(Moment(where=where, bytes_by_kind=kinds) for where, kinds in rows)

    def peak(self) -> Moment:
        """Return the largest moment of all."""
        at = max(range(len(self._places)), key=self._largest.__getitem__)
        return Moment(where=self._places[at], bytes_by_kind=self._kinds[at])

    def at(self, where: str) -> None:
        """Begin another place."""
        if where != self.where:
            self.where = where
            self._places.append(where)
            self._largest.append(self._total)
            self._kinds.append(self._live.copy())

    def add(self, kind: MemoryKind, size: int) -> None:
        """Allocate memory."""
        self._live[kind] += size
        self._total += size
        if self._total > self._largest[-1]:
            self._largest[-1] = self._total
            self._kinds[-1] = self._live.copy()

    def free(self, kind: MemoryKind, size: int) -> None:
        self._live[kind] -= size
        self._total -= size

    def run(self, peak: Usage, end: Usage) -> None:
        """Run operators that allocate and free activations and whole gradients."""
        live = self._live
        activations, grads = peak
        if self._total + activations + grads > self._largest[-1]:
            self._largest[-1] = self._total + activations + grads
            during = live.copy()
            during["activations"] += activations
            during["grads"] += grads
            self._kinds[-1] = during
        activations, grads = end
        live["activations"] += activations
        live["grads"] += grads
        self._total += activations + grads
