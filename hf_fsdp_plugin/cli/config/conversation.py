"""The conversation of ``hf-fsdp config``: which question is next, how it is asked, and what its answer changes.

Everything is printed to stderr, so that stdout has only the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from hf_fsdp_plugin.cli.config import prediction
from hf_fsdp_plugin.cli.config.question import Question, State, label_of
from hf_fsdp_plugin.cli.config.questions import QUESTIONS
from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import wrap_words

FSDP1_WRITTEN: Final = frozenset({"backward_prefetch", "use_orig_params", "sync_module_states"})
"""Questions whose default is written for FSDP1 even if they are not asked: stock Accelerate has other defaults."""


def ask_questions(state: State, asker: Asker, given: Mapping[str, str]) -> None:
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
        elif question.is_detail and not state.answers["details"]:
            if state.version == 1 and question.name in FSDP1_WRITTEN:
                state.answers[question.name] = question.default_in(state).value
        else:
            _ask(question, state, asker)


def _ask(question: Question, state: State, asker: Asker) -> None:
    """Ask until the answer can be used."""
    while True:
        state.answers[question.name] = asker.ask(question, state)
        try:
            return _follow(question, state, asker)
        except SpecError as error:
            if not asker.asks:
                raise
            del state.answers[question.name]
            _print(str(error.problems[0]), "red")


def _read_option(question: Question, text: str, state: State) -> Any:
    try:
        return question.read(text, state)
    except ValueError as error:
        fix = f"Correct {question.flag}, or leave it out to be asked."
        raise SpecError([Problem(code="FSDP-E762", message=f"{question.flag}: {error}", fix=fix)]) from None


def _unused(question: Question) -> Problem:
    message = f"{question.flag} is given, but the other answers leave no such question: {question.help}."
    fix = f"Remove {question.flag}, or change the answer it depends on."
    return Problem(code="FSDP-E763", message=message, fix=fix)


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
    """Asks with arrow keys on a terminal, reads a line per question from a pipe or a file, or takes the defaults.

    Attributes:
        asks: whether an answer that is not valid is asked for again.
    """

    def __init__(self, *, takes_defaults: bool) -> None:
        is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.asks = not takes_defaults
        self._has_menus = self.asks and is_terminal

    def show(self, text: str) -> None:
        """Show a text between two questions."""
        print(file=sys.stderr)
        for line in text.splitlines():
            _print(line)

    def ask(self, question: Question, state: State) -> Any:
        """Return the answer. Raises ``SpecError`` if there are no more answers, or for an invalid default."""
        default = question.default_in(state)
        shown = label_of(default.value)
        if self.asks:
            print(file=sys.stderr)
            _print(question.text, "bold")
            for number, (value, about) in enumerate(question.choices_in(state).items(), start=1):
                if about and not self._has_menus:
                    _print(f"{number}. {label_of(value)}: {about}", indent="  ")
            if default.reason:
                _print(f"Default {shown or 'empty'}: {default.reason}.", "dim", indent="  ")
        while True:
            try:
                return question.read(self._answer(question, shown, state) if self.asks else shown, state)
            except ValueError as error:
                if not self.asks:
                    message = f"the default of {question.flag} is not valid: {error}"
                    problem = Problem(code="FSDP-E762", message=message, fix=f"Pass {question.flag}.")
                    raise SpecError([problem]) from None
                _print(str(error), "red")
            except EOFError:
                raise SpecError([_ended(question)]) from None

    def _answer(self, question: Question, default: str, state: State) -> str:
        """Return the text of an answer. Raises ``EOFError`` at the end of the input."""
        choices = question.choices_in(state)
        if not self._has_menus:
            return _read_line(choices, default)
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
        width = max(map(len, labels))
        titles = [f"{label:<{width}}  {about}".rstrip() for label, about in zip(labels, choices.values(), strict=True)]
        if max(map(len, titles)) > (text_width(sys.stderr) or 80) - 4:  # a menu has one line per choice
            for title in titles:
                _print(title, indent="  ")
            titles = labels
        items = [questionary.Choice(title=title, value=label) for title, label in zip(titles, labels, strict=True)]
        start = items[labels.index(default)] if default in labels else items[0]
        look |= {"instruction": "arrow keys, then Enter:", "erase_when_done": True}
        chosen = str(questionary.select("", choices=items, default=start, **look).unsafe_ask())
        _print(f" > {chosen}", "bold")
        return chosen


def _read_line(choices: Mapping[Any, str], default: str) -> str:
    hint = "/".join(map(label_of, choices)) if not any(choices.values()) else ""
    print(f"{hint} [{default}]: ".lstrip(), end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        raise EOFError
    if not sys.stdin.isatty():
        print(line.rstrip("\r\n"), file=sys.stderr)
    return line.strip() or default


def _ended(question: Question) -> Problem:
    message = f"the input ended before the question: {question.text}."
    fix = "Answer all questions, pass the answers as options, or pass --yes to take the defaults. Nothing was written."
    return Problem(code="FSDP-E760", message=message, fix=fix)


def _print(text: str, color: Color | None = None, indent: str = "") -> None:
    """Print a text in lines that fit on the terminal."""
    width = text_width(sys.stderr)
    width = max(20, width - len(indent)) if width is not None else None
    lines = wrap_words(text, width) or [""]
    shown = "\n".join(indent + line for line in lines)
    print(colored(shown, color, sys.stderr) if color is not None else shown, file=sys.stderr, flush=True)
