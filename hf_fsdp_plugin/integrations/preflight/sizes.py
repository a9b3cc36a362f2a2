"""Small configs of the same architecture: fewer layers, heads and experts, smaller widths and vocabulary.

The size of an attention head is not changed, so rotary dimensions and the scale of attention stay as they are. Heads
and widths are divided by one factor, which keeps ``hidden_size == num_heads * head_size``. If the config sets the size
of a head, widths are divided further. The rules go by the names of the attributes, not by the architecture;
:mod:`.clone` checks the result.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

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
Widths = Literal["narrow", "common", "each", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How a config is reduced.

    Attributes:
        num_layers: number of layers of each stack; a smaller number is kept.
        widths: ``narrow``: one factor for all heads of the model, and a larger one for widths; ``common``: one factor
            for both; ``each``: one for each sub-config; ``none``.
        vocabulary: maximum size of the vocabulary; ``None`` keeps it, for real data.
    """

    num_layers: int
    widths: Widths = "narrow"
    vocabulary: int | None = SMALL_VOCABULARY


def small_config(config: Any, reduction: Reduction) -> Any:
    """Return a reduced copy of a config of Transformers. Quantization is removed."""
    small = copy.deepcopy(config)
    parts = list(config_parts(small))
    numbers = [_integers(part) for part in parts]
    common = _factor(numbers) if reduction.widths in ("narrow", "common") else 1
    further = _further_factor(numbers, common) if reduction.widths == "narrow" else 1
    tokens: dict[int, int] = {}
    for part in parts:
        factor = _factor([_integers(part)]) if reduction.widths == "each" else common
        _reduce_layers(part, reduction.num_layers)
        _reduce_experts(part)
        _divide(part, factor, factor * further)
        if reduction.vocabulary is not None:
            _reduce_vocabulary(part, reduction.vocabulary, tokens)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    return small


def config_parts(config: Any) -> Iterator[Any]:
    """Yield a config and its sub-configs."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from config_parts(value)


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
    common = math.gcd(*heads, *widths) if heads else math.gcd(*widths)
    divisors = [number for number in range(common, 0, -1) if common % number == 0]
    for fewest in (_MIN_HEADS, 1):
        for factor in divisors:
            wide_enough = heads or min(widths) // factor >= _MIN_WIDTH
            if wide_enough and all(value // factor >= fewest for value in heads) and factor > 1:
                return factor
    return 1


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
