"""Which failures are restarted: the rule, and what the launchers exchange about an attempt."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from typing import Any

import pytest

from hf_fsdp_plugin.hangs.calls import Counts, RankCalls
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit
from hf_fsdp_plugin.runs.restart_policy import (
    Restarts,
    assess_attempt,
    decide_restart,
)

RUN = Restarts(run_id="a", max_restarts=2)


def failure(name: str, line: int = 7, **more: Any) -> dict[str, Any]:
    frames = [{"file": "/work/train.py", "line": line, "name": "main", "library": False}]
    how = {"kind": "exception", "type": name, "message": f"{name}: no", "frames": frames, "traceback": "", "time": 1.0}
    return how | more


def rank(code: int = 1, how: dict[str, Any] | None = None, counts: Counts | None = None, **more: Any) -> RankExit:
    return RankExit(rank=1, pid=1, code=code, time=1.0, failure=how, calls=RankCalls(rank=1, counts=counts), **more)


def decided(restarts: Restarts, *exits: RankExit, signal_number: int = 0) -> Restarts:
    result = AttemptResult(exits=exits, signal_number=signal_number)
    return decide_restart(assess_attempt(result, machine=0, seconds=1.0), restarts)


def code_of(found: Restarts) -> str:
    return found.refusal.code if found.refusal is not None else "restart"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError"), Counts(2, 2, 2)), "FSDP-E714"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError"), Counts(3, 3, 2)), "restart"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError", 8), Counts(4, 4)), "restart"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("ValueError"), Counts(4, 4)), "restart"),
        (rank(1, failure("OSError")), rank(1, failure("OSError")), "FSDP-E714"),
        (rank(1, failure("SpecError", kind="spec")), rank(1, failure("SpecError", kind="spec")), "FSDP-E714"),
        (rank(-signal.SIGSEGV, None, Counts(4, 4)), rank(-signal.SIGSEGV, None, Counts(4, 4)), "FSDP-E714"),
        (rank(-signal.SIGKILL, None, Counts(4, 4)), rank(-signal.SIGKILL, None, Counts(4, 4)), "restart"),
        (rank(9, None, Counts(4, 4)), rank(9, None, Counts(4, 4)), "FSDP-E714"),
    ],
)
def test_same_failure_at_the_same_step_is_not_restarted(first: RankExit, second: RankExit, expected: str) -> None:
    once = decided(RUN, first)
    assert once.refusal is None
    assert code_of(decided(once, second)) == expected


def test_number_of_restarts_is_limited() -> None:
    restarts = RUN
    for _ in range(RUN.max_restarts):
        found = decided(restarts, rank(-signal.SIGKILL))
        assert found.refusal is None
        restarts = found
    found = decided(restarts, rank(-signal.SIGKILL))
    assert code_of(found) == "FSDP-E716" and "failed 3 times" in str(found.refusal)
    assert code_of(decided(Restarts(), rank(-signal.SIGKILL))) == "FSDP-E716"


def test_signal_to_the_launcher_is_not_restarted() -> None:
    found = decided(RUN, rank(-signal.SIGTERM), signal_number=signal.SIGTERM)
    assert code_of(found) == "FSDP-E714" and "received SIGTERM" in str(found.refusal)


def test_failure_of_another_machine_is_named() -> None:
    silent = AttemptResult(exits=(rank(-signal.SIGTERM, stopped=True),), remote_failure="machine 1 was lost")
    assert assess_attempt(silent, machine=0, seconds=1.0).failure == silent.remote_failure


def test_attempt_and_refusal_are_read_as_written() -> None:
    attempt = assess_attempt(AttemptResult(exits=(rank(1, failure("OSError")),)), machine=1, seconds=1.0)
    for found in (decide_restart(attempt, RUN), decide_restart(attempt, Restarts())):
        assert Restarts.from_json(json.loads(json.dumps(asdict(found)))) == found
