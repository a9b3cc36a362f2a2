"""The layouts of an optimizer's state tensors, for saving, loading and verification, and the parts of its state dict.

:func:`state_layout` decides by the shapes of a state tensor and its parameter:

``like_parameter``: sharded like its parameter. Loaded with any number of ranks.
``scalar``: one number that is equal on all ranks.
``other``: any other shape. How it is stored depends on the optimizer. If it steps on whole parameters (Adafactor's rows
and columns under FSDP2), the state is whole and equal on all ranks, and loaded with any number of ranks. Else it
belongs to the elements of one shard, such as the codes and scales of 8-bit optimizers: the key contains the range of
these elements, as in ``absmax1@0+2048``, and only a rank with the same elements can load it. A tensor subclass
(torchao's quantized state) is stored as its inner tensors: ``exp_avg.codes@0+2048``.

To support state with another layout, add it here, and its case in ``shards.py``, ``reading/optimizer.py`` and
``checking/verify.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, dtype_size, numpy_dtype, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredTensor
from hf_fsdp_plugin.checkpoint.io import read_range
from hf_fsdp_plugin.plan.names import canonical_name

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


def nested_value(entries: Mapping[tuple[Any, ...], Any]) -> Any:
    """Nest flattened entries: ``{("a", 0, "b"): 1}`` -> ``{"a": [{"b": 1}]}``. Numbers in a path are list indices."""
    if () in entries:
        return entries[()]
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in entries.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if branches and all(isinstance(key, int) for key in branches):
        return [nested_value(branches[key]) for key in sorted(branches)]
    return {key: nested_value(branch) for key, branch in branches.items()}


def optimizer_parts(
    value: Any, root: Path, place: Path
) -> tuple[dict[str, dict[str, StoredTensor | Any]], list[dict[str, Any]]]:
    """Return the state by parameter and the parameter groups of an optimizer's state dict.

    An optimizer without FSDP numbers its parameters. The numbers are then used as names.

    Raises:
        CheckpointError: the value is not an optimizer's state dict.
    """
    groups = value.get("param_groups", []) if isinstance(value, dict) else None
    entries = value.get("state", {}) if isinstance(value, dict) else None
    if not isinstance(groups, list) or not isinstance(entries, dict):
        _not_an_optimizer(place)
    state: dict[str, dict[str, StoredTensor | Any]] = {}
    for parameter, entry in entries.items():
        if not isinstance(entry, dict):
            _not_an_optimizer(place)
        name = canonical_name(str(parameter))
        state[name] = {
            key: replace(item, name=name) if isinstance(item, StoredTensor) else item for key, item in entry.items()
        }
    return state, [_group(group, root, place) for group in groups]


def _group(group: Any, root: Path, place: Path) -> dict[str, Any]:
    if not isinstance(group, dict) or not isinstance(group.get("params", []), (list, tuple)):
        _not_an_optimizer(place)
    plain = {key: _number(item, root) if isinstance(item, StoredTensor) else item for key, item in group.items()}
    return {**plain, "params": [canonical_name(str(name)) for name in group.get("params", [])]}


def _number(tensor: StoredTensor, root: Path) -> Any:
    """Return the value of a scalar tensor, such as a learning rate; other tensors are returned unchanged."""
    if whole_box(tensor.shape).numel != 1 or tensor.dtype != str(numpy_dtype(tensor.dtype)):
        return tensor
    import numpy

    piece = tensor.within(whole_box(tensor.shape))[0]
    data = read_range(root / piece.file, piece.offset, dtype_size(tensor.dtype))
    return numpy.frombuffer(data, numpy_dtype(tensor.dtype))[0].item()


def _not_an_optimizer(place: Path) -> NoReturn:
    message = "is not an optimizer's state dict: it does not contain a dict 'state' and a list 'param_groups'."
    refuse("FSDP-E461", place, message, "Give a checkpoint that Accelerate, the Trainer or this package wrote.")
