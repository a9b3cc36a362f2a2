"""The steps that restarts lose, and their part of the report."""

from __future__ import annotations

from dataclasses import asdict

from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts


def attempt(began: int | None, steps: int | None) -> FailedAttempt:
    return FailedAttempt(failure="rank 1: killed by SIGKILL", began=began, steps=steps, seconds=1.25)


def test_lost_steps_are_those_after_the_checkpoint() -> None:
    restarts = Restarts(run_id="a", max_restarts=5, failures=(attempt(0, 5), attempt(4, 9), attempt(None, None)))
    assert restarts.lost_steps(began=8) == [1, 1, 0]
    assert restarts.lost_steps(began=0) == [1, 9, 0], "nothing was resumed"
    assert restarts.lost_steps(began=None) == [1, 0, 0]
    assert restarts.summary(began=8) == "3 restarts of at most 5, 2 optimizer steps trained again"


def test_report_has_every_failure() -> None:
    report = Restarts(run_id="a", max_restarts=1, failures=(attempt(0, 5),)).to_report(began=4)
    assert (report["count"], report["max"], report["lost_steps"]) == (1, 1, 1)
    row = {"failure": "rank 1: killed by SIGKILL", "machine": 0, "steps": 5, "lost_steps": 1, "seconds": 1.2}
    assert report["failures"] == [row]
    assert Restarts().summary(began=0) == "" and Restarts().to_report(0)["failures"] == []


def test_restarts_are_read_as_written() -> None:
    restarts = Restarts(run_id="a", max_restarts=5, failures=(attempt(0, 5),))
    assert Restarts.from_json(asdict(restarts)) == restarts
