"""``Question``: one question of ``hf-fsdp config``, and ``State``: what is known when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_fsdp_plugin.launcher.device_search import FoundDevices
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.values import InvalidValue, parse_value
from hf_fsdp_plugin.spellings import FALSE_WORDS, TRUE_WORDS
from hf_fsdp_plugin.text import format_count
from hf_fsdp_plugin.vocabulary import BY_NAME

if TYPE_CHECKING:
    from torch import nn

    from hf_fsdp_plugin.estimate.machines import Machine


class Choice(NamedTuple):
    """One answer of a list. ``about`` is one line that describes it."""

    value: Any
    about: str = ""

    @property
    def label(self) -> str:
        return {True: "yes", False: "no"}[self.value] if isinstance(self.value, bool) else str(self.value)


YES_NO = (Choice(value=True), Choice(value=False))


class Default(NamedTuple):
    """The default answer, and its reason in one line."""

    value: Any
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model on the meta device, and what the questions need to know of it.

    Attributes:
        name: as the user named it.
        classes: class name -> number of modules, without containers.
        layers: the classes that become units by default.
        declares_layers: whether the model itself declares these classes (``_no_split_modules``).
        max_seq_len: number of positions; 0 if the config has none.
    """

    name: str
    model: nn.Module
    class_name: str
    num_params: int
    classes: Mapping[str, int]
    layers: tuple[str, ...]
    declares_layers: bool
    max_seq_len: int

    @property
    def layers_text(self) -> str:
        """``LlamaDecoderLayer ×32``."""
        return ", ".join(f"{name} ×{self.classes[name]}" for name in self.layers)

    @property
    def text(self) -> str:
        """One line: class, number of parameters and layers."""
        layers = f", {self.layers_text}" if self.layers else ""
        return f"{self.class_name}: {format_count(self.num_params)} parameters{layers}"


@dataclass(kw_only=True, slots=True)
class State:
    """What is known so far.

    Attributes:
        answers: name of a question -> answer.
        existing: the settings of the file that is changed; without a file, the defaults.
        path: the file that is changed, for messages; empty without one.
        cpu: whether the ranks run on CPUs.
        recommended: canonical name of a setting, or name of a question -> value that the prediction recommends.
        advice: the same, if the recommendation was accepted: these values are the defaults.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    existing: FsdpSpec = field(default_factory=FsdpSpec)
    path: str = ""
    machine: Callable[[], FoundDevices] = FoundDevices
    model: ModelFacts | None = None
    cpu: bool = False
    recommended: Mapping[str, Any] = field(default_factory=dict)
    advice: Mapping[str, Any] = field(default_factory=dict)

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
        micro_batch = int(self.answers.get("micro_batch", 1))
        return int(self.answers["global_batch"]) // (micro_batch * self.world_size)

    @property
    def version(self) -> int:
        return int(self.answers.get("fsdp_version", 2))

    def named_machine(self) -> Machine | None:
        """Return the kind of machine that was named; ``None`` without one."""
        name = str(self.answers.get("machine", ""))
        if not name:
            return None
        from hf_fsdp_plugin.estimate.machines import machine_named

        return machine_named(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question.

    Attributes:
        name: name of the answer, and of the option with hyphens.
        text: the question.
        default: the default answer, or a function that returns it in a state.
        setting: canonical name of the setting that the answer is; empty if it is not one setting.
        choices: the answers of a list, or a function that returns them; empty for an answer that is typed, and for yes
            and no.
        parse: converts typed text. Raises ``ValueError`` with what is expected.
        asked: whether the question applies in a state.
        about: comment of an answer in the file, if neither the reason of the default nor the choice describes it.
    """

    name: str
    text: str
    default: Default | Callable[[State], Default]
    setting: str = ""
    choices: tuple[Choice, ...] | Callable[[State], tuple[Choice, ...]] = ()
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

    def choices_in(self, state: State) -> tuple[Choice, ...]:
        """Return the answers of the list in a state."""
        if isinstance(self.default, Default) and isinstance(self.default.value, bool):
            return YES_NO
        return self.choices(state) if callable(self.choices) else self.choices

    def read(self, text: str, state: State) -> Any:
        """Return the answer that a text means. Raises ``ValueError`` with what is expected."""
        choices = self.choices_in(state)
        if not choices:
            return self.parse(text.strip(), state)
        if (found := _chosen(text, choices)) is not None:
            return found.value
        named = ", ".join(choice.label for choice in choices)
        raise ValueError(f"{text.strip()!r} is not one of {named}.")

    def default_in(self, state: State) -> Default:
        """Return the default: the planner's advice, else the value of the existing file, else the general default."""
        advised = self.setting or self.name
        if advised in state.advice and self._offers(state.advice[advised], state):
            return Default(state.advice[advised], "recommended for this model, batch and memory")
        if self.setting and state.existing.asked(self.setting):
            value = state.existing.get(self.setting)
            if isinstance(value, tuple):
                value = ",".join(value)
            if value != "auto" and self._offers(value, state):
                return Default(value, f"as in {state.path}")
        return self.default(state) if callable(self.default) else self.default

    def label(self, value: Any, state: State) -> str:
        """Return an answer as text."""
        return next((choice.label for choice in self.choices_in(state) if choice.value == value), str(value))

    def comment(self, value: Any, state: State) -> str:
        """Return the comment for an answer in the file: the reason of a default, else what the answer means."""
        default = self.default_in(state)
        if default.value == value and default.reason and not default.reason.startswith("as in "):
            return default.reason
        return next((choice.about for choice in self.choices_in(state) if choice.value == value), "") or self.about

    def _offers(self, value: Any, state: State) -> bool:
        choices = self.choices_in(state)
        return not choices or any(choice.value == value for choice in choices)


def _chosen(text: str, choices: tuple[Choice, ...]) -> Choice | None:
    """Return the choice with this number, from 1, or with this label."""
    word = text.strip().lower().replace("-", "_")
    labels = [choice.label.lower().replace("-", "_") for choice in choices]
    if word in labels:
        return choices[labels.index(word)]
    if choices == YES_NO and word in {*TRUE_WORDS, *FALSE_WORDS, "y", "n"}:
        return YES_NO[0 if word in {*TRUE_WORDS, "y"} else 1]
    if word.isdecimal() and 1 <= int(word) <= len(choices):
        return choices[int(word) - 1]
    near = [number for number, label in enumerate(labels) if word and label.startswith(word)]
    return choices[near[0]] if len(near) == 1 else None


def parse_setting(name: str, text: str) -> Any:
    """Return the value of a setting that a text means. Raises ``ValueError`` with what is expected."""
    try:
        return parse_value(BY_NAME[name], text)
    except InvalidValue as error:
        raise ValueError(f"{text[:80]!r} is not valid; expected {error.expected}.") from None


def whole_number(text: str, *, minimum: int = 1, maximum: int = 1 << 20) -> int:
    """Return a whole number, which may have thousands separators. Raises ``ValueError`` with what is expected."""
    digits = text.replace(",", "").replace("_", "")
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if not (digits.isdecimal() and digits.isascii()):
        raise ValueError(f"{shown!r} is not a whole number.")
    if len(digits) > 20 or not minimum <= int(digits) <= maximum:
        raise ValueError(f"{shown} is not between {minimum:,} and {maximum:,}.")
    return int(digits)
