"""Training resumes from a checkpoint in other world sizes, strategies, versions and state dict types."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_resume as cases
from tests.support.matrices import slow
from tests.support.ranks import Ranks

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


def in_changing_worlds(four_ranks: Ranks, two_ranks: Ranks, folder: Path, case: Any, stops: Any) -> list[Any]:
    """Run a case on 4, 2 and 4 ranks, each time until the next of the steps."""
    worlds = zip((four_ranks, two_ranks, four_ranks), stops, strict=True)
    return [case(world, str(folder), number, until) for number, (world, until) in enumerate(worlds)]


@pytest.mark.parametrize("version", [slow(1), 2])
def test_restart_with_fewer_ranks_keeps_samples_per_step(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    """Epochs have two steps: the first restart is in the middle of one, the second between two."""
    arguments = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **config(version, "SHARDED")}
    arguments |= {"max_steps": -1, "num_train_epochs": 7}

    def case(world: Ranks, folder: str, number: int, until: int) -> dict[str, Any]:
        return world.run(cases.train_in_run, folder, "mine", number, until=until, **arguments)[0]

    whole = case(four_ranks, str(tmp_path / "whole"), 0, cases.NUM_STEPS)
    runs = in_changing_worlds(four_ranks, two_ranks, tmp_path / "run", case, (3, 6, cases.NUM_STEPS))
    assert [(run["accumulation"], run["samples"], run["start"]) for run in runs] == [(2, 24, 0), (4, 24, 3), (2, 24, 6)]
    assert (runs[-1]["step"], runs[-1]["epoch"]) == (whole["step"], whole["epoch"]) == (14, 7.0)
    for step in range(1, cases.NUM_STEPS + 1):
        run = next(run for run in runs if step in run["losses"])
        assert run["losses"][step] == pytest.approx(whole["losses"][step], rel=REORDERED), step
        assert run["rates"][step] == pytest.approx(whole["rates"][step], rel=EXACT), step


@pytest.mark.parametrize(
    ("length", "accumulation", "version"),
    [("ranks", 1, 2), ("batches", 2, 2), slow("torch", 1, 2), slow("ranks", 1, 1), slow("batches", 2, 1)],
)
def test_loop_with_fewer_ranks_keeps_samples_and_schedule(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, length: str, accumulation: int, version: int
) -> None:
    def case(world: Ranks, folder: str, number: int, until: int) -> dict[str, Any]:
        return world.run(cases.train_loop, folder, number, until, length, accumulation, version=version)[0]

    whole = case(four_ranks, str(tmp_path / "whole"), 0, cases.NUM_STEPS)
    runs = in_changing_worlds(four_ranks, two_ranks, tmp_path / "run", case, (5, 7, cases.NUM_STEPS))
    samples = 4 * accumulation
    assert [(run["accumulation"], run["samples"]) for run in runs] == [
        (accumulation, samples), (2 * accumulation, samples), (accumulation, samples)
    ]  # fmt: skip
    assert not [line for run in runs for line in run["printed"] if "W434" in line]
    losses = {step: loss for run in runs for step, loss in run["losses"].items()}
    rates = {step: rate for run in runs for step, rate in run["rates"].items()}
    assert losses == pytest.approx(whole["losses"], rel=REORDERED)
    assert rates == pytest.approx(whole["rates"], rel=EXACT, abs=1e-12)
    assert len(losses) == cases.NUM_STEPS


def test_samples_per_step_that_cannot_be_kept_are_reported(
    two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """Three ranks cannot have 8 samples per step, and a loop without ``accumulate`` makes a step after each batch."""
    runs = [
        world.run(cases.train_loop, str(tmp_path / "three"), number, number + 1, "batches", 2, version=2)[0]
        for number, world in enumerate((four_ranks, three_ranks, four_ranks))
    ]
    assert [(run["accumulation"], run["samples"]) for run in runs] == [(2, 8), (3, 9), (2, 8)]
    assert [any("FSDP-W434" in line for line in run["printed"]) for run in runs] == [False, True, True]
    assert [runs[step - 1]["rates"][step] for step in (1, 2)] == pytest.approx([5e-4, 1e-3]), "8 steps of warm-up"
    runs = [
        world.run(
            cases.train_loop, str(tmp_path / "two"), number, number + 1, "ranks", 1, version=2, uses_accumulate=False
        )[0]
        for number, world in enumerate((four_ranks, two_ranks))
    ]
    assert [(run["accumulation"], run["samples"]) for run in runs] == [(1, 4), (1, 2)]
    assert [any("FSDP-W434" in line for line in run["printed"]) for run in runs] == [False, True]
    assert runs[1]["rates"][2] == pytest.approx(runs[0]["rates"][1] * 2), "the third part of the warm-up, twice"


LOST = {
    "a model only": ((), (True, False), True, ("FSDP-E424", "optimizer state, learning rate schedule, random state")),
    "no optimizer": (("optimizer_0",), (False, False), False, ("FSDP-E424", "has no optimizer state,")),
    "no schedule": (("scheduler.pt",), (False, True), False, ("FSDP-E424", "has no learning rate schedule,")),
    "no random state": (("rng_state*",), (False, False), False, ("FSDP-E424", "has no random state,")),
}


@pytest.mark.parametrize("version", [slow(1), 2])
@pytest.mark.parametrize("case", LOST)
def test_trainer_refuses_checkpoint_without_state(two_ranks: Ranks, tmp_path: Path, version: int, case: str) -> None:
    lost, only_model, manifest, texts = LOST[case]
    arguments = config(version, "SHARDED")
    for found in two_ranks.run(cases.resume_without, str(tmp_path), lost, only_model, manifest=manifest, **arguments):
        assert all(text in found["error"] for text in texts)
        assert not found["losses"]


@pytest.mark.parametrize("version", [1, slow(2)])
def test_run_of_models_only_resumes_with_warning(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    found = two_ranks.run(cases.resume_without, str(tmp_path), (), (True, True), **config(version, "SHARDED"))[0]
    assert found["error"] == "" and "FSDP-W408" in found["printed"] and 3 in found["losses"]


def test_lost_random_state_of_a_rank_is_a_warning(two_ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"manifest": False, **config(2, "SHARDED")}
    found = two_ranks.run(cases.resume_without, str(tmp_path), ("rng_state_1.pth",), (False, False), **arguments)[0]
    assert found["error"] == "" and "FSDP-W433" in found["printed"] and "random state of 1 rank," in found["printed"]
    found = two_ranks.run(cases.resume_without, str(tmp_path / "all"), (), (False, False), **arguments)[0]
    assert found["error"] == "" and "FSDP-W" not in found["printed"] and 3 in found["losses"]


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_run_without_fsdp_is_read(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    found = two_ranks.run(cases.resume_from_unsharded, str(tmp_path), **config(version, "SHARDED"))[0]
    assert "optimizer.pt" in found["files"] and found["error"] == "" and "FSDP-W" not in found["printed"]
    resumed = [found["losses"][step] for step in range(1, 7)]
    assert resumed == pytest.approx(found["whole"], rel=REORDERED)


OWN_FILES = {"notes.txt", "optimizer_0", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}


@pytest.mark.parametrize(
    ("version", "kind", "asynchronous"), [(1, "FULL", False), (2, "SHARDED", True), slow(2, "SHARDED", False)]
)
def test_checkpoint_method_of_a_class_is_atomic(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str, asynchronous: bool
) -> None:
    """The method does not call that of Transformers, and computes its paths itself."""
    arguments = config(version, kind, async_save=asynchronous)
    found = two_ranks.run(cases.own_checkpoints, str(tmp_path), **arguments)[0]
    assert set(found["problems"]) == {"checkpoint-2", "checkpoint-4"} and not any(found["problems"].values())
    assert set(found["files"]) >= OWN_FILES
    assert "no space in my store" in found["failure"] and found["losses"][5] == pytest.approx(found["whole"][5])
    assert [name for name in found["left"] if "checkpoint" in name] == ["checkpoint-2", "checkpoint-4"]
    assert "saves.txt" in found["left"] and "FSDP-W" not in found["printed"]


def test_own_checkpoint_outside_of_a_save_has_no_manifest(two_ranks: Ranks, tmp_path: Path) -> None:
    """Such a folder can be resumed from: the manifest would list the model only."""
    found = two_ranks.run(cases.own_checkpoints, str(tmp_path), "SometimesOwn", **config(2, "SHARDED"))[0]
    assert found["printed"].count("FSDP-W409") == 1
    assert "FSDP-N474" in str(found["problems"]["checkpoint-2"]) and not found["problems"]["checkpoint-4"]
    assert found["losses"][5] == pytest.approx(found["whole"][5])


@pytest.mark.parametrize(("version", "ranks"), [(1, (0, 1)), (2, (1,)), slow(2, (0, 1))])
def test_checkpoint_at_sigterm_is_of_one_step(
    two_ranks: Ranks, tmp_path: Path, version: int, ranks: tuple[int, ...]
) -> None:
    """The signals arrive at different moments, or at one rank only. Then the run is resumed, without a signal."""
    found = two_ranks.run(cases.preempt, str(tmp_path), ranks, **config(version, "SHARDED"))
    assert 3 < found[0]["step"] == found[1]["step"] < 60
    for each in found:
        assert each["checkpoints"] == [f"checkpoint-{each['step']}"] and each["problems"] == ()
        assert each["resumed"] == each["step"] + 1
        assert each["is_restored"] and not each["threads"]


def test_oldest_checkpoints_are_removed_by_time_of_save(two_ranks: Ranks, tmp_path: Path) -> None:
    """The dates of the folders are those of a copy. Saves within a second are ordered by their steps."""
    left = two_ranks.run(cases.rotate_after_copy, str(tmp_path), **config(2, "SHARDED"))[0]
    assert left == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
