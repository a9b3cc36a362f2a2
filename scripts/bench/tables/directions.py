"""Which way is better for each figure of the results: ``directions.yaml``. ``compare.py`` reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

Better = Literal["smaller", "larger", "nearer 0", "not compared"]


@dataclass(frozen=True, slots=True)
class Direction:
    """``floor``: a change of less than this, in the unit of the figure, does not count."""

    pattern: str
    better: Better
    floor: float = 0.0


def _read() -> tuple[Direction, ...]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for row in rows:
        if last := row.pop("last", ""):
            row["pattern"] = rf"(^|/)({'|'.join(last.split())})$"
    return tuple(Direction(**row) for row in rows)


DIRECTIONS: Final = _read()


def direction_of(name: str) -> Direction | None:
    """Return the row of a figure; ``None`` if the table has none."""
    return next((row for row in DIRECTIONS if re.search(row.pattern, name)), None)
