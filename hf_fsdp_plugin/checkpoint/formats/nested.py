"""Rebuilds nested state dicts from flattened entries, and splits an optimizer's state dict into its parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hf_fsdp_plugin.checkpoint.formats.boxes import whole
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size, numpy_dtype
from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.io import open_regular
from hf_fsdp_plugin.plan.names import canonical_name


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
    if whole(tensor.shape).numel != 1 or tensor.dtype != str(numpy_dtype(tensor.dtype)):
        return tensor
    import numpy

    piece = tensor.within(whole(tensor.shape))[0]
    descriptor = open_regular(root / piece.file)
    try:
        data = os.pread(descriptor, dtype_size(tensor.dtype), piece.offset)
    finally:
        os.close(descriptor)
    return numpy.frombuffer(data, numpy_dtype(tensor.dtype))[0].item()


def _not_an_optimizer(place: Path) -> NoReturn:
    message = "is not an optimizer's state dict: it does not contain a dict 'state' and a list 'param_groups'."
    refuse("FSDP-E461", place, message, "Give a checkpoint that Accelerate, the Trainer or this package wrote.")
