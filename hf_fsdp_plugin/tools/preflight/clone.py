"""The tiny clone of a model, and made samples for its task: random tokens, images or sounds, and labels.

The clone has the same classes and units, few layers, small widths and random weights.

The size of an attention head is not changed, so rotary dimensions and the scale of attention stay as they are. Heads
and widths are divided by one factor, which keeps ``hidden_size == num_heads * head_size``. If the config sets the size
of a head, widths are divided further. The rules go by the names of the attributes of a config, not by the architecture;
:func:`find_clone` checks the result.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count, format_names
from hf_fsdp_plugin.tools.meta_model import default_dtype, on_meta

MAX_PARAMS: Final = 200_000_000
"""Maximum parameters of a clone: a rank needs some 16 bytes for each."""
SMALL_VOCABULARY: Final = 512
NUM_TOKENS: Final = 16
"""Tokens per sample of a preflight."""
_NUM_SOUND_SAMPLES: Final = 4000
_CLASS_TASKS: Final = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_NUM_LAYERS: Final = (2, 3, 4, 6, 8, 12)
_SEED: Final = 0

_HEADS: Final = re.compile(r"(?:^|_)n_heads?$|heads$")
_KV_HEADS: Final = re.compile(r"(?:kv|key_value|key|value)_heads$|n_head_kv$")
_LAYERS: Final = re.compile(
    r"^(?:num_hidden_layers|num_layers|n_layers?|(?:num_)?(?:encoder|decoder)_layers|depth|depths|num_block)$"
)
_WIDTHS: Final = re.compile(
    r"hidden_size$|intermediate_size|^d_model$|^d_ff$|^d_inner$|^n_embd$|^n_inner$|ffn_dim|^dim$|^hidden_dim$|^embed_dim$"
    r"|mlp_dim$|projection_dim$|proj_dim$|embedding_size$|_lora_rank$|lru_width$|ffn_hidden_size$"
)
_EXPERTS: Final = re.compile(r"^(?:num_local_experts|num_experts|n_routed_experts|moe_num_experts)$")
_TOP_K: Final = re.compile(r"^(?:num_experts_per_tok|num_experts_per_token|moe_k|moe_top_k|num_selected_experts)$")
_TOKEN_ID: Final = re.compile(r"token_id$|token_index$|_token$")
_HEAD_SIZES: Final = {"head_dim", "d_kv", "qk_nope_head_dim", "attention_head_size"}
_MIN_HEADS: Final = 2
_MIN_WIDTH: Final = 32
_MIN_NARROW_WIDTH: Final = 64
"""The smallest width to which the widths are divided if the config sets the size of a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clone:
    """The config of a clone, and how it compares with the model.

    Attributes:
        config: the config, an object of Transformers.
        num_params, real_num_params: parameters of the clone and of the model.
        problems: a warning if the clone lacks classes of the model, a note if it has the widths of the model.
    """

    config: Any
    num_params: int
    real_num_params: int
    problems: tuple[Problem, ...] = ()


def classes_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the classes of all modules of a model."""
    return frozenset(type(module).__name__ for module in model.modules())


def num_params_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def find_clone(model_class: Any, config: Any) -> Clone:
    """Return the smallest clone that has the model's classes, and that runs: with small widths, or else with its own.

    If no clone runs, the smallest one is returned: its run shows the reason.

    Args:
        model_class: class of Transformers.

    Raises:
        SpecError: no clone is small enough, or the model cannot be built.
    """
    try:
        real = on_meta(model_class, config)
    except Exception as error:
        message = f"{model_class.__name__} cannot be built from its config: {error}"
        fix = "Correct the config.json of the model."
        raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)]) from error
    stacks = [vars(part)[name] for part in config_parts(config) for name in vars(part) if _LAYERS.match(name)]
    numbers = [number for stack in stacks for number in (stack if isinstance(stack, list | tuple) else [stack])]
    most = max([_NUM_LAYERS[0], *(number for number in numbers if isinstance(number, int))])
    reasons: list[str] = []
    found: list[tuple[int, Clone]] = []
    for narrow in (True, False):
        for num_layers in (number for number in _NUM_LAYERS if number <= most):
            try:
                small = small_config(config, num_layers, narrow=narrow)
                model = on_meta(model_class, small)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            missing, num_params = classes_of(real) - classes_of(model), num_params_of(model)
            if num_params > MAX_PARAMS:
                reasons.append(f"with {num_layers} layers it has {format_count(num_params)} parameters")
                break
            problems = []
            if missing:
                classes = format_names(sorted(missing))
                message = f"the clone has no module of class {classes}, which the model has in its later layers."
                fix = "Test these layers in a short run of the whole model."
                problems.append(Problem(code="FSDP-W759", message=message, fix=fix))
            if reasons and not narrow:
                message = "the clone has the widths of the model and fewer layers, because smaller widths failed: "
                problems.append(Problem(code="FSDP-N757", message=message + reasons[0]))
            clone = Clone(
                config=small, num_params=num_params, real_num_params=num_params_of(real), problems=tuple(problems)
            )
            found.append((len(missing), clone))
            if not missing:
                if not (reason := _why_it_does_not_run(model_class, small)):
                    return clone
                reasons.append(reason)
                break
    if found:
        return min(found, key=lambda each: each[0])[1]
    message = f"no clone of {model_class.__name__} is small enough: {'; '.join(reasons)}."
    fix = f"Give a model of the same architecture with fewer than {format_count(MAX_PARAMS)} parameters."
    raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])


def _why_it_does_not_run(model_class: Any, config: Any) -> str:
    """Return why a clone cannot compute its loss of made data; empty if it can, or if there is no such data."""
    try:
        with torch.random.fork_rng(devices=[]), default_dtype(config), torch.no_grad():
            model = model_class(config)
            data = MadeData(model, 2)
            model(**collate([data[0], data[1]]))
    except Exception as error:
        return "" if "no made data" in str(error) else f"{type(error).__name__}: {error}"
    return ""


def write_clone(model_class: Any, clone: Clone, folder: Path) -> None:
    """Write a clone with random weights as a Hugging Face folder, which appears when it is complete."""
    partial = folder.with_name(f"{folder.name}.part")
    with torch.random.fork_rng(devices=[]), default_dtype(clone.config):
        torch.manual_seed(_SEED)
        model_class(clone.config).save_pretrained(partial)
    os.replace(partial, folder)


def small_config(config: Any, num_layers: int, *, narrow: bool = True) -> Any:
    """Return a reduced copy of a config of Transformers. Quantization is removed.

    Args:
        num_layers: number of layers of each stack; a smaller number is kept.
        narrow: whether heads and widths are divided, by one factor in the whole model.
    """
    small = copy.deepcopy(config)
    parts = list(config_parts(small))
    head_factor, width_factor = _factors([_integers(part) for part in parts]) if narrow else (1, 1)
    for part in parts:
        _reduce_layers(part, num_layers)
        _reduce_experts(part)
        _divide(part, head_factor, width_factor)
        _reduce_vocabulary(part, SMALL_VOCABULARY)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    return small


def _integers(config: Any) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }


def _factors(parts: list[dict[str, int]]) -> tuple[int, int]:
    """Return the largest common factor by which the heads of all parts can be divided, and that of the widths."""
    widths = [value for part in parts for name, value in part.items() if _WIDTHS.search(name)]
    heads = [value for part in parts for name, value in part.items() if _is_heads(name)]
    if not widths:
        return 1, 1
    common = math.gcd(*heads, *widths)
    factors = [factor for factor in range(common, 1, -1) if common % factor == 0]
    if not heads:
        factor = next((factor for factor in factors if min(widths) // factor >= _MIN_WIDTH), 1)
        return factor, factor
    several = [factor for factor in factors if min(heads) // factor >= _MIN_HEADS]
    factor = width_factor = max([1, *(several or factors)])
    if all(part.keys() & _HEAD_SIZES for part in parts if any(map(_is_heads, part))):  # widths do not depend on heads
        while all(width % (2 * width_factor) == 0 for width in widths) and (
            min(widths) // (2 * width_factor) >= _MIN_NARROW_WIDTH
        ):
            width_factor *= 2
    return factor, width_factor


def _is_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _KV_HEADS.search(name)


def _divide(config: Any, factor: int, width_factor: int) -> None:
    """Divide heads and widths. Fewer key-value heads than the factor become the largest number that still divides."""
    heads = [value for name, value in _integers(config).items() if _is_heads(name)]
    for name, value in _integers(config).items():
        if _KV_HEADS.search(name):
            wanted = max(1, value // factor)
            if heads:
                wanted = max(n for n in range(1, wanted + 1) if (min(heads) // factor) % n == 0)
            setattr(config, name, wanted)
        elif _is_heads(name):
            setattr(config, name, value // factor)
        elif _WIDTHS.search(name):
            setattr(config, name, value // width_factor)


def _reduce_layers(config: Any, num_layers: int) -> None:
    """Keep the first layers. Lists with one entry for each layer are cut, lists of layer numbers too."""
    stages = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    stages = {name: value for name, value in stages.items() if _LAYERS.match(name)}
    if stages:  # layers of each stage; other lists have one entry for each stage
        for name, value in stages.items():
            setattr(config, name, type(value)(min(each, num_layers) for each in value))
        return
    before = {value for name, value in _integers(config).items() if _LAYERS.match(name)}
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and _LAYERS.match(name):
            setattr(config, name, min(value, num_layers))
        elif isinstance(value, list | tuple) and len(value) in before and len(value) > num_layers:
            setattr(config, name, value[:num_layers])
        elif isinstance(value, list) and name.endswith("_layers") and value and all(isinstance(n, int) for n in value):
            setattr(config, name, [number for number in value if number < num_layers])


def _reduce_experts(config: Any) -> None:
    """Keep enough experts for the router: more than it selects, and two of each group."""
    numbers = _integers(config)
    selected = max((value for name, value in numbers.items() if _TOP_K.match(name)), default=1)
    groups = numbers.get("n_group", 1)
    wanted = math.ceil(max(4, selected + 1, 2 * groups) / groups) * groups
    for name, value in numbers.items():
        if _EXPERTS.match(name):
            setattr(config, name, min(value, wanted))


def _reduce_vocabulary(config: Any, size: int) -> None:
    """Reduce the vocabulary, and give special tokens beyond it other numbers, the same in all parts of the config."""
    numbers = _integers(config)
    if numbers.get("vocab_size", 0) > size:
        config.vocab_size = size
    for name, value in list(vars(config).items()):
        if not _TOKEN_ID.search(name):
            continue
        if name in numbers:
            setattr(config, name, value % size)
        elif isinstance(value, list) and all(isinstance(each, int) for each in value):
            setattr(config, name, [each % size for each in value])


def config_parts(config: Any) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from config_parts(value)


class MadeData(Dataset[dict[str, torch.Tensor]]):
    """Samples for a model. Sample number ``index`` is the same in every process.

    A model that reads text with images gets text only.

    Args:
        length: number of samples. They are made when they are read.
        num_tokens: tokens of a sample; a model with fewer positions gets fewer.

    Raises:
        ValueError: there is no made data for the model's inputs.
    """

    def __init__(self, model: nn.Module, length: int, *, num_tokens: int = NUM_TOKENS) -> None:
        self._config: Any = model.config
        self._parts = [vars(part) for part in config_parts(model.config)]
        self._name = type(model).__name__
        self._inputs = set(inspect.signature(model.forward).parameters)
        self._main = str(getattr(model, "main_input_name", "input_ids"))
        self._length, self._num_tokens = length, num_tokens
        _ = self[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return self._input(generator) | self._labels(generator)

    def _input(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        if "input_ids" in self._inputs:
            tokens = self._tokens(generator)
            if self._name.endswith("ForMultipleChoice"):
                tokens = torch.stack([tokens, self._tokens(generator)])
            sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            if "return_loss" in self._inputs and "pixel_values" in self._inputs:  # contrasts images with texts
                sample["pixel_values"] = self._image(generator)
            return {name: value for name, value in sample.items() if name in self._inputs}
        if self._main == "pixel_values":
            return {"pixel_values": self._image(generator)}
        if self._main == "input_features" and hasattr(self._config, "num_mel_bins"):
            frames = 2 * getattr(self._config, "max_source_positions", 64)
            return {"input_features": torch.randn(self._config.num_mel_bins, frames, generator=generator)}
        if self._main == "input_values" and getattr(self._config, "inputs_to_logits_ratio", 1) > 1:
            return {"input_values": torch.randn(_NUM_SOUND_SAMPLES, generator=generator)}
        raise ValueError(f"{self._name} has the input {self._main!r}, for which there is no made data.")

    def _values(self, *names: str) -> list[Any]:
        """Return the values of attributes in the config and its sub-configs, without zeros and ``None``."""
        return [value for part in self._parts for name in names if (value := part.get(name))]

    def _tokens(self, generator: torch.Generator) -> torch.Tensor:
        """Return tokens without padding, image and other special tokens."""
        positions = [number for number in self._values("max_position_embeddings", "n_positions") if number > 0]
        special: set[int] = set()
        for part in self._parts:
            for name, value in part.items():
                if name.endswith(("token_id", "token_index")) and value is not None:
                    special |= set(value) if isinstance(value, list) else {value}
        plain = torch.tensor([token for token in range(min(self._values("vocab_size"))) if token not in special])
        return plain[torch.randint(len(plain), (min([self._num_tokens, *positions]),), generator=generator)]

    def _image(self, generator: torch.Generator) -> torch.Tensor:
        sizes, channels = self._values("image_size"), self._values("num_channels")
        if not sizes:
            raise ValueError(f"{self._name} has images of any size, for which there is no made data.")
        height, width = (sizes[0], sizes[0]) if isinstance(sizes[0], int) else sizes[0][:2]
        return torch.randn(channels[0] if channels else 3, height, width, generator=generator)

    def _labels(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        def number(limit: int, *shape: int) -> torch.Tensor:
            return torch.randint(limit, shape, generator=generator)

        if "start_positions" in self._inputs:
            return {name: number(self._num_tokens) for name in ("start_positions", "end_positions")}
        if "labels" not in self._inputs:
            return {}
        num_labels = int(getattr(self._config, "num_labels", 2))
        if self._name.endswith(_CLASS_TASKS):
            problem = getattr(self._config, "problem_type", None)
            if problem == "multi_label_classification":
                return {"labels": number(2, num_labels).float()}
            is_regression = problem == "regression" or num_labels == 1
            return {"labels": torch.randn((), generator=generator) if is_regression else number(num_labels)}
        if self._name.endswith(("ForMultipleChoice", "ForNextSentencePrediction")):
            return {"labels": number(2)}
        if self._name.endswith("ForTokenClassification"):
            return {"labels": number(num_labels, self._num_tokens)}
        if self._name.endswith("ForCTC"):
            return {"labels": 1 + number(int(self._config.vocab_size) - 1, 4)}
        labels = {"labels": self._tokens(generator)}
        if self._name.endswith("ForPreTraining") and "next_sentence_label" in self._inputs:
            labels["next_sentence_label"] = number(2)
        return labels


def collate(samples: list[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Return a batch. Contrastive models return a loss only if asked to."""
    batch: dict[str, Any] = default_collate(samples)
    if "pixel_values" in batch and "input_ids" in batch and "labels" not in batch:
        batch["return_loss"] = True
    return batch
