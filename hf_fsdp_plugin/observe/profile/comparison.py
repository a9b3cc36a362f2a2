"""The planner's predictions beside the measured figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_fsdp_plugin.observe.profile.run_profile import RunProfile

Unit = Literal["seconds", "bytes", "count"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure of a step of a rank; ``None`` if it is unknown."""

    name: str
    unit: Unit
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


def compare(run: RunProfile) -> list[Compared]:
    """Return the rows; empty if there is no prediction. Time needs a calibrated machine.

    Measured are the collectives of the model: the training loop of a script has others, which are not predicted.
    """
    predicted = run.facts.get("predicted")
    if predicted is None:
        return []
    total, communication = run.total, predicted["communication"]
    sums = run.collectives
    rows: list[tuple[str, Unit, float | None, float | None]] = [
        ("time per step", "seconds", predicted.get("step_seconds"), run.unprofiled_seconds or total.seconds),
        ("computation", "seconds", predicted.get("compute_seconds"), total.compute),
        ("communication", "seconds", predicted.get("communication_seconds"), total.communication),
        ("exposed communication", "seconds", predicted.get("exposed_seconds"), total.exposed),
        ("collectives", "count", communication["calls"], sum(each.calls for each in sums.values())),
    ]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        if communication[f"{kind}_bytes"] or kind in sums:
            name = f"{kind.replace('_', '-')} bytes"
            rows.append((name, "bytes", communication[f"{kind}_bytes"], sums[kind].bytes if kind in sums else 0))
    rows.append(("peak memory", "bytes", predicted["per_rank"]["peak_bytes"], measured_peak(run)))
    return [Compared(name=row[0], unit=row[1], predicted=row[2], measured=row[3]) for row in rows]


def measured_peak(run: RunProfile) -> int | None:
    """Return the peak of the tensors of one step; ``None`` if it was not recorded."""
    return max((moment.bytes for moment in run.memory), default=None)
