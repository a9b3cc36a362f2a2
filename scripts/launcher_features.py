"""What works under which launcher: the table of docs/clusters.md, each cell with the test that shows it.

``tests/unit/test_launcher_features.py`` checks that these tests exist. ``scripts/update_docs.py`` writes the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import yaml

LAUNCHERS: Final = ("hf-fsdp launch", "torchrun", "accelerate launch", "srun", "PyTorchJob", "Ray Train")
NO: Final = "no"
OWN: Final = "its own"
"""Texts of cells without a test: the plugin does not do it, and the launcher does not, or does it itself."""
BEGIN, END = "<!-- launchers:begin -->", "<!-- launchers:end -->"
PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "clusters.md"


class Shown(NamedTuple):
    """A cell that a test shows. The test is in tests/gloo, without ``test_`` in the names of file and function."""

    test: str
    text: str = "yes"

    @property
    def node(self) -> str:
        """The id that pytest has for the test."""
        file, _, name = self.test.partition("::")
        return f"tests/gloo/test_{file}.py::test_{name}"


Cell = Shown | str


def _read() -> Mapping[str, Mapping[str, Cell]]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        feature: {name: cell if isinstance(cell, str) else Shown(**cell) for name, cell in cells.items()}
        for feature, cells in rows.items()
    }


FEATURES: Final = _read()
"""Feature -> launcher -> what it does."""


def table() -> str:
    """Return the table in Markdown."""
    lines = [f"| | {' | '.join(f'`{name}`' if name.islower() else name for name in LAUNCHERS)} |"]
    lines.append("|---" * (len(LAUNCHERS) + 1) + "|")
    for feature, cells in FEATURES.items():
        texts = [cell if isinstance(cell, str) else cell.text for cell in cells.values()]
        lines.append(f"| {feature} | {' | '.join(texts)} |")
    return "\n".join(lines)


def clusters() -> str:
    """Return ``docs/clusters.md`` with the present table."""
    before, begin, rest = PATH.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PATH} has no place for the table"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"
