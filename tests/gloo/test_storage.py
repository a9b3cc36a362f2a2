"""Checkpoints in a storage: ranks share no folder, and a failed upload does not end the training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.matrices import slow
from tests.support.object_store import BUCKET, Faults, object_store, objects
from tests.support.ranks import Ranks
from tests.support.storage_runs import OwnPaths, loop, settings, train, train_best, train_with_faults


@pytest.fixture(scope="module")
def faults() -> Faults:
    return Faults()


@pytest.fixture(scope="module")
def store(faults: Faults) -> Iterator[dict[str, str]]:
    with object_store(faults) as variables:
        yield variables


def complete(store: dict[str, str], run: str) -> list[str]:
    """Return the names of the complete checkpoints of a run."""
    names = objects(store, run)
    assert not any("/.parts/" in name for name in names)
    return [name.partition("/")[0] for name in names if name.endswith("/complete.json")]


@pytest.mark.parametrize("version", [1, 2])
def test_resume_elsewhere_continues(two_ranks: Ranks, store: dict[str, str], tmp_path: Path, version: int) -> None:
    run = f"resume{version}"
    options: dict[str, Any] = {**settings(version, f"s3://{BUCKET}/{run}"), "save_total_limit": 2}
    whole = two_ranks.run(train, str(tmp_path / "a"), store, **options)
    assert [path for row in whole for path in row["left"] if "checkpoint" in path] == []
    assert complete(store, run) == ["checkpoint-4", "checkpoint-6"]
    assert whole[0]["storage"] == f"s3://{BUCKET}/{run}"
    resumed = two_ranks.run(train, str(tmp_path / "b"), store, resume=f"s3://{BUCKET}/{run}/checkpoint-4", **options)
    assert resumed[0]["losses"] == pytest.approx(whole[0]["losses"], rel=1e-6)
    longer = two_ranks.run(train, str(tmp_path / "c"), store, resume=True, **{**options, "max_steps": 8})
    assert longer[0]["start"] == 6 and complete(store, run) == ["checkpoint-6", "checkpoint-8"]


def test_resume_with_another_number_of_ranks(
    two_ranks: Ranks, three_ranks: Ranks, store: dict[str, str], tmp_path: Path
) -> None:
    options = settings(2, f"s3://{BUCKET}/ranks", async_save=True)
    whole = two_ranks.run(train, str(tmp_path / "a"), store, **options, per_device_train_batch_size=3)
    options |= {"per_device_train_batch_size": 2, "max_steps": 8}
    found = three_ranks.run(train, str(tmp_path / "b"), store, resume="last", **options)
    assert found[0]["start"] == 6 and found[0]["losses"][:6] == whole[0]["losses"][:6]


def test_best_model_is_loaded_from_the_storage(two_ranks: Ranks, store: dict[str, str], tmp_path: Path) -> None:
    found = two_ranks.run(train_best, str(tmp_path), store, **settings(2, f"s3://{BUCKET}/best"))
    assert found[0]["best"] == "checkpoint-2" and found[0]["loss"] == pytest.approx(found[0]["best_loss"], rel=1e-6)
    assert complete(store, "best") == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.parametrize("version", [1, 2])
def test_loop_saves_and_loads(two_ranks: Ranks, store: dict[str, str], tmp_path: Path, version: int) -> None:
    found = two_ranks.run(loop, str(tmp_path), store, version, f"s3://{BUCKET}/loop{version}")[0]
    assert found["again"] == pytest.approx(found["first"], rel=1e-6)
    assert complete(store, f"loop{version}") == ["checkpoint_1", "checkpoint_2"]


@pytest.mark.parametrize("fault", ["lost", slow("throttled"), slow("refused")])
def test_training_goes_on_without_the_storage(
    two_ranks: Ranks, store: dict[str, str], faults: Faults, tmp_path: Path, fault: str
) -> None:
    faults.choose = lambda method, path: fault if method in ("PUT", "POST") and "/checkpoint-4/" in path else ""
    try:
        found = two_ranks.run(train_with_faults, str(tmp_path), store, **settings(2, f"s3://{BUCKET}/{fault}"))
    finally:
        faults.choose = lambda method, path: ""
    assert len(found[0]["losses"]) == 6 and complete(store, fault) == ["checkpoint-2", "checkpoint-6"]
    assert any("FSDP-W428" in line and "checkpoint-4" in line for line in found[0]["messages"])


def test_request_that_is_not_stored_says_so(
    two_ranks: Ranks, store: dict[str, str], faults: Faults, tmp_path: Path
) -> None:
    faults.choose = lambda method, path: "refused" if method in ("PUT", "POST") and "/checkpoint-" in path else ""
    options = {**settings(2, f"s3://{BUCKET}/asked"), "save_strategy": "no"}
    try:
        found = two_ranks.run(train_with_faults, str(tmp_path), store, ask_at=1, **options)
    finally:
        faults.choose = lambda method, path: ""
    assert len(found[0]["losses"]) == 6 and complete(store, "asked") == []
    [text] = [line for line in found[0]["messages"] if "save_now" in line]
    assert "was not stored, as the warning says; the training goes on" in text


def test_trainer_with_own_paths_is_reported(two_ranks: Ranks, store: dict[str, str], tmp_path: Path) -> None:
    options = {**settings(2, f"s3://{BUCKET}/own"), "trainer_class": OwnPaths}
    found = two_ranks.run(train_with_faults, str(tmp_path), store, shared=True, **options)
    assert any("FSDP-W429" in line for line in found[0]["messages"]) and complete(store, "own") == []
    assert (tmp_path / "checkpoint-6" / "fsdp_manifest.json").is_file()


def test_storage_that_cannot_be_used_ends_before_training(
    two_ranks: Ranks, tmp_path: Path, store: dict[str, str]
) -> None:
    with pytest.raises(AssertionError, match="FSDP-E419"):
        two_ranks.run(train, str(tmp_path), store, **settings(2, "s3://no-bucket/run"))
