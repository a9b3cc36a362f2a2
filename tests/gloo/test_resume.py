"""Training resumes from a checkpoint in other world sizes, strategies, versions and state dict types."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import cases_resume as cases
import pytest
from matrices import slow
from ranks import Ranks

EXACT, REORDERED = 1e-6, 1e-4
"""Relative difference of losses: the same sums in the same order, and the same sums in another one."""


def config(version: int, kind: str, strategy: str = "full_shard", **more: Any) -> dict[str, Any]:
    settings = {"fsdp_version": version, "state_dict_type": kind, "sharding_strategy": strategy, **more}
    return {"fsdp": "auto_wrap", "fsdp_config": settings}


def assert_continues(found: dict[str, Any], whole: dict[str, Any], start: int, tolerance: float) -> None:
    """The next ten losses equal those of the uninterrupted run."""
    steps = range(start + 1, min(start + 10, cases.NUM_STEPS) + 1)
    for step in steps:
        assert found["losses"][step] == pytest.approx(whole["losses"][step], rel=tolerance), step


@pytest.fixture(scope="session")
def whole(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted run, on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return two_ranks.run(cases.train, str(folder), until=cases.NUM_STEPS, **config(2, "SHARDED"))[0]


SAME_WORLD: list[Any] = [
    ((2, "SHARDED", "full_shard"), (2, "SHARDED", "full_shard"), EXACT),
    ((1, "SHARDED", "full_shard"), (2, "FULL", "full_shard"), REORDERED),
    ((1, "FULL", "shard_grad_op"), (1, "LOCAL", "no_shard"), REORDERED),
    *(
        slow(*case)
        for case in [
            ((2, "SHARDED", "full_shard"), (1, "SHARDED", "full_shard"), REORDERED),
            ((2, "FULL", "full_shard"), (2, "LOCAL", "shard_grad_op"), EXACT),
            ((2, "LOCAL", "no_shard"), (1, "SHARDED", "full_shard"), REORDERED),
            ((1, "LOCAL", "full_shard"), (2, "SHARDED", "no_shard"), REORDERED),
        ]
    ),
]


@pytest.mark.parametrize(("before", "after", "tolerance"), SAME_WORLD, ids=str)
def test_resume_with_other_version_strategy_or_type(
    two_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], before: Any, after: Any, tolerance: float
) -> None:
    two_ranks.run(cases.train, str(tmp_path), until=4, **config(*before))
    resumed = two_ranks.run(cases.train, str(tmp_path), until=cases.NUM_STEPS, resume=True, **config(*after))[0]
    assert min(resumed["losses"]) <= 5 and resumed["step"] == cases.NUM_STEPS
    assert_continues(resumed, whole, 4, tolerance)


WORLDS: list[Any] = [(2, "SHARDED", False)]
WORLDS += [
    slow(version, kind, asynchronous)
    for version, kind, asynchronous in itertools.product((1, 2), ("SHARDED", "FULL", "LOCAL"), (False, True))
    if (version, kind, asynchronous) not in WORLDS
]


@pytest.mark.parametrize(("version", "kind", "asynchronous"), WORLDS)
def test_resume_in_worlds_of_two_four_one_and_three(
    one_rank: Ranks,
    two_ranks: Ranks,
    three_ranks: Ranks,
    four_ranks: Ranks,
    tmp_path: Path,
    whole: dict[str, Any],
    version: int,
    kind: str,
    asynchronous: bool,
) -> None:
    settings = config(version, kind, async_save=asynchronous)
    steps = (2, 3, 4, cases.NUM_STEPS)
    for number, (world, until) in enumerate(zip((two_ranks, four_ranks, one_rank, three_ranks), steps, strict=True)):
        run = world.run(cases.train, str(tmp_path), until=until, resume=number > 0, **settings)[0]
        assert run["step"] == until
    assert_continues(run, whole, 4, REORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_resume_with_other_meshes(four_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], version: int) -> None:
    for until, strategy, resume in [
        (2, "full_shard", False), (3, "hybrid_shard", True), (4, "no_shard", True),
        (5, "hybrid_shard_zero2", True), (cases.NUM_STEPS, "full_shard", True),
    ]:  # fmt: skip
        mesh = {"dp_shard_size": 2} if "hybrid" in strategy else {}
        settings = config(version, "SHARDED", strategy, **mesh)
        run = four_ranks.run(cases.train, str(tmp_path), until=until, resume=resume, **settings)[0]
    assert_continues(run, whole, 5, REORDERED)


@pytest.mark.parametrize("version", [slow(1), 2])
def test_restarted_run_resumes_from_its_own_checkpoint(
    two_ranks: Ranks, tmp_path: Path, whole: dict[str, Any], version: int
) -> None:
    settings = config(version, "SHARDED")
    two_ranks.run(cases.train_in_run, str(tmp_path), "other", 0, until=8, **settings)
    begun = two_ranks.run(cases.train_in_run, str(tmp_path), "mine", 0, until=4, **settings)[0]
    assert begun["start"] == 0, "at the first start the script does not resume"
    resumed = two_ranks.run(cases.train_in_run, str(tmp_path), "mine", 1, until=cases.NUM_STEPS, **settings)[0]
    assert resumed["start"] == 4, "checkpoint-8 is of another run"
    assert_continues(resumed, whole, 4, EXACT if version == 2 else REORDERED)
    again = two_ranks.run(cases.train_in_run, str(tmp_path / "none"), "mine", 1, until=4, **settings)[0]
    assert again["start"] == 0, "without a checkpoint it begins as at the first start"
