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
    FailedAttempt,
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
    return decide_restart(assess_attempt(result, restarts, machine=0, seconds=1.0), restarts)


def code_of(found: Restarts) -> str:
    return found.refusal.code if found.refusal is not None else "restart"


@pytest.mark.parametrize(
    ("exit", "steps_before", "expected"),
    [
        (rank(-signal.SIGKILL), 0, "restart"),
        (rank(1, failure("ImportError")), 0, "FSDP-E714"),
        (rank(1, failure("ModuleNotFoundError")), 0, "FSDP-E714"),
        (rank(1, failure("TypeError"), Counts(0, 1)), 0, "FSDP-E714"),
        (rank(1, failure("TypeError"), Counts(1, 1)), 0, "restart"),
        (rank(1, failure("TypeError")), 5, "restart"),  # the program has run before
        (rank(1, failure("RuntimeError")), 0, "restart"),
        (rank(1, failure("SpecError", kind="spec")), 0, "FSDP-E714"),
        (rank(1, failure("SpecError", kind="spec", codes=["FSDP-E670"])), 0, "restart"),
        (rank(2, failure("SystemExit", kind="exit", frames=[])), 0, "FSDP-E714"),
        (rank(3, failure("SystemExit", kind="exit", frames=[])), 0, "restart"),
    ],
)
def test_errors_of_the_program_are_not_restarted(exit: RankExit, steps_before: int, expected: str) -> None:
    before = RUN.after(FailedAttempt(failure="rank 0: killed", began=0, steps=steps_before)) if steps_before else RUN
    assert code_of(decided(before, exit)) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError"), Counts(2, 2, 2)), "FSDP-E714"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError"), Counts(3, 3, 2)), "restart"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("OSError", 8), Counts(4, 4)), "restart"),
        (rank(1, failure("OSError"), Counts(4, 4)), rank(1, failure("ValueError"), Counts(4, 4)), "restart"),
        (rank(1, failure("OSError")), rank(1, failure("OSError")), "FSDP-E714"),
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
    assert assess_attempt(silent, RUN, machine=0, seconds=1.0).failure == silent.remote_failure


def test_attempt_and_refusal_are_read_as_written() -> None:
    attempt = assess_attempt(AttemptResult(exits=(rank(1, failure("OSError")),)), RUN, machine=1, seconds=1.0)
    for found in (decide_restart(attempt, RUN), decide_restart(attempt, Restarts())):
        assert Restarts.from_json(json.loads(json.dumps(asdict(found)))) == found
