"""The conversation of ``hf-fsdp config``: which question is next, how it is asked, and what its answer changes.

Everything is printed to stderr, so that stdout has only the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hf_fsdp_plugin.cli.config import prediction
from hf_fsdp_plugin.cli.config.question import Question, State, label_of
from hf_fsdp_plugin.cli.config.questions import QUESTIONS
from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.launcher.flags import UsageError
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import wrap_words


def ask_questions(state: State, asker: Asker, given: Mapping[str, str]) -> None:
    """Ask all questions that apply, and add the answers to `state`.

    Args:
        given: name of a question -> answer given by an option, as text.

    Raises:
        SpecError: there are no more answers.
        UsageError: an option is not valid.
    """
    for question in QUESTIONS:
        name, flag = question.name, question.flag
        if not question.asked(state):
            if name in given:
                message = f"{flag} is given, but the other answers leave no such question: {question.help}."
                fix = f"Remove {flag}, or change the answer it depends on."
                raise UsageError(str(Problem(code="FSDP-E763", message=message, fix=fix)))
        elif name in given:
            try:
                state.answers[name] = question.read(given[name], state)
            except ValueError as error:
                raise _invalid(f"{flag}: {error}", f"Correct {flag}, or leave it out to be asked.") from None
            _follow(question, state, asker)
        else:
            _ask(question, state, asker)


def _ask(question: Question, state: State, asker: Asker) -> None:
    """Ask until the answer can be used."""
    while True:
        state.answers[question.name] = asker.ask(question, state)
        try:
            return _follow(question, state, asker)
        except SpecError as error:
            if asker.takes_defaults:
                raise
            del state.answers[question.name]
            _print(str(error.problems[0]), "red")


def _invalid(message: str, fix: str) -> UsageError:
    return UsageError(str(Problem(code="FSDP-E762", message=message, fix=fix)))


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
    elif question.name == "fsdp_version" and state.model is not None and state.answers["gpu_memory"]:
        asker.show("Predicting memory and communication ...")
        text, state.recommended = prediction.recommend(state, text_width(sys.stderr))
        asker.show(text)
    elif question.name == "recommendation" and not answer:
        state.recommended = {}


class Asker:
    """Asks with arrow keys on a terminal, reads a line per question from a pipe or a file, or takes the defaults."""

    def __init__(self, *, takes_defaults: bool) -> None:
        is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.takes_defaults = takes_defaults
        self._answer = _choose if is_terminal else _read_line

    def show(self, text: str) -> None:
        """Show a text between two questions."""
        print(file=sys.stderr)
        for line in text.splitlines():
            _print(line)

    def ask(self, question: Question, state: State) -> Any:
        """Return the answer. Raises ``SpecError`` if there are no more answers, or ``UsageError`` without a default."""
        default, reason = question.default_in(state)
        shown, choices = label_of(default), question.choices_in(state)
        if self.takes_defaults:
            try:
                return question.read(shown, state)
            except ValueError as error:
                flag = question.flag
                raise _invalid(f"the default of {flag} is not valid: {error}", f"Pass {flag}.") from None
        print(file=sys.stderr)
        _print(question.text, "bold")
        for number, (value, about) in enumerate(choices.items(), start=1):
            if about:
                _print(f"{number}. {label_of(value)}: {about}", indent="  ")
        if reason:
            _print(f"Default {shown or 'empty'}: {reason}.", "dim", indent="  ")
        while True:
            try:
                return question.read(self._answer(choices, shown), state)
            except ValueError as error:
                _print(str(error), "red")
            except EOFError:
                message = f"the input ended before the question: {question.text}."
                fix = "Answer all questions, pass the answers as options, or pass --yes to take the defaults. "
                fix += "Nothing was written."
                raise SpecError([Problem(code="FSDP-E760", message=message, fix=fix)]) from None


def _choose(choices: Mapping[Any, str], default: str) -> str:
    """Return the answer that is chosen in a menu, or typed if there are no choices."""
    import questionary
    from prompt_toolkit.output import create_output

    styles = [("highlighted", "bold"), ("answer", "bold"), ("pointer", "bold"), ("instruction", "")]
    look: dict[str, Any] = {
        "qmark": "",
        "style": questionary.Style(styles),
        "output": create_output(stdout=sys.stderr),
    }
    if not choices:
        return str(questionary.text(">", default=default, **look).unsafe_ask())
    labels = [label_of(value) for value in choices]
    look |= {"instruction": "arrow keys, then Enter:", "erase_when_done": True}
    start = default if default in labels else labels[0]
    chosen = str(questionary.select("", choices=labels, default=start, **look).unsafe_ask())
    _print(f" > {chosen}", "bold")
    return chosen


def _read_line(choices: Mapping[Any, str], default: str) -> str:
    """Return the answer on the next line. Raises ``EOFError`` at the end of the input."""
    hint = "/".join(map(label_of, choices)) if not any(choices.values()) else ""
    print(f"{hint} [{default}]: ".lstrip(), end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        raise EOFError
    if not sys.stdin.isatty():
        print(line.rstrip("\r\n"), file=sys.stderr)
    return line.strip() or default


def _print(text: str, color: Color | None = None, indent: str = "") -> None:
    """Print a text in lines that fit on the terminal."""
    width = text_width(sys.stderr)
    width = max(20, width - len(indent)) if width is not None else None
    shown = "\n".join(indent + line for line in wrap_words(text, width) or [""])
    print(colored(shown, color, sys.stderr) if color is not None else shown, file=sys.stderr, flush=True)
