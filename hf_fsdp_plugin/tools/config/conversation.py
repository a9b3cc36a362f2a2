"""The conversation of ``hf-fsdp config``: what a question is, how it is asked, and what is predicted from answers.

Everything is printed to stderr, so that stdout has only the result.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from hf_fsdp_plugin.cli.output import Color, colored, text_width
from hf_fsdp_plugin.launcher.world import FoundDevices
from hf_fsdp_plugin.problems import Problem, SpecError, UsageError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_memory, wrap_words
from hf_fsdp_plugin.tools.check.output import load_meta_model
from hf_fsdp_plugin.tools.common import parse_bytes
from hf_fsdp_plugin.tools.config.text import stock_limits
from hf_fsdp_plugin.tools.plan.estimate.types import MemoryEstimate, Workload
from hf_fsdp_plugin.vocabulary import FALSE_WORDS, TRUE_WORDS

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.tools.plan.estimate.planner import Advice

T = TypeVar("T")
USUAL_MIN_NUM_PARAMS: Final = 100_000_000
"""Default of ``accelerate config`` for the number of parameters from which the size policy makes a unit."""
YES_NO: Final[Mapping[Any, str]] = {True: "", False: ""}


class Default(NamedTuple):
    """The default answer, and its reason in one line."""

    value: Any
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model on the meta device, and what the questions need to know of it.

    Attributes:
        classes: class name -> number of modules, without containers.
        layers: the classes that become units by default.
        declares_layers: whether the model itself declares these classes (``_no_split_modules``).
        max_seq_len: number of positions; 0 if the config has none.
    """

    model: nn.Module
    classes: Mapping[str, int]
    layers: tuple[str, ...]
    declares_layers: bool
    max_seq_len: int

    @property
    def class_name(self) -> str:
        return type(self.model).__name__

    @property
    def layers_text(self) -> str:
        """The classes of layers with their numbers, such as ``LlamaDecoderLayer ×32``."""
        return ", ".join(f"{name} ×{self.classes[name]}" for name in self.layers)

    @property
    def text(self) -> str:
        """One line: class, number of parameters and layers."""
        layers = f", {self.layers_text}" if self.layers else ""
        num_params = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{self.class_name}: {format_count(num_params)} parameters{layers}"


@dataclass(kw_only=True, slots=True)
class State:
    """What is known so far.

    Attributes:
        answers: name of a question -> answer.
        existing: the settings of the file that is changed; without a file, the defaults.
        path: the file that is changed, for messages; empty without one.
        cpu: whether the ranks run on CPUs.
        takes_defaults: whether nothing is asked.
        recommended: canonical name of a setting, or name of a question -> value that the prediction recommends.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    existing: FsdpSpec = field(default_factory=FsdpSpec)
    path: str = ""
    machine: Callable[[], FoundDevices] = FoundDevices
    model: ModelFacts | None = None
    cpu: bool = False
    takes_defaults: bool = False
    recommended: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_machines(self) -> int:
        return int(self.answers.get("num_machines", 1))

    @property
    def gpus(self) -> int:
        """Ranks of each machine."""
        return int(self.answers.get("gpus", 1))

    @property
    def world_size(self) -> int:
        return self.num_machines * self.gpus

    @property
    def accumulation(self) -> int:
        """Forward passes of a rank per optimizer step."""
        return self.samples_of_rank // int(self.answers.get("micro_batch", 1))

    @property
    def samples_of_rank(self) -> int:
        """Samples of a rank per optimizer step. The ranks of a context axis have the same samples."""
        return int(self.answers["global_batch"]) * self.context // self.world_size

    @property
    def context(self) -> int:
        """Ranks that divide each sequence."""
        return int(self.answers.get("context_size", 1))

    @property
    def version(self) -> int:
        return int(self.answers.get("fsdp_version", 2))

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy has groups of ranks."""
        return "strategy" in self.answers and STRATEGIES[self.answers["strategy"]].hybrid


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question.

    Attributes:
        name: name of the answer, and of the option with hyphens.
        text: the question.
        default: the default answer, or a function that returns it with its reason in a state.
        reason: the reason of the default, in one line.
        setting: canonical name of the setting that the answer is; empty if it is not one setting.
        choices: the answers of a list with a description of each; empty for an answer that is typed. A question whose
            default is a bool has the choices yes and no.
        offered: whether a choice is possible in a state.
        parse: converts typed text. Raises ``ValueError`` with what is expected.
        asked: whether the question applies in a state.
        about: comment of an answer in the file, if neither the reason of the default nor the choice describes it.
    """

    name: str
    text: str
    default: Any
    reason: str = ""
    setting: str = ""
    choices: Mapping[Any, str] = field(default_factory=dict)
    offered: Callable[[Any, State], bool] = lambda choice, state: True
    parse: Callable[[str, State], Any] = lambda text, state: text
    asked: Callable[[State], bool] = lambda state: True
    about: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Description of the option."""
        return self.text[0].lower() + self.text[1:] if self.text[1].islower() else self.text

    def choices_in(self, state: State) -> Mapping[Any, str]:
        """Return the answers of the list in a state, each with its description."""
        if isinstance(self.default, bool):
            return YES_NO
        return {choice: about for choice, about in self.choices.items() if self.offered(choice, state)}

    def read(self, text: str, state: State) -> Any:
        """Return the answer that a text means. Raises ``ValueError`` with what is expected."""
        choices = self.choices_in(state)
        if not choices:
            return self.parse(text.strip(), state)
        word = text.strip().lower().replace("-", "_")
        if choices is YES_NO and word in {*TRUE_WORDS, *FALSE_WORDS, "y", "n"}:
            return word in {*TRUE_WORDS, "y"}
        if word.isdecimal() and 1 <= int(word) <= len(choices) and word not in map(str, choices):
            return list(choices)[int(word) - 1]
        by_label = {label_of(value).lower().replace("-", "_"): value for value in choices}
        near = [word] if word in by_label else [label for label in by_label if word and label.startswith(word)]
        if len(near) != 1:
            raise ValueError(f"{text.strip()!r} is not one of {', '.join(map(label_of, choices))}.")
        return by_label[near[0]]

    def default_in(self, state: State) -> Default:
        """Return the default: the value of the existing file, else the planner's advice, else the general default."""
        choices = self.choices_in(state)
        if self.setting and state.existing.asked(self.setting):
            value = state.existing.get(self.setting)
            value = ",".join(value) if isinstance(value, tuple) else value
            if value != "auto" and (not choices or value in choices):
                return Default(value, f"as in {state.path}")
        advised = state.recommended.get(self.setting or self.name)
        if advised is not None and (not choices or advised in choices):
            return Default(advised, "recommended for this model, batch and memory")
        return self._general_default(state)

    def _general_default(self, state: State) -> Default:
        return self.default(state) if callable(self.default) else Default(self.default, self.reason)

    def comment(self, value: Any, state: State) -> str:
        """Return the comment for an answer in the file: the reason of a default, else what the answer means."""
        for default in (self.default_in(state), self._general_default(state)):
            if default.value == value and default.reason and not default.reason.startswith("as in "):
                return default.reason
        return self.choices_in(state).get(value, "") or self.about


def label_of(value: Any) -> str:
    """Return an answer as text."""
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def ask_questions(questions: Iterable[Question], state: State, given: Mapping[str, str]) -> None:
    """Ask all questions that apply, and add the answers to `state`.

    Args:
        questions: in their order.
        given: name of a question -> answer given by an option, as text.

    Raises:
        SpecError: there are no more answers.
        UsageError: an option is not valid.
    """
    for question in questions:
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
    from hf_fsdp_plugin.plan.modules import ModuleTree, no_split_classes
    from hf_fsdp_plugin.tools.meta_model import max_positions

    model = load_meta_model(path_or_id)
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
    from hf_fsdp_plugin.tools.plan.advise import rows_table

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
    from hf_fsdp_plugin.tools.plan.estimate.planner import advise

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
    from hf_fsdp_plugin.plan.resolve import resolve
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory

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
