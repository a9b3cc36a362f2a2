"""The layouts of an optimizer's state tensors, for saving, loading and verification.

``like_parameter``: sharded like its parameter. Loaded with any number of ranks.
``scalar``: one number that is equal on all ranks.
``whole``: the state of an optimizer that steps on whole parameters (Adafactor's rows and columns under FSDP2), equal on
all ranks, of any shape. Loaded with any number of ranks.
``per_shard``: any other state, such as the codes and scales of 8-bit optimizers, which belongs to one shard's elements.
The key contains the range of these elements, as in ``absmax1@0+2048``. Only a rank with the same elements can load it.
A tensor subclass (torchao's quantized state) is stored as its inner tensors: ``exp_avg.codes@0+2048``.

To support state with another layout, add it here, and its case in ``shards.py`` and ``reading/optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major

StateLayout = Literal["like_parameter", "scalar", "unsupported"]
_RANGE, _INNER = "@", "."


def state_layout(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> StateLayout:
    """Return the layout of the state tensor ``key``. Both shapes are of whole tensors, or both are of local tensors."""
    if math.prod(shape) == 1 and (key == "step" or shape != parameter_shape):
        return "scalar"
    return "like_parameter" if shape == parameter_shape else "unsupported"


def is_plain(value: Any) -> bool:
    """Whether a state value can be stored: numbers, texts, and containers of them, but no other objects."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def range_of(boxes: Iterable[Box], shape: tuple[int, ...]) -> str:
    """Return the elements of a shard as text: index of the first one in the flattened parameter ``+`` their number."""
    found = list(boxes)
    first = sum(offset * stride for offset, stride in zip(found[0].offsets, row_major(shape), strict=True))
    return f"{first}+{sum(box.numel for box in found)}"


def per_shard_key(key: str, elements: str) -> str:
    """Return the key of state that belongs to one shard. ``elements`` is from :func:`range_of`."""
    return f"{key}{_RANGE}{elements}"


def split_key(key: str) -> tuple[str, str | None]:
    """Return the key without a range, and the range; ``None`` if the key has no range."""
    name, _, elements = key.partition(_RANGE)
    return (name, elements) if elements else (key, None)


def inner_key(key: str, attribute: str) -> str:
    """Return the key of an inner tensor of a tensor subclass."""
    return f"{key}{_INNER}{attribute}"


def split_inner_key(key: str) -> tuple[str, str]:
    """Return the key of the state and the name of the inner tensor, which is empty for other tensors."""
    name, _, attribute = key.partition(_INNER)
    return name, attribute
