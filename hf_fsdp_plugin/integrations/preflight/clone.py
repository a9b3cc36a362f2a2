"""The tiny clone of a model: the same classes and units, with few layers and small widths, and random weights.

The size of an attention head is not changed, so rotary dimensions and the scale of attention stay as they are. Heads
and widths are divided by one factor, which keeps ``hidden_size == num_heads * head_size``. If the config sets the size
of a head, widths are divided further. The rules go by the names of the attributes of a config, not by the architecture;
:func:`find_clone` checks the result.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from hf_fsdp_plugin.integrations.preflight.sample_data import MadeData, collate, config_parts
from hf_fsdp_plugin.plan.meta_model import default_dtype
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count, format_names

MAX_PARAMS: Final = 200_000_000
"""Maximum parameters of a clone: a rank needs some 16 bytes for each."""
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
_MIN_WIDTH: Final = 32
_MIN_NARROW_WIDTH: Final = 64
_HEAD_SIZES: Final = {"head_dim", "d_kv", "qk_nope_head_dim", "attention_head_size"}
_MIN_HEADS: Final = 2
SMALL_VOCABULARY: Final = 512
Widths = Literal["narrow", "each", "none"]
"""``narrow``: one factor for all heads of the model, and a larger one for widths; ``each``: one factor for each
sub-config; ``none``: widths are kept.
"""


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


def on_meta(model_class: Any, config: Any) -> nn.Module:
    """Return the model of a config without weights."""
    with default_dtype(config), torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def classes_of(model: nn.Module) -> set[str]:
    """Return the names of the classes of all modules of a model."""
    return {type(module).__name__ for module in model.modules()}


def num_params_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def find_clone(model_class: Any, config: Any, *, keep_vocabulary: bool = False) -> Clone:
    """Return the smallest clone that has the model's classes, and that runs.

    Widths are divided by one factor in the whole model, else in each part of it by its own, else they are kept.

    Args:
        model_class: class of Transformers.
        keep_vocabulary: whether the vocabulary keeps its size, for the real tokenizer.

    Raises:
        SpecError: no clone is small enough, or the model cannot be built.
    """
    try:
        real = on_meta(model_class, config)
    except Exception as error:
        message = f"{model_class.__name__} cannot be built from its config: {error}"
        problem = Problem(code="FSDP-E752", message=message, fix="Correct the config.json of the model.")
        raise SpecError([problem]) from error
    reasons: list[str] = []
    found: list[Clone] = []
    for widths in get_args(Widths):
        clone = None
        for small, model in _clones(model_class, config, widths, keep_vocabulary, reasons):
            missing = classes_of(real) - classes_of(model)
            clone = Clone(
                config=small,
                num_params=num_params_of(model),
                real_num_params=num_params_of(real),
                problems=_problems(missing, reasons if widths == "none" else []),
            )
            if not missing:
                break
        if clone is None:
            continue
        if clone.num_params > MAX_PARAMS:
            reasons.append(f"with widths={widths!r} it has {format_count(clone.num_params)} parameters")
            continue
        found.append(clone)
        reason = _why_it_does_not_run(model_class, clone.config)
        if not reason:
            return clone
        reasons.append(reason)
    if found:  # no clone runs, so the reason is not the size: the run of the smallest one shows the reason
        return found[0]
    message = f"no clone of {model_class.__name__} is small enough: {'; '.join(reasons)}."
    fix = f"Give a model of the same architecture with fewer than {format_count(MAX_PARAMS)} parameters."
    raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])


def _clones(
    model_class: Any, config: Any, widths: Widths, keep_vocabulary: bool, reasons: list[str]
) -> Iterator[tuple[Any, nn.Module]]:
    """Yield configs and models with more and more layers. What cannot be built is added to `reasons`."""
    vocabulary = None if keep_vocabulary else SMALL_VOCABULARY
    for num_layers in _NUM_LAYERS:
        if num_layers <= max(_NUM_LAYERS[0], num_layers_of(config)):
            try:
                small = small_config(config, num_layers, widths, vocabulary)
                model = on_meta(model_class, small)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            yield small, model


def _why_it_does_not_run(model_class: Any, config: Any) -> str:
    """Return why a clone cannot compute its loss of made data; empty if it can, or if there is no such data."""
    try:
        with torch.random.fork_rng(devices=[]), default_dtype(config), torch.no_grad():
            model = model_class(config)
            data = MadeData(model, 2)
            model(**collate([data[0], data[1]]))
    except ValueError as error:
        return "" if "no made data" in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _problems(missing: set[str], reasons: list[str]) -> tuple[Problem, ...]:
    """Return the problems of a clone.

    Args:
        missing: classes of the model that the clone lacks.
        reasons: why smaller widths failed, if it has the widths of the model.
    """
    found = []
    if missing:
        message = f"the clone has no module of class {format_names(sorted(missing))}, which the model has in its later "
        fix = "Test these layers in a short run of the whole model."
        found.append(Problem(code="FSDP-W759", message=f"{message}layers.", fix=fix))
    if reasons:
        message = f"the clone has the widths of the model and fewer layers, because smaller widths failed: {reasons[0]}"
        found.append(Problem(code="FSDP-N757", message=message))
    return tuple(found)


def write_clone(model_class: Any, clone: Clone, folder: Path) -> None:
    """Write a clone with random weights as a Hugging Face folder, which appears when it is complete."""
    partial = folder.with_name(f"{folder.name}.part")
    with torch.random.fork_rng(devices=[]), default_dtype(clone.config):
        torch.manual_seed(_SEED)
        model_class(clone.config).save_pretrained(partial)
    os.replace(partial, folder)


def small_config(
    config: Any, num_layers: int, widths: Widths = "narrow", vocabulary: int | None = SMALL_VOCABULARY
) -> Any:
    """Return a reduced copy of a config of Transformers. Quantization is removed.

    Args:
        num_layers: number of layers of each stack; a smaller number is kept.
        vocabulary: maximum size of the vocabulary; ``None`` keeps it, for real data.
    """
    small = copy.deepcopy(config)
    parts = list(config_parts(small))
    numbers = [_integers(part) for part in parts]
    common = _factor(numbers)
    further = _further_factor(numbers, common)
    tokens: dict[int, int] = {}
    for part in parts:
        _reduce_layers(part, num_layers)
        _reduce_experts(part)
        if widths == "narrow":
            _divide(part, common, common * further)
        elif widths == "each":
            factor = _factor([_integers(part)])
            _divide(part, factor, factor)
        if vocabulary is not None:
            _reduce_vocabulary(part, vocabulary, tokens)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    return small


def num_layers_of(config: Any) -> int:
    """Return the number of layers of the largest stack of a config and its sub-configs."""
    numbers = [0]
    for part in config_parts(config):
        for name, value in vars(part).items():
            if _LAYERS.match(name):
                numbers += [value] if isinstance(value, int) else value if isinstance(value, list | tuple) else []
    return max(numbers)


def _integers(config: Any) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }


def _factor(parts: list[dict[str, int]]) -> int:
    """Return the largest common factor by which heads and widths of all parts can be divided."""
    widths = [value for part in parts for name, value in part.items() if _WIDTHS.search(name)]
    heads = [value for part in parts for name, value in part.items() if _is_heads(name)]
    if not widths:
        return 1
    common = math.gcd(*heads, *widths)
    factors = [factor for factor in range(common, 1, -1) if common % factor == 0]
    if heads:
        several = [factor for factor in factors if min(heads) // factor >= _MIN_HEADS]
        return max([1, *(several or factors)])
    return next((factor for factor in factors if min(widths) // factor >= _MIN_WIDTH), 1)


def _is_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _KV_HEADS.search(name)


def _further_factor(parts: list[dict[str, int]], factor: int) -> int:
    """Return the power of two by which widths can be divided in addition to the factor of the heads."""
    widths = [value // factor for part in parts for name, value in part.items() if _WIDTHS.search(name)]
    has_heads = [part for part in parts if any(_is_heads(name) for name in part)]
    if not widths or not all(part.keys() & _HEAD_SIZES for part in has_heads):
        return 1
    further = 1
    while all(width % (2 * further) == 0 and width // (2 * further) >= _MIN_NARROW_WIDTH for width in widths):
        further *= 2
    return further


def _divide(config: Any, factor: int, width_factor: int) -> None:
    """Divide heads and widths. Fewer key-value heads than the factor become the largest number that still divides."""
    heads = [value for name, value in _integers(config).items() if _is_heads(name)]
    for name, value in _integers(config).items():
        if _KV_HEADS.search(name):
            wanted = max(1, value // factor)
            if heads:
                wanted = max(n for n in range(1, wanted + 1) if (min(heads) // factor) % n == 0)
            _set(config, name, wanted)
        elif _is_heads(name):
            _set(config, name, value // factor)
        elif _WIDTHS.search(name):
            _set(config, name, value // width_factor)


def _reduce_layers(config: Any, num_layers: int) -> None:
    """Keep the first layers. Lists with one entry for each layer are cut, lists of layer numbers too."""
    stages = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    stages = {name: value for name, value in stages.items() if _LAYERS.match(name)}
    if stages:  # layers of each stage; other lists have one entry for each stage
        for name, value in stages.items():
            _set(config, name, type(value)(min(each, num_layers) for each in value))
        return
    before = {value for name, value in _integers(config).items() if _LAYERS.match(name)}
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and _LAYERS.match(name):
            _set(config, name, min(value, num_layers))
        elif isinstance(value, list | tuple) and len(value) in before and len(value) > num_layers:
            _set(config, name, value[:num_layers])
        elif isinstance(value, list) and name.endswith("_layers") and value and all(isinstance(n, int) for n in value):
            _set(config, name, [number for number in value if number < num_layers])


def _reduce_experts(config: Any) -> None:
    """Keep enough experts for the router: more than it selects, and two of each group."""
    numbers = _integers(config)
    selected = max((value for name, value in numbers.items() if _TOP_K.match(name)), default=1)
    groups = numbers.get("n_group", 1)
    wanted = math.ceil(max(4, selected + 1, 2 * groups) / groups) * groups
    for name, value in numbers.items():
        if _EXPERTS.match(name):
            _set(config, name, min(value, wanted))


def _reduce_vocabulary(config: Any, size: int, tokens: dict[int, int]) -> None:
    """Reduce the vocabulary, and give special tokens beyond it new numbers, the same in all parts of the config."""
    if _integers(config).get("vocab_size", 0) > size:
        config.vocab_size = size
    for name, value in list(vars(config).items()):
        if not _TOKEN_ID.search(name):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _small_token(value, size, tokens))
        elif isinstance(value, list) and all(isinstance(each, int) for each in value):
            _set(config, name, [_small_token(each, size, tokens) for each in value])


def _small_token(token: int, size: int, tokens: dict[int, int]) -> int:
    """Return the new number of a special token: the last numbers of the vocabulary, from the end."""
    if token < size:
        return token
    return tokens.setdefault(token, size - 1 - len(tokens))


def _set(config: Any, name: str, value: Any) -> None:
    if vars(config).get(name) != value:
        setattr(config, name, value)
