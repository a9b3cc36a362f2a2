"""The conversation of ``hf-fsdp config``: which question is next, how it is asked, and what is predicted from answers.

Everything is printed to stderr, so that stdout has only the result.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hf_fsdp_plugin.cli.check_output import load_model
from hf_fsdp_plugin.cli.config.question import ModelFacts, Question, State, label_of
from hf_fsdp_plugin.cli.config.questions import QUESTIONS, USUAL_MIN_NUM_PARAMS
from hf_fsdp_plugin.cli.config_text import stock_limits
from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.launcher.flags import UsageError
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import format_memory, parse_bytes, wrap_words

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.planner import Advice
    from hf_fsdp_plugin.estimate.types import MemoryEstimate

T = TypeVar("T")


def ask_questions(state: State, given: Mapping[str, str]) -> None:
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
            _follow(question, state)
        else:
            _ask(question, state)


def _ask(question: Question, state: State) -> None:
    """Ask until the answer can be used."""
    while True:
        state.answers[question.name] = ask_question(question, state)
        try:
            return _follow(question, state)
        except SpecError as error:
            if state.takes_defaults:
                raise
            del state.answers[question.name]
            _print(str(error.problems[0]), "red")


def _invalid(message: str, fix: str) -> UsageError:
    return UsageError(str(Problem(code="FSDP-E762", message=message, fix=fix)))


def _follow(question: Question, state: State) -> None:
    """Do what follows from some answers: read the model, or predict.

    Raises:
        SpecError: the answer cannot be used.
    """
    answer = state.answers[question.name]
    if question.name == "model" and answer:
        show_text(f"Reading {answer} ...")
        state.model = read_model(answer)
        show_text(state.model.text)
    elif question.name == "fsdp_version" and state.model is not None and state.answers["gpu_memory"]:
        show_text("Predicting memory and communication ...")
        text, state.recommended = recommend(state, text_width(sys.stderr))
        show_text(text)


def show_text(text: str) -> None:
    """Show a text between two questions."""
    print(file=sys.stderr)
    for line in text.splitlines():
        _print(line)


def ask_question(question: Question, state: State) -> Any:
    """Return the answer: chosen with arrow keys on a terminal, read from a line of a pipe or a file, or the default.

    Raises:
        SpecError: there are no more answers.
        UsageError: the default, which is taken, is not valid.
    """
    default, reason = question.default_in(state)
    shown, choices = label_of(default), question.choices_in(state)
    if state.takes_defaults:
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
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    while True:
        try:
            return question.read((_choose if is_terminal else _read_line)(choices, shown), state)
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
    look: dict[str, Any] = {"qmark": "", "style": questionary.Style(styles), "output": create_output(stdout=sys.stderr)}
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


def read_model(path_or_id: str) -> ModelFacts:
    """Return the facts of a model. Raises ``SpecError`` (FSDP-E709) if it does not exist or cannot be built."""
    from hf_fsdp_plugin.plan.meta_model import max_positions
    from hf_fsdp_plugin.plan.modules import ModuleTree, no_split_classes

    model, problems = load_model(path_or_id)
    if model is None:
        raise SpecError(problems)
    tree = ModuleTree(model)
    classes = dict(tree.class_counts())
    declared = tuple(name for name in no_split_classes(model) if name in classes)
    return ModelFacts(
        model=model,
        classes=classes,
        layers=declared or tree.repeated_classes(),
        declares_layers=bool(declared),
        max_seq_len=max_positions(model),
    )


def recommend(state: State, width: int | None) -> tuple[str, Mapping[str, Any]]:
    """Return the planner's table for the memory of a GPU, and the recommended answers; none without a prediction."""
    from hf_fsdp_plugin.cli.plan.advise import rows_table

    advice, failure = _attempt(lambda: advice_of(state, parse_bytes(state.answers["gpu_memory"]) or 0))
    if advice is None:
        return f"No prediction: {failure}", {}
    limit = format_memory(advice.limit)
    text = f"Predicted per GPU of {format_memory(advice.gpu_memory)}, of which {limit} may be used:\n\n"
    if not advice.fitting:
        return text + " ".join(["Nothing fits.", *advice.remedies]), {}
    limits = {id(row): " ".join(stock_limits(row.settings, state.version, gpus=state.gpus)) for row in advice.fitting}
    best = next((row for row in advice.fitting if not limits[id(row)]), None)  # stock Accelerate runs it, too
    text += f"{rows_table(advice.fitting, best, width)}\n\n"
    of_fastest = limits[id(advice.fitting[0])]
    if best is None:
        return f"{text}Nothing that fits runs with stock Accelerate. {of_fastest}", {}
    settings = {name: value for name, value in best.settings.items() if name != "fsdp.version"}
    answers = {"micro_batch": best.choice.micro_batch, "sync_each_batch": best.choice.sync_each_batch}
    text += f"Recommended (»): it fits, with least recomputation and communication. {of_fastest}"
    return text.rstrip(), settings | answers


def predict_memory(state: State, spec: FsdpSpec) -> MemoryEstimate | None:
    """Show and return the predicted memory of the chosen settings; ``None`` without a model or a prediction."""
    model, size = state.model, parse_bytes(state.answers.get("gpu_memory", ""))
    memory, _ = _attempt(lambda: _estimate(state, model.model, spec)) if model is not None else (None, "")
    if memory is not None:
        needed = format_memory(memory.needed_bytes) + (f" of {format_memory(size)}" if size else "")
        show_text(f"Predicted memory of these settings: {needed} per GPU, in the {memory.peak.where}.")
    return memory


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


def advice_of(state: State, gpu_memory: int) -> Advice:
    """Return the planner's answer. Raises ``SpecError`` if the model cannot be planned."""
    from hf_fsdp_plugin.estimate.planner import advise
    from hf_fsdp_plugin.estimate.types import Workload

    answers, model = state.answers, state.model
    assert model is not None, "the caller checks that there is a model"
    wrap: dict[str, Any] = {"wrap.policy": "transformer"}  # what the wizard offers as default
    if not model.layers:
        wrap = {"wrap.policy": "size", "wrap.min_num_params": USUAL_MIN_NUM_PARAMS}
    elif not model.declares_layers:
        wrap["wrap.classes"] = list(model.layers)
    return advise(
        model.model,
        Workload(micro_batch=1, seq_len=int(answers["seq_len"]), optimizer=answers["optimizer"]),
        global_batch=int(answers["global_batch"]),
        gpu_memory=gpu_memory,
        num_machines=state.num_machines,
        gpus_per_machine=state.gpus,
        version=1 if state.version == 1 else 2,
        precision="auto" if answers["precision"] == "no" else answers["precision"],
        wrap=wrap,
    )


def _estimate(state: State, model: nn.Module, spec: FsdpSpec) -> MemoryEstimate:
    from hf_fsdp_plugin.estimate.memory.peak import estimate_memory
    from hf_fsdp_plugin.estimate.types import Workload
    from hf_fsdp_plugin.plan.resolve import resolve

    answers = state.answers
    plan = resolve(spec, model, world_size=state.world_size, device_type="cpu" if state.cpu else "cuda")
    workload = Workload(
        micro_batch=int(answers["micro_batch"]),
        seq_len=int(answers["seq_len"]),
        accumulation=state.accumulation,
        sync_each_batch=bool(answers.get("sync_each_batch", False)),
        optimizer=answers["optimizer"],
    )
    return estimate_memory(plan, model, workload)
