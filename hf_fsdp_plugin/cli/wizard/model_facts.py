"""What the questions need to know of a model: its layer classes, its size and its longest sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_fsdp_plugin.cli.model_plan import load_model
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.text import format_count

if TYPE_CHECKING:
    from torch import nn


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


def read_model(path_or_id: str) -> ModelFacts:
    """Return the facts of a model. Raises ``SpecError`` (FSDP-E709) if it does not exist or cannot be built."""
    from hf_fsdp_plugin.plan.modules import ModuleTree
    from hf_fsdp_plugin.plan.policy import no_split_classes

    model, problems = load_model(path_or_id)
    if model is None:
        raise SpecError(problems)
    tree = ModuleTree(model)
    classes = dict(tree.class_counts())
    declared = tuple(name for name in no_split_classes(model) if name in classes)
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    text_config = get_text_config() if get_text_config is not None else config
    longest = getattr(text_config, "max_position_embeddings", None)
    return ModelFacts(
        name=path_or_id,
        model=model,
        class_name=type(model).__name__,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        classes=classes,
        layers=declared or tree.repeated_classes(),
        declares_layers=bool(declared),
        max_seq_len=longest if isinstance(longest, int) else 0,
    )
