"""What is done after some answers: the model is read, and the planner's table is shown."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hf_fsdp_plugin.cli.terminal import text_width
from hf_fsdp_plugin.cli.wizard.conversation import Asker, Hook
from hf_fsdp_plugin.cli.wizard.model_facts import read_model
from hf_fsdp_plugin.cli.wizard.question import State
from hf_fsdp_plugin.problems import SpecError

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

T = TypeVar("T")


def read_named_model(state: State, asker: Asker) -> None:
    """Read the model that was named, and show what it is."""
    name = str(state.answers["model"])
    if not name:
        return
    asker.show(f"Reading {name} ...")
    state.model = read_model(name)
    asker.show(state.model.text)


def predicted(state: State, settings: Mapping[str, Any]) -> tuple[MemoryEstimate | None, str]:
    """Return the predicted memory of the chosen settings, and its text; ``None`` without a model or a prediction."""
    if state.model is None:
        return None, ""
    from hf_fsdp_plugin.cli.wizard.prediction import memory_of_gpu, predict_settings
    from hf_fsdp_plugin.cli.wizard.prediction_text import memory_text

    memory, _ = _attempt(lambda: predict_settings(state, settings))
    return memory, memory_text(memory, memory_of_gpu(state)) if memory is not None else ""


def show_prediction(state: State, asker: Asker) -> None:
    """Show the predicted memory of the strategies, if there is a model."""
    if state.model is None:
        return
    asker.show("Predicting memory and communication ...")
    shown, reason = _attempt(lambda: _prediction(state))
    if shown is None:
        asker.show(f"No prediction: {reason}")
        return
    text, state.recommended = shown
    asker.show(text)


def _prediction(state: State) -> tuple[str, Mapping[str, Any]]:
    """Return the planner's table and recommendation; without the memory of a GPU, a table of strategies."""
    from hf_fsdp_plugin.cli.wizard import prediction, prediction_text

    limit, width = prediction.memory_of_gpu(state), text_width(sys.stderr)
    if limit is None:
        return prediction_text.rows_text(prediction.rows_of(state), width), {}
    advice = prediction.advice_of(state, limit)
    best = prediction.recommended_row(advice, state)
    text = prediction_text.advice_text(advice, best, state, width)
    return text, prediction.recommended_answers(best) if best is not None else {}


def _attempt(predict: Callable[[], T]) -> tuple[T | None, str]:
    """Return a prediction, or ``None`` and the reason why there is none: the config can be written without it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return predict(), ""
        except SpecError as error:
            return None, " ".join(problem.message for problem in error.problems)
        except Exception as error:  # the model's own code runs on the meta device, and may raise anything
            return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def take_recommendation(state: State, asker: Asker) -> None:
    """Make the recommended settings the defaults of the next questions."""
    state.advice = state.recommended if state.answers["recommendation"] else {}


HOOKS: Final[Mapping[str, Hook]] = {
    "model": read_named_model,
    "fsdp_version": show_prediction,
    "recommendation": take_recommendation,
}
