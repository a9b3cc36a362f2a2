"""Slow ranks are found over windows of steps, and noise is not."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hf_fsdp_plugin.metrics.figures import NUM_WINDOWS, WINDOW_STEPS, Slower, StragglerSearch
from hf_fsdp_plugin.metrics.rows import Row, Rows

SLOW = (1.0, 1.5, 1.0)
EVEN = (1.0, 1.1, 1.0)


def windows(*own: tuple[float, ...]) -> Iterator[Rows]:
    """The rows after each window, in which the ranks compute for these seconds per step, and wait for the slowest."""
    rows = {rank: Row(step=WINDOW_STEPS, time=1000.0) for rank in range(len(own[0]))}
    yield dict(rows)
    for seconds in own:
        for rank, each in enumerate(seconds):
            row, step = rows[rank], max(seconds)
            times = {"forward": row.forward + WINDOW_STEPS * each}
            times |= {"waiting": row.waiting + WINDOW_STEPS * (step - each)}
            rows[rank] = row._replace(
                step=row.step + WINDOW_STEPS,
                measured=row.measured + WINDOW_STEPS,
                time=row.time + WINDOW_STEPS * step,
                **times,
            )
        yield dict(rows)


def found(*own: tuple[float, ...], share: float = 0.2) -> list[Slower | None]:
    """What is reported after each window."""
    search = StragglerSearch(share, seconds=1.0)
    return [search.add(rows) for rows in windows(*own)][1:]


def test_slow_rank_is_reported_once() -> None:
    reports = found(*[SLOW] * (NUM_WINDOWS + 5))
    assert [each is not None for each in reports] == [False] * (NUM_WINDOWS - 1) + [True] + [False] * 5
    report = reports[NUM_WINDOWS - 1]
    assert report is not None
    assert (report.rank, report.phase, round(report.by, 6)) == (1, "forward", 0.5)


def test_rank_that_recovers_is_reported_again() -> None:
    again = found(*[SLOW] * NUM_WINDOWS, *[EVEN] * NUM_WINDOWS, *[SLOW] * NUM_WINDOWS)
    assert sum(each is not None for each in again) == 2
    still = found(*[SLOW] * NUM_WINDOWS, EVEN, *[SLOW] * NUM_WINDOWS)
    assert sum(each is not None for each in still) == 1


def test_rank_within_the_share_is_not_reported() -> None:
    assert not any(found(*[EVEN] * 10))
    assert any(found(*[EVEN] * 10, share=0.05))


def test_noise_that_moves_between_ranks_is_not_reported() -> None:
    source, own = random.Random(0), list[tuple[float, ...]]()
    while len(own) < 200:
        slow = source.choice([rank for rank in range(4) if not own or own[-1][rank] == 1.0])
        own.append(tuple(2.0 if rank == slow else 1.0 for rank in range(4)))
    assert not any(found(*own))


def test_window_has_enough_time_and_steps() -> None:
    search = StragglerSearch(0.2, seconds=1e6)
    assert not any(map(search.add, windows(*[SLOW] * 10)))
    assert not search.is_due(1001.0)
    assert search.is_due(1000.0 + 1e6)


def test_first_steps_are_not_judged() -> None:
    search = StragglerSearch(0.2, seconds=0.0)
    assert search.add({0: Row(step=1), 1: Row(step=1)}) is None
    assert search.add({}) is None
    assert search.is_due(0.0)
