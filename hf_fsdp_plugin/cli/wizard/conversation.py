"""The conversation: the answers of options, which question is next, and what its answer changes. Without a terminal."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hf_fsdp_plugin.cli.output import text_width
from hf_fsdp_plugin.cli.wizard import prediction
from hf_fsdp_plugin.cli.wizard.fsdp_questions import BY_NAME, BY_SETTING, DETAILS, QUESTIONS
from hf_fsdp_plugin.cli.wizard.prompts import Asker
from hf_fsdp_plugin.cli.wizard.question import Question, State
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.sources.command_line import read_overrides
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.spec.values import parse_settings

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

T = TypeVar("T")
FSDP1_WRITTEN: Final = frozenset({"backward_prefetch", "use_orig_params", "sync_module_states"})
"""Questions whose default is written for FSDP1 even if they are not asked: stock Accelerate has other defaults."""
_DERIVED: Final = {
    "launch.num_processes": "It is set by --num-machines and --gpus.",
    "launch.distributed_type": "It is always FSDP.",
    "mesh.replicate": "It is set by --group-size.",
    "sharding.reshard": "Use --strategy.",
}
"""Setting that follows from answers -> what sets it."""


def answers_of_options(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the answers that the options give, as text, and the other settings of ``--set``.

    Raises:
        SpecError: a ``--set`` is not valid, or an answer is given twice.
    """
    given = {name: value for name in BY_NAME if (value := getattr(args, name)) is not None}
    settings: list[str] = []
    for pair in args.overrides:
        written, equals, value = pair.partition("=")
        name = written.strip().lower().replace("-", "_")
        if not equals or name not in BY_NAME:
            settings.append(pair)
        elif given.setdefault(name, value) != value:
            raise _invalid(f"{name} is given twice: {given[name]} and {value}.", "Give it once.")
    extra = _settings_of(settings)
    for name in extra.keys() & BY_SETTING.keys():
        given.setdefault(BY_SETTING[name].name, _text(extra.pop(name)))
    return given, extra


def _settings_of(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the settings of ``--set``. Raises ``SpecError`` for those that follow from answers."""
    read = read_overrides(Sources(overrides=pairs, environ={}))
    level = parse_settings(read) if read is not None else None
    if level is None:
        return {}
    if level.problems:
        raise SpecError(level.problems)
    for setting in level.settings:
        if setting.name in _DERIVED:
            raise _invalid(f"--set {setting.name} is not supported here.", _DERIVED[setting.name])
    return {setting.name: setting.value for setting in level.settings}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _invalid(message: str, fix: str) -> SpecError:
    return SpecError([Problem(code="FSDP-E762", message=message, fix=fix)])


def converse(state: State, asker: Asker, given: Mapping[str, str]) -> None:
    """Ask all questions that apply, and add the answers to `state`.

    Args:
        given: name of a question -> answer given by an option, as text.

    Raises:
        SpecError: an option is not valid, or there are no more answers.
    """
    for question in QUESTIONS:
        if not question.asked(state):
            if question.name in given:
                raise SpecError([_unused(question)])
        elif question.name in given:
            state.answers[question.name] = _read_option(question, given[question.name], state)
            _follow(question, state, asker)
        elif question in DETAILS and not state.answers["details"]:
            if state.version == 1 and question.name in FSDP1_WRITTEN:
                state.answers[question.name] = question.default_in(state).value
        else:
            _ask(question, state, asker)


def _ask(question: Question, state: State, asker: Asker) -> None:
    """Ask until the answer can be used."""
    default = question.default_in(state)
    while True:
        state.answers[question.name] = asker.ask(question, default, state)
        try:
            return _follow(question, state, asker)
        except SpecError as error:
            del state.answers[question.name]
            asker.refuse(question, error.problems[0])


def _read_option(question: Question, text: str, state: State) -> Any:
    try:
        return question.read(text, state)
    except ValueError as error:
        raise _invalid(f"{question.flag}: {error}", f"Correct {question.flag}, or leave it out to be asked.") from None


def _unused(question: Question) -> Problem:
    message = f"{question.flag} is given, but the other answers leave no such question: {question.help}."
    return Problem(
        code="FSDP-E763", message=message, fix=f"Remove {question.flag}, or change the answer it depends on."
    )


def _follow(question: Question, state: State, asker: Asker) -> None:
    """Do what follows from some answers: read the model, predict, or use the recommendation.

    Raises:
        SpecError: the answer cannot be used.
    """
    answer = state.answers[question.name]
    if question.name == "model" and answer:
        asker.show(f"Reading {answer} ...")
        state.model = prediction.read_model(answer)
        asker.show(state.model.text)
    elif question.name == "fsdp_version" and state.model is not None:
        asker.show("Predicting memory and communication ...")
        shown, reason = _attempt(lambda: prediction.predict_strategies(state, text_width(sys.stderr)))
        text, state.recommended = shown if shown is not None else (f"No prediction: {reason}", {})
        asker.show(text)
    elif question.name == "recommendation":
        state.advice = state.recommended if answer else {}


def predicted_memory(state: State, settings: Mapping[str, Any]) -> tuple[MemoryEstimate | None, str]:
    """Return the predicted memory of the chosen settings, and its text; ``None`` without a model or a prediction."""
    if state.model is None:
        return None, ""
    memory, _ = _attempt(lambda: prediction.predict_settings(state, settings))
    return memory, prediction.memory_text(memory, state) if memory is not None else ""


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
