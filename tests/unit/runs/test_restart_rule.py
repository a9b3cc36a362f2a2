"""Which failures are restarted: the rule, and what the launchers exchange about an attempt."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from typing import Any

import pytest

from hf_fsdp_plugin.hangs.calls import Counts, RankCalls
from hf_fsdp_plugin.runs.attempts import Restarts, assess_attempt, refuse_restart
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit

RUN = Restarts(run_id="a", max_restarts=2)


def failure(name: str, line: int = 7, **more: Any) -> dict[str, Any]:
    frames = [{"file": "/work/train.py", "line": line, "name": "main", "library": False}]
    how = {"kind": "exception", "type": name, "message": f"{name}: no", "frames": frames, "traceback": "", "time": 1.0}
    return how | more


def rank(code: int = 1, how: dict[str, Any] | None = None, counts: Counts | None = None, **more: Any) -> RankExit:
    return RankExit(rank=1, pid=1, code=code, time=1.0, failure=how, calls=RankCalls(rank=1, counts=counts), **more)


def after(restarts: Restarts, *exits: RankExit, signal_number: int = 0) -> tuple[str, Restarts]:
    """The code of the refusal, and the restarts with the attempt."""
    result = AttemptResult(exits=exits, signal_number=signal_number)
    attempt = assess_attempt(result, machine=0, seconds=1.0)
    refusal = refuse_restart(attempt, restarts)
    return f"{refusal}" if refusal is not None else "restart", restarts.after(attempt)


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
    text, once = after(RUN, first)
    assert text == "restart"
    assert expected in after(once, second)[0]


def test_number_of_restarts_is_limited() -> None:
    restarts = RUN
    for _ in range(RUN.max_restarts):
        text, restarts = after(restarts, rank(-signal.SIGKILL))
        assert text == "restart"
    text, _ = after(restarts, rank(-signal.SIGKILL))
    assert "FSDP-E716" in text and "failed 3 times" in text
    assert "FSDP-E716" in after(Restarts(), rank(-signal.SIGKILL))[0]


def test_signal_to_the_launcher_is_not_restarted() -> None:
    text, _ = after(RUN, rank(-signal.SIGTERM), signal_number=signal.SIGTERM)
    assert "FSDP-E714" in text and "received SIGTERM" in text


def test_failure_of_another_machine_is_named() -> None:
    silent = AttemptResult(exits=(rank(-signal.SIGTERM, stopped=True),), remote_failure="machine 1 was lost")
    assert assess_attempt(silent, machine=0, seconds=1.0).failure == silent.remote_failure


def test_attempt_is_read_as_written() -> None:
    _, found = after(RUN, rank(1, failure("OSError")))
    assert Restarts.from_json(json.loads(json.dumps(asdict(found)))) == found
