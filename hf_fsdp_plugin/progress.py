"""Progress bars of long saves, loads and preparations: on rank 0, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_fsdp_plugin.rank_variables import launched_rank

DELAY = 1.0
"""Seconds until a bar appears, so that short saves show none."""


@contextmanager
def progress_bar(step: str, total: int, *, delay: float | None = None) -> Iterator[Callable[[int], object]]:
    """Show the progress of this rank. Yields a function that is called with the bytes since its last call.

    Args:
        step: what is done, such as ``saving``.
        total: number of bytes.
        delay: seconds until the bar appears, instead of ``DELAY``.
    """
    if launched_rank() != 0 or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from tqdm import tqdm

    seconds = DELAY if delay is None else delay
    with tqdm(total=total, desc=step, unit="B", unit_scale=True, leave=False, delay=seconds) as bar:
        yield bar.update
