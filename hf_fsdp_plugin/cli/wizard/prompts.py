"""Asks the questions: in menus with arrow keys on a terminal, as plain prompts otherwise, or not at all.

Everything is printed to stderr, so that stdout has only the result.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any, TextIO

from hf_fsdp_plugin.cli.output import colored, text_width
from hf_fsdp_plugin.cli.wizard.question import Default, Question, State
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import wrap_words

NO_LIBRARY = "Arrow keys need questionary: pip install questionary. Answers are typed instead."


def make_asker(*, yes: bool) -> Asker:
    """Return the way to ask: menus on a terminal with questionary, else plain prompts; the defaults for ``--yes``."""
    if yes:
        return Asker()
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if is_terminal and importlib.util.find_spec("questionary") is not None:
        return Menus()
    if is_terminal:
        Asker().show(NO_LIBRARY)
    return PlainPrompts(sys.stdin)


def ended(question: str) -> SpecError:
    """Return the error that there is no answer to a question."""
    message = f"the input ended before the question: {question}."
    fix = "Answer all questions, pass the answers as options, or pass --yes to take the defaults. Nothing was written."
    return SpecError([Problem(code="FSDP-E760", message=message, fix=fix)])


class Asker:
    """Takes every default, for ``--yes``. Its subclasses ask a person."""

    def ask(self, question: Question, default: Default, state: State) -> Any:
        """Return the answer. Raises ``SpecError`` if there are no more answers."""
        return read_default(question, default, state)

    def show(self, text: str) -> None:
        """Show a text between two questions."""
        width = text_width(sys.stderr)
        lines = [part for line in text.splitlines() for part in wrap_words(line, width) or [""]]
        print("", *lines, sep="\n", file=sys.stderr)

    def refuse(self, question: Question, problem: Problem) -> None:
        """Show why an answer is not valid, if the question can be asked again. Otherwise raise ``SpecError``."""
        raise SpecError([problem])


class PlainPrompts(Asker):
    """Prints numbered choices and reads a line per question, from a terminal, a pipe or a file."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def ask(self, question: Question, default: Default, state: State) -> Any:
        choices = question.choices_in(state)
        is_list = any(choice.about for choice in choices)
        _print_question(question.text)
        for number, choice in enumerate(choices if is_list else (), start=1):
            print(_indented(f"{number}. {choice.label}: {choice.about}"), file=sys.stderr)
        _print_reason(question, default, state)
        hint = "/".join(choice.label for choice in choices) if choices and not is_list else ""
        prompt = f"{hint} [{question.label(default.value, state)}]: ".lstrip()
        while True:
            print(prompt, end="", file=sys.stderr, flush=True)
            line = self._lines.readline()
            if not line:
                print(file=sys.stderr)
                raise ended(question.text)
            if not self._lines.isatty():
                print(line.rstrip("\r\n"), file=sys.stderr)
            try:
                return question.read(line, state) if line.strip() else read_default(question, default, state)
            except ValueError as error:
                _print_error(str(error))

    def refuse(self, question: Question, problem: Problem) -> None:
        _print_error(str(problem))


class Menus(Asker):
    """Menus with arrow keys, and lines that can be edited, by questionary."""

    def ask(self, question: Question, default: Default, state: State) -> Any:
        _print_question(question.text)
        _print_reason(question, default, state)
        while True:
            if question.choices_in(state):
                answer = self._menu(question, default, state)
                print(colored(f" > {question.label(answer, state)}", "bold", sys.stderr), file=sys.stderr)
                return answer
            text = self._line(question, question.label(default.value, state))
            try:
                return question.read(text, state)
            except ValueError as error:
                _print_error(str(error))

    def refuse(self, question: Question, problem: Problem) -> None:
        _print_error(str(problem))

    def _menu(self, question: Question, default: Default, state: State) -> Any:
        import questionary

        choices = question.choices_in(state)
        width = max(len(choice.label) for choice in choices)
        columns = (text_width(sys.stderr) or 80) - 4
        titles = [f"{choice.label:<{width}}  {choice.about}".rstrip() for choice in choices]
        if any(len(title) > columns for title in titles):  # a menu has one line per choice
            titles = [choice.label for choice in choices]
            for choice in choices:
                print(_indented(f"{choice.label}: {choice.about}"), file=sys.stderr)
        items = [questionary.Choice(title=title, value=number) for number, title in enumerate(titles)]
        start = next((number for number, choice in enumerate(choices) if choice.value == default.value), 0)
        chosen = questionary.select(
            "",
            choices=items,
            default=items[start],
            qmark="",
            instruction="arrow keys, then Enter:",
            **_look(),
            erase_when_done=True,
        ).unsafe_ask()
        return choices[chosen].value

    def _line(self, question: Question, shown: str) -> str:
        import questionary

        try:
            return str(questionary.text(">", default=shown, qmark="", **_look()).unsafe_ask())
        except EOFError:
            raise ended(question.text) from None


def _print_question(text: str) -> None:
    lines = wrap_words(text, text_width(sys.stderr), "")
    print(colored("\n" + "\n".join(lines), "bold", sys.stderr), file=sys.stderr)


def _print_reason(question: Question, default: Default, state: State) -> None:
    """Print the default answer and its reason."""
    if default.reason:
        shown = question.label(default.value, state) or "empty"
        print(colored(_indented(f"Default {shown}: {default.reason}."), "dim", sys.stderr), file=sys.stderr)


def read_default(question: Question, default: Default, state: State) -> Any:
    """Return the default answer. Raises ``SpecError`` if it is not valid with the earlier answers."""
    try:
        return question.read(question.label(default.value, state), state)
    except ValueError as error:
        message = f"the default of {question.flag} is not valid: {error}"
        raise SpecError([Problem(code="FSDP-E762", message=message, fix=f"Pass {question.flag}.")]) from None


def _indented(text: str) -> str:
    width = text_width(sys.stderr)
    return "\n".join(f"  {line}" for line in wrap_words(text, width and max(20, width - 2), "   "))


def _print_error(text: str) -> None:
    lines = wrap_words(text, text_width(sys.stderr), "")
    print(colored("\n".join(lines), "red", sys.stderr), file=sys.stderr, flush=True)


def _look() -> dict[str, Any]:
    """Return the style of a menu or line, and its output on stderr."""
    import questionary
    from prompt_toolkit.output import create_output

    styles = [("highlighted", "bold"), ("answer", "bold"), ("pointer", "bold"), ("instruction", "")]
    return {"style": questionary.Style(styles), "output": create_output(stdout=sys.stderr)}
