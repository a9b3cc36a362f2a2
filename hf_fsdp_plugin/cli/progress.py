"""Progress on stderr: bars for verbs that read or write many bytes, and the stage of a preflight."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


class ProgressBars:
    """A progress bar for each step of a verb; none if stderr is not a terminal."""

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[Any]] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def __call__(self, step: str, count: int, total: int) -> None:
        """Add ``count`` of ``total`` bytes to the bar of a step."""
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm

        if step not in self._bars:
            self._bars[step] = tqdm(total=total, desc=step, unit="B", unit_scale=True, leave=False)
        self._bars[step].update(count)


class StageProgress:
    """One line with the running stage of a preflight; none if stderr is not a terminal."""

    def __init__(self) -> None:
        self._shown: str | None = None

    def show(self, stage: str | None) -> None:
        """Replace the line; ``None`` removes it."""
        if stage == self._shown or not sys.stderr.isatty():
            return
        self._shown = stage
        print(f"\r\033[K{f'preflight: {stage} …' if stage else ''}", end="", file=sys.stderr, flush=True)
