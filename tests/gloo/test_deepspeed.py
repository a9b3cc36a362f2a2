"""Training resumes from checkpoints of DeepSpeed, with the losses of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo.cases_deepspeed import resume_loop, resume_trainer, resume_trainer_without_its_state
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import assert_same_weights


def arguments(version: int) -> dict[str, Any]:
    config = parallel_config("full_shard", version, 2)
    return {"fsdp": True, "fsdp_config": {key.removeprefix("fsdp_"): v for key, v in config["fsdp_config"].items()}}


def assert_continued(found: dict[str, Any], num_steps: int) -> None:
    whole, resumed = found["losses"]
    assert resumed[-num_steps:] == pytest.approx(whole[-num_steps:], rel=1e-5)
    assert_same_weights(*found["weights"])


@pytest.mark.parametrize(
    ("stage", "version", "has_schedule_file"), [(2, 2, True), slow(3, 1, False), slow(1, 1, True), slow(4, 2, False)]
)
def test_trainer_resumes(two_ranks: Ranks, tmp_path: Path, stage: int, version: int, has_schedule_file: bool) -> None:
    found = two_ranks.run(
        resume_trainer, str(tmp_path), stage, has_schedule_file=has_schedule_file, **arguments(version)
    )
    assert_continued(found[0], 3)
    whole, resumed = found[0]["rates"]
    assert resumed == pytest.approx(whole)
    assert found[0]["printed"].count("FSDP-W415") == 1 and "no random states" in found[0]["printed"]


@pytest.mark.parametrize(
    ("stage", "version", "schedule"), [(0, 2, "torch"), (3, 1, "torch"), slow(4, 2, "torch"), slow(1, 1, "torch")]
)
def test_accelerate_loads_state(two_ranks: Ranks, tmp_path: Path, stage: int, version: int, schedule: str) -> None:
    found = two_ranks.run(resume_loop, str(tmp_path), stage, version, schedule=schedule)[0]
    assert_continued(found, 2)
    assert found["printed"].count("FSDP-W415") == 1


@pytest.mark.slow
def test_schedule_of_deepspeed_is_replaced_by_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(resume_loop, str(tmp_path), 2, 2, schedule="other")[0]
    assert found["steps"] == 3 and "continues after 3 steps" in found["printed"]
    assert found["losses"][0][0] == pytest.approx(found["losses"][1][0], rel=1e-5)


def test_trainer_refuses_checkpoint_without_its_state(two_ranks: Ranks, tmp_path: Path) -> None:
    for text in two_ranks.run(resume_trainer_without_its_state, str(tmp_path), **arguments(2)):
        assert "FSDP-E417" in text and "trainer_state.json" in text
