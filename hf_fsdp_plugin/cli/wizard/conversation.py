"""The conversation: which question is next, and what its answer changes. Without any terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from hf_fsdp_plugin.cli.wizard import detail_questions, fsdp_questions, run_questions
from hf_fsdp_plugin.cli.wizard.question import Default, Question, State
from hf_fsdp_plugin.problems import Problem, SpecError

QUESTIONS: Final[tuple[Question, ...]] = (
    *run_questions.QUESTIONS,
    *fsdp_questions.QUESTIONS,
    *detail_questions.QUESTIONS,
)
"""All questions in their order."""
BY_NAME: Final[Mapping[str, Question]] = {question.name: question for question in QUESTIONS}
BY_SETTING: Final[Mapping[str, Question]] = {question.setting: question for question in QUESTIONS if question.setting}

FSDP1_WRITTEN: Final = frozenset({"backward_prefetch", "use_orig_params", "sync_module_states"})
"""Questions whose default is written for FSDP1 even if they are not asked: stock Accelerate has other defaults."""


class Asker(Protocol):
    """Asks a person, or takes the defaults."""

    def ask(self, question: Question, default: Default, state: State) -> Any:
        """Return the answer. Raises ``SpecError`` if there are no more answers."""
        ...

    def show(self, text: str) -> None:
        """Show a text between two questions."""
        ...

    def refuse(self, question: Question, problem: Problem) -> None:
        """Show why an answer is not valid, if the question can be asked again. Otherwise raise ``SpecError``."""
        ...


Hook = Callable[[State, Asker], None]


def converse(state: State, asker: Asker, given: Mapping[str, str], hooks: Mapping[str, Hook]) -> None:
    """Ask all questions that apply, and add the answers to `state`.

    Args:
        given: name of a question -> answer given by an option, as text.
        hooks: name of a question -> what is done after its answer, before the next question. A hook raises
            ``SpecError`` if the answer cannot be used; the question is then asked again if it was not given.

    Raises:
        SpecError: an option is not valid, or there are no more answers.
    """
    for question in QUESTIONS:
        if not question.asked(state):
            if question.name in given:
                raise SpecError([_unused(question)])
            continue
        if question.name in given:
            state.answers[question.name] = _read_option(question, given[question.name], state)
            if hook := hooks.get(question.name):
                hook(state, asker)
            continue
        default = question.default_in(state)
        if question.detail and not state.answers["details"]:
            if state.version == 1 and question.name in FSDP1_WRITTEN:
                state.answers[question.name] = default.value
            continue
        _ask(question, default, state, asker, hooks.get(question.name))


def _ask(question: Question, default: Default, state: State, asker: Asker, hook: Hook | None) -> None:
    while True:
        state.answers[question.name] = asker.ask(question, default, state)
        if hook is None:
            return
        try:
            return hook(state, asker)
        except SpecError as error:
            del state.answers[question.name]
            asker.refuse(question, error.problems[0])


def _read_option(question: Question, text: str, state: State) -> Any:
    try:
        return question.read(text, state)
    except ValueError as error:
        message = f"{question.flag}: {error}"
        fix = f"Correct {question.flag}, or leave it out to be asked."
        raise SpecError([Problem(code="FSDP-E762", message=message, fix=fix)]) from None


def _unused(question: Question) -> Problem:
    message = f"{question.flag} is given, but the other answers leave no such question: {question.help}."
    return Problem(
        code="FSDP-E763", message=message, fix=f"Remove {question.flag}, or change the answer it depends on."
    )
