"""The summary of a failed run says where the ranks were, if that may be the cause."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from hf_fsdp_plugin.hangs.calls import Call, Counts, GroupCalls, RankCalls
from hf_fsdp_plugin.hangs.python_stacks import Frame
from hf_fsdp_plugin.launcher.run_script import __file__ as LIBRARY_FILE
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit, summarize_exit, tell_failure

SAVE = (Frame("/work/train.py", 30, "main"), Frame(LIBRARY_FILE, 9, "save_state"))
BACKWARD = (Frame("/work/train.py", 20, "main"), Frame(LIBRARY_FILE, 9, "backward"))
LOST: dict[str, Any] = {
    "kind": "exception",
    "type": "RuntimeError",
    "message": "RuntimeError: Connection closed by peer",
    "traceback": "",
    "time": 2.0,
    "frames": [],
}
ABORTED = -signal.SIGABRT


def rank(number: int, code: int = 1, *, steps: int | None = None, **more: Any) -> RankExit:
    """A rank that has recorded the number of its optimizer steps, or its collectives."""
    counts = Counts(steps, 0) if steps is not None else None
    return RankExit(
        **{"rank": number, "pid": 1, "code": code, "time": 1.0, "calls": RankCalls(rank=number, counts=counts), **more}
    )


def summary(*exits: RankExit) -> str:
    return tell_failure(AttemptResult(exits=exits))


def test_aborted_rank_names_all_places() -> None:
    lost = [rank(number, failure=LOST, stack=BACKWARD, steps=7) for number in (1, 2)]
    result = AttemptResult(exits=(rank(0, ABORTED, stack=SAVE, steps=7), *lost))
    text = tell_failure(result)
    assert "FSDP-E743" in text
    assert "rank 0 was in save_state at /work/train.py:30 after 7 optimizer steps; " in text
    assert "ranks 1, 2 was in backward" not in text
    assert "ranks 1, 2 were in backward at /work/train.py:20 after 7 optimizer steps." in text
    assert "/work/train.py:30, in main" in text, "the stack of the aborted rank"
    assert result.exit_code == 134


def test_rank_that_has_ended_is_named() -> None:
    text = summary(rank(0, ABORTED, stack=BACKWARD), rank(1, 0, ended=True))
    assert "rank 1 had ended the script" in text


@pytest.mark.parametrize(
    "exits",
    [
        (rank(0, ABORTED, stack=SAVE, steps=7), rank(1, failure=LOST, stack=SAVE, steps=7)),
        (rank(0, ABORTED, stack=SAVE), rank(1, -signal.SIGTERM, stopped=True)),
        (
            rank(0, failure={**LOST, "message": "KeyError: 'a'"}, stack=SAVE),
            rank(1, -signal.SIGTERM, stopped=True, stack=BACKWARD),
        ),
    ],
    ids=["same place", "unknown place", "exception of the script"],
)
def test_places_are_not_named_without_reason(exits: tuple[RankExit, ...]) -> None:
    assert "FSDP-E743" not in summary(*exits)


def test_many_places_are_shortened() -> None:
    stacks = [(Frame(f"/work/train_{number}.py", 30, "main"),) for number in range(10)]
    lost = [rank(number, failure=LOST, stack=stack) for number, stack in enumerate(stacks)]
    text = summary(*lost)
    assert "; rank 7 was at /work/train_7.py:30; and 2 more places." in text and "rank 8 was" not in text


def test_ranks_that_another_machine_has_stopped_are_named() -> None:
    result = AttemptResult(
        exits=(rank(2, -signal.SIGTERM, stopped=True, stack=SAVE),), remote_failure="machine 0: boom"
    )
    text = tell_failure(result)
    assert "because another failed: machine 0: boom" in text and "rank 2 was in save_state at /work/train.py:30" in text


@pytest.mark.parametrize("stack", [SAVE, BACKWARD])
def test_stopped_run_names_different_places(stack: tuple[Frame, ...]) -> None:
    exits = (rank(0, -2, stack=BACKWARD, steps=7), rank(1, -2, stack=stack, steps=7))
    text = tell_failure(AttemptResult(exits=exits, signal_number=signal.SIGINT))
    assert text.startswith("hf-fsdp: stopped by SIGINT; ranks 0, 1 exited")
    assert ("\nhf-fsdp: rank 1 was in save_state at /work/train.py:30 after 7 optimizer steps" in text) is (
        stack is SAVE
    )
    assert ("rank 0" in text) is (stack is SAVE)


@pytest.mark.parametrize(("code", "named"), [("FSDP-E670", True), ("FSDP-E201", False)])
def test_places_explain_a_call_that_ranks_did_not_make(code: str, named: bool) -> None:
    failure = {**LOST, "kind": "spec", "message": "rank 1 did not call it.", "codes": [code]}
    text = summary(rank(0, failure=failure), rank(1, -signal.SIGTERM, stopped=True, stack=BACKWARD, steps=1))
    assert ("rank 1 was in backward at /work/train.py:20 after 1 optimizer step" in text) is named


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        (["FSDP-E670"], "FSDP-E670: rank 1 did not call it."),
        (["FSDP-W311", "FSDP-E421"], "FSDP-E421: rank 1 did not call it."),
        (["FSDP-E201"], "the config has errors"),
    ],
)
def test_only_errors_of_the_config_are_called_so(codes: list[str], text: str) -> None:
    failure = {**LOST, "kind": "spec", "message": "rank 1 did not call it.", "codes": codes}
    assert summarize_exit(rank(0, failure=failure)) == text


def calls_of(number: int, *units: str) -> RankCalls:
    calls = tuple(Call("all-gather", 8, "float32", unit) for unit in units)
    group = "0 of ranks 0,1"
    return RankCalls(rank=number, groups={group: GroupCalls((0, 1), len(calls), calls)}, last_group=group)


def test_first_different_collective_is_named() -> None:
    lost = rank(1, failure=LOST, stack=SAVE, calls=calls_of(1, "layers.0", "layers.2"))
    text = summary(rank(0, ABORTED, stack=SAVE, calls=calls_of(0, "layers.0", "layers.1", "layers.2")), lost)
    assert "FSDP-E743" in text and "different places" not in text
    assert "Number 2 of process group 0 of ranks 0,1 was on rank 0: all-gather of layers.1 (8 × fp32)" in text
    assert "Rank 1 left out all-gather of layers.1" in text


def test_killed_rank_is_named_with_its_last_collective() -> None:
    text = summary(rank(0, -signal.SIGKILL, calls=calls_of(0, "layers.0")), rank(1, failure=LOST))
    assert "Its last collective was all-gather of layers.0 (8 × fp32), number 1 of process group" in text


def test_rank_that_left_silently_is_named() -> None:
    lost = rank(0, failure=LOST, stack=BACKWARD, calls=calls_of(0, "layers.0", "layers.1"))
    gone = rank(1, 0, calls=replace(calls_of(1, "layers.0"), counts=Counts(3, 3)))
    text = summary(lost, gone)
    assert "rank 1 exited with code 0 before the end of the script after 3 optimizer steps." in text
    assert "Only rank 0 had begun all-gather of layers.1" in text and "FSDP-E734" in text and "FSDP-E743" not in text
    assert "FSDP-E734" not in summary(lost, rank(1, 0, ended=True))
    assert "FSDP-E734" not in summary(lost, rank(1, 0, stopped=True))
