"""What a script does after its training: the calls in its source, their conditions and arguments."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_fsdp_plugin.integrations.preflight.script_code import UNKNOWN, LaterCall, later_calls

SCRIPT = """
    def train(trainer, test_set, *, do_eval=True):
        with context():
            try:
                if do_eval:
                    result = trainer.train()
                    trainer.save_state()
                else:
                    trainer.never()
            except ValueError:
                trainer.failed()
            else:
                trainer.succeeded()
            finally:
                trainer.cleaned()
        if do_eval:
            trainer.evaluate(test_set, metric_key_prefix=f"{prefix}x")
        else:
            trainer.skipped()
        if rank() == 0:
            trainer.predict(make_data())
        if trainer.is_world_process_zero() and not do_eval:
            trainer.push_to_hub()

        def later():
            trainer.inner()

    def before():
        trainer.other()

    prefix = "test"
    train(trainer, [1, 2])
    done(prefix)
"""


@pytest.fixture
def calls(tmp_path: Path) -> list[LaterCall]:
    """The calls that follow ``trainer.train()`` in a script."""
    found: list[LaterCall] = []
    trainer = SimpleNamespace(
        train=lambda: found.extend(later_calls()), is_world_process_zero=lambda: True,
        **dict.fromkeys(("save_state", "succeeded", "cleaned", "evaluate", "predict"), lambda *args, **kwargs: None),
    )  # fmt: skip
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    names: dict[str, Any] = {"trainer": trainer, "context": lambda: __import__("contextlib").nullcontext()}
    names |= {"done": print, "rank": lambda: 1, "make_data": list}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return [call for call in found if call.file == "script.py"]


def test_calls_after_the_training_are_found_in_order(calls: list[LaterCall]) -> None:
    assert [call.name.removeprefix("trainer.") for call in calls] == [
        "save_state", "succeeded", "cleaned", "evaluate", "skipped", "rank", "predict", "make_data", "push_to_hub",
        "done",
    ]  # fmt: skip
    assert calls[0].place == "trainer.save_state in script.py:7"


def test_conditions_decide_which_calls_are_reached(calls: list[LaterCall]) -> None:
    reached = {call.method: call.is_reached() for call in calls}
    assert reached["evaluate"] is True and reached["skipped"] is False
    assert reached["predict"] is None  # the condition calls a function
    assert reached["push_to_hub"] is False


def test_arguments_are_read_without_calling_anything(calls: list[LaterCall]) -> None:
    evaluate = next(call for call in calls if call.method == "evaluate")
    assert evaluate.value(evaluate.node.args[0]) == [1, 2]
    assert evaluate.value(evaluate.node.keywords[0].value) == "testx"
    predict = next(call for call in calls if call.method == "predict")
    assert predict.value(predict.node.args[0]) is UNKNOWN
    assert predict.receiver is calls[0].receiver


def test_script_that_is_gone_has_no_calls(tmp_path: Path) -> None:
    found: list[LaterCall] = [None]  # type: ignore[list-item]
    code = compile("train()\nafter()", str(tmp_path / "gone.py"), "exec")
    exec(code, {"train": lambda: found.extend(later_calls()), "after": print})
    assert [call for call in found if call is not None and call.file == "gone.py"] == []
