"""``Question``: one question of ``hf-fsdp config``, and ``State``: what is known when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hf_fsdp_plugin.launcher.world import FoundDevices
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spellings import FALSE_WORDS, TRUE_WORDS
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count

if TYPE_CHECKING:
    from torch import nn

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
        """``LlamaDecoderLayer ×32``."""
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
        return int(self.answers["global_batch"]) // (int(self.answers.get("micro_batch", 1)) * self.world_size)

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
        choices: the answers of a list with a description of each, or a function that returns them; empty for an answer
            that is typed. A question whose default is a bool has the choices yes and no.
        parse: converts typed text. Raises ``ValueError`` with what is expected.
        asked: whether the question applies in a state.
        about: comment of an answer in the file, if neither the reason of the default nor the choice describes it.
    """

    name: str
    text: str
    default: Any
    reason: str = ""
    setting: str = ""
    choices: Mapping[Any, str] | Callable[[State], Mapping[Any, str]] = field(default_factory=dict)
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
        return self.choices(state) if callable(self.choices) else self.choices

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
