"""The layouts of optimizer state in a checkpoint, and the keys under which it is stored.

The state tensors of an optimizer have one of three layouts. :func:`state_layout` decides by the shapes of a state
tensor and its parameter:

``like_parameter``: sharded like its parameter. Loaded with any number of ranks.
``scalar``: one number that is equal on all ranks.
``other``: any other shape. How it is stored depends on the optimizer. If it steps on whole parameters (Adafactor's rows
and columns under FSDP2), the state is whole and equal on all ranks, and loaded with any number of ranks. Else it
belongs to the elements of one shard, such as the codes and scales of 8-bit optimizers: the key contains the range of
these elements, as in ``absmax1@0+2048``, and only a rank with the same elements can load it. A tensor subclass
(torchao's quantized state) is stored as its inner tensors: ``exp_avg.codes@0+2048``.

To support state with another layout, add it here, and its case in ``checkpoint/saved_state.py`` (writing) and
``checkpoint/reading/optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from hf_fsdp_plugin.checkpoint.formats import boxes

StateLayout = Literal["like_parameter", "scalar", "other"]
_RANGE, _INNER = "@", "."


def state_layout(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> StateLayout:
    """Return the layout of the state tensor ``key``. Both shapes are of whole tensors, or both are of local tensors."""
    if math.prod(shape) == 1 and (key == "step" or shape != parameter_shape):
        return "scalar"
    return "like_parameter" if shape == parameter_shape else "other"


def unsupported_values(value: Any) -> list[Any]:
    """Return the parts of a value that cannot be stored: all except numbers, texts and containers of them."""
    if isinstance(value, dict):
        keys = [key for key in value if not isinstance(key, (str, int))]
        return keys + [found for item in value.values() for found in unsupported_values(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in unsupported_values(item)]
    return [] if value is None or isinstance(value, (bool, int, float, str)) else [value]


def range_of(held: Iterable[boxes.Box], shape: tuple[int, ...]) -> str:
    """Return the elements of a shard as text: index of the first one in the flattened parameter ``+`` their number."""
    found = list(held)
    first = sum(offset * stride for offset, stride in zip(found[0].offsets, boxes.row_major(shape), strict=True))
    return f"{first}+{sum(box.numel for box in found)}"


def shard_key(key: str, attribute: str, elements: str) -> str:
    """Return the key of state that belongs to one shard.

    Args:
        attribute: the name of an inner tensor of a tensor subclass; empty for other tensors.
        elements: from :func:`range_of`.
    """
    return f"{key}{_INNER if attribute else ''}{attribute}{_RANGE}{elements}"


def split_key(key: str) -> tuple[str, str, str | None]:
    """Return what :func:`shard_key` has joined. Without a range, it is the key, an empty text and ``None``."""
    inner, _, elements = key.partition(_RANGE)
    name, _, attribute = inner.partition(_INNER)
    return (name, attribute, elements) if elements else (key, "", None)
