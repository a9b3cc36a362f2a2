"""The calls of the Trainer that a script makes after its training: they run on the clone, the others are reported."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.preflight.arguments import not_tested
from hf_fsdp_plugin.integrations.preflight.comparison import Trained, check_export
from hf_fsdp_plugin.integrations.preflight.loading import first_samples
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.preflight.script_code import UNKNOWN, LaterCall, later_calls
from hf_fsdp_plugin.text import format_names

STAGE: Final = "after training"
_BUILT_IN: Final = str(Path(__file__).with_name("builtin_script.py"))
_DATA: Final = {"evaluate": "eval_dataset", "predict": "test_dataset"}
"""Method -> its first argument."""
_SIMPLE: Final = ("log_metrics", "save_metrics", "info", "warning", "debug")
"""Methods that only print or write a few numbers."""
_NO_CALLS: Final = "the script calls no method of its Trainer after the training"
_MAX_NAMES: Final = 6


class AfterTraining:
    """What a script does after its training.

    Args:
        trainer: the Trainer whose methods run; ``None`` for a script with its own loop, of which nothing runs.
        num_samples: maximum of samples of a data set that is evaluated.
    """

    def __init__(self, trainer: Any, num_samples: int = 0) -> None:
        self._trainer, self._num_samples = trainer, num_samples
        self._calls = later_calls(own_file=_BUILT_IN)
        self._skipped: list[str] = []

    @property
    def has_methods(self) -> bool:
        """Whether one of the calls can run."""
        return any(self._method_of(call) is not None for call in self._calls)

    def run(self) -> None:
        """Run the calls in the order of the source. Collective.

        Data sets have their first samples only, files are written to the temporary folder, and nothing is pushed.
        """
        for call in self._calls:
            method = self._method_of(call)
            if method is not None:
                preflight.doing = call.place
                method(call)
            elif _is_worth_a_test(call):
                self._skipped.append(call.place)
        preflight.doing = ""

    def report(self, *, ran: bool) -> None:
        """Record which calls did not run.

        Args:
            ran: whether :meth:`run` has returned.
        """
        if not ran:
            self._skipped = [call.place for call in self._calls if _is_worth_a_test(call)]
        if self._skipped:
            names = list(dict.fromkeys(self._skipped))
            not_tested(f"what the script does after its training: {format_names(names, _MAX_NAMES)}")

    def _method_of(self, call: LaterCall) -> Callable[[LaterCall], None] | None:
        """Return the function that runs a call; ``None`` if it is not of the Trainer, or may not be reached."""
        found: dict[str, Callable[[LaterCall], None]] = {
            "evaluate": self._evaluate,
            "predict": self._evaluate,
            "save_model": self._save,
            "save_state": lambda _: self._trainer.save_state(),
            "push_to_hub": self._push,
        }
        is_own = self._trainer is not None and call.receiver is self._trainer
        return found.get(call.method) if is_own and call.is_reached() else None

    def _evaluate(self, call: LaterCall) -> None:
        name = _DATA[call.method]
        given = {word.arg: call.value(word.value) for word in call.node.keywords if word.arg is not None}
        if call.node.args:
            given[name] = call.value(call.node.args[0])
        known = {key: value for key, value in given.items() if value is not UNKNOWN}
        if name in known:
            known[name] = self._first_samples(known[name])
        elif name in given:  # made by code that does not run
            known[name] = self._trainer.eval_dataset
            self._skipped.append(f"the data of {call.place}")
            if known[name] is None:
                return
        getattr(self._trainer, call.method)(**known)

    def _first_samples(self, data: Any) -> Any:
        if isinstance(data, dict) and not hasattr(data, "take"):
            return {name: first_samples(each, self._num_samples) for name, each in data.items()}
        return data if data is None or isinstance(data, str) else first_samples(data, self._num_samples)

    def _save(self, call: LaterCall) -> None:
        """Save the model, and compare what ``from_pretrained`` loads with what was saved."""
        folder = preflight.folder / "saved"
        trained = Trained(self._trainer)
        trained.capture(0)
        self._trainer.save_model(str(folder))
        if not preflight.recorder.has_failed("export"):  # which would be reported again
            check_export(trained, folder, 0)

    def _push(self, call: LaterCall) -> None:
        """Save the model, as ``push_to_hub`` does first. Nothing is sent."""
        self._save(call)
        self._skipped.append(f"the push of {call.place}")


def _is_worth_a_test(call: LaterCall) -> bool:
    """Whether a call may run, and is not one of Python's own functions or of a log, which rarely fail."""
    is_simple = call.method in _SIMPLE or (call.name != "open" and hasattr(builtins, call.name))
    return call.is_reached() is not False and not is_simple


def skipped_calls(reason: str) -> None:
    """Record that nothing after the training of a script without a Trainer runs."""
    preflight.recorder.skip(STAGE, reason)
    AfterTraining(None).report(ran=False)


def run_calls(after: AfterTraining, attempt: Callable[[str, Callable[[], None]], None]) -> None:
    """Run what follows the training as a stage, and record what did not run."""
    recorder = preflight.recorder
    if after.has_methods:
        attempt(STAGE, after.run)
    else:
        recorder.skip(STAGE, _NO_CALLS)
    after.report(ran=after.has_methods and not recorder.has_failed(STAGE))
