"""Recognizes that a number which is constant during training has changed to another constant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_STABLE: Final = 3
"""Length from which a run counts. The last batch or step of an epoch may be smaller: a run of length one."""
_MAX_VALUES: Final = 8


@dataclass(slots=True)
class Runs:
    """Runs of equal numbers in a sequence. Keeps only the values of stable runs and the current run.

    Attributes:
        values: the distinct values of runs of at least three equal numbers, in order of their first occurrence.
    """

    values: list[int] = field(default_factory=list)
    _current: int | None = None
    _length: int = 0

    def add(self, number: int) -> None:
        """Append a number to the sequence."""
        if number != self._current:
            self._current, self._length = number, 0
        self._length += 1
        if self._length == _STABLE and number not in self.values and len(self.values) < _MAX_VALUES:
            self.values.append(number)
