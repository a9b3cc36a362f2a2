"""Loads an optimizer's state from a checkpoint of any format, by the names of the parameters.

State that is laid out like a parameter is read into memory with the layout of the parameter's shard: that of the
optimizer's current state, if it has one, so that no rank holds the state twice. The result is passed to
``load_state_dict``, so that the optimizer's own casts and hooks apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.parameters import state_factory, step_mode
from hf_fsdp_plugin.backends.torch_types import PinnedWindows, copy_to_device, dtensor_like
from hf_fsdp_plugin.checkpoint.errors import raise_if_any
from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.optimizer_state import range_of, split_inner_key, split_key, state_layout
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredOptimizer, StoredTensor
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.reading.loading import (
    Transfer,
    execute_transfers,
    load_stored,
    mismatch_problem,
    plan_transfers,
)
from hf_fsdp_plugin.checkpoint.shards import ModelLayout, ParameterLayout, Piece, local_tensor, model_layout
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names, plural

logger = logging.getLogger(__name__)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path, number: int = 0, *, verify: bool = True
) -> None:
    """Load state and hyperparameters into the optimizer of a sharded model. Collective.

    Parameters without state in the checkpoint have no state afterwards. This is the case for layers that no forward has
    used, and for optimizers without state (plain SGD).

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its optimizer.
        number: index of the optimizer in the checkpoint.
        verify: compare the bytes that are read with the hashes of the manifest.

    Raises:
        CheckpointError: there is no optimizer, files are missing or truncated, elements are missing, parameter groups
            differ, state is not laid out like its parameter, or quantized state is of other shards. The error contains
            all problems, and nothing has been changed. Or bytes differ from those that were saved; then state tensors
            may have been changed.
    """

    def read() -> StoredOptimizer:
        stored = read_stored_optimizer(checkpoint, number, partial=True)
        if stored is None:
            fix = (
                "Resume from a checkpoint with optimizer state (save_only_model: false), or start with a new optimizer."
            )
            raise CheckpointError([mismatch_problem("FSDP-E424", checkpoint, "has no optimizer state.", fix)])
        return stored

    def match(stored: StoredOptimizer) -> Callable[[InputFiles], None]:
        layout = model_layout(model)
        stored = _with_names_of_model(stored, layout)
        groups = _pair_groups(checkpoint, optimizer, layout, stored)
        _check_state(checkpoint, optimizer, layout, stored)

        def load(files: InputFiles) -> None:
            reads = _Reads(files, stored.root)
            state = _read_state(reads, optimizer, layout, stored)
            param_groups = _param_groups(reads, optimizer, stored, groups)
            execute_transfers(files, reads.transfers)
            _move_scalars(optimizer, state)
            optimizer.load_state_dict({"state": state, "param_groups": param_groups})

        return load

    load_stored(checkpoint, "optimizer", read, match, verify=verify)


def _move_scalars(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Move the scalars that ``load_state_dict`` moves to an accelerator, with one copy per device and dtype."""
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    moved: dict[tuple[torch.device, torch.dtype], list[tuple[int, str]]] = {}
    for index, entry in state.items():
        parameter, group = groups[index]
        for key, value in entry.items():
            # As torch.optim.Optimizer decides: the step of most optimizers stays in host memory.
            stays = key == "step" and not (group.get("capturable") or group.get("fused"))
            is_scalar = type(value) is torch.Tensor and value.dim() == 0 and value.device.type == "cpu"
            if is_scalar and parameter.device.type != "cpu" and not stays:
                moved.setdefault((parameter.device, value.dtype), []).append((index, key))
    windows = PinnedWindows()
    for (device, _), places in moved.items():
        numbers = copy_to_device(torch.stack([state[index][key] for index, key in places]), device, windows)
        for (index, key), number in zip(places, numbers, strict=True):
            state[index][key] = number.clone()


@dataclass(slots=True)
class _Reads:
    """Allocates tensors, and collects the reads that fill them."""

    files: InputFiles
    root: Path
    transfers: list[Transfer] = field(default_factory=list)

    def whole(self, stored: StoredTensor) -> torch.Tensor:
        """Allocate a whole tensor on the CPU, and add the reads that fill it. It is equal on all ranks."""
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")
        self.transfers += plan_transfers(stored, [Piece(whole_box(stored.shape), tensor)])
        return tensor

    def part(self, stored: StoredTensor, own: ParameterLayout, local: torch.Tensor) -> None:
        """Add the reads of ``local``, this rank's part of a tensor that is laid out like a parameter."""
        self.transfers += plan_transfers(stored, own.local_shard(own.name, local).pieces)


def _with_names_of_model(stored: StoredOptimizer, layout: ModelLayout) -> StoredOptimizer:
    """Rename tied parameters that were saved under another of their names."""

    def own(name: str) -> str:
        return layout.aliases.get(name, name)

    state = {own(name): entry for name, entry in stored.state.items()}
    groups = [{**group, "params": [own(name) for name in group["params"]]} for group in stored.groups]
    return replace(stored, state=state, groups=groups)


def _pair_groups(
    checkpoint: Path, optimizer: torch.optim.Optimizer, layout: ModelLayout, stored: StoredOptimizer
) -> list[int | None]:
    """Return, for each group of the optimizer, the index of the saved group with the same parameters.

    Groups may have been saved in another order. Empty groups are paired in order; ``None`` for surplus ones.
    """
    own = [
        frozenset(part.name for parameter in group["params"] for part in layout.by_id.get(id(parameter), ()))
        for group in optimizer.param_groups
    ]
    saved = [frozenset(group["params"]) for group in stored.groups]
    if {group for group in own if group} != {group for group in saved if group}:
        raise CheckpointError([_different_groups(checkpoint, own, saved)])
    indices: dict[frozenset[str], list[int]] = {}
    for index, group in enumerate(saved):
        indices.setdefault(group, []).append(index)
    return [indices[group].pop(0) if indices.get(group) else None for group in own]


def _different_groups(checkpoint: Path, own: list[frozenset[str]], saved: list[frozenset[str]]) -> Problem:
    """Return the problem of parameter groups that do not contain the same parameters."""
    here, there = frozenset[str]().union(*own), frozenset[str]().union(*saved)
    found = [f"the optimizer has {_sizes(own)}, but the checkpoint has {_sizes(saved)}"]
    if here - there:
        found.append(f"not in the checkpoint: {format_names(sorted(here - there))}")
    if there - here:
        found.append(f"only in the checkpoint: {format_names(sorted(there - here))}")
    if here == there:
        split = [name for group in own for name in sorted(group)[:1] if group not in saved]
        found.append(f"the same parameters are grouped differently, such as {format_names(split)}")
    fix = "Create the optimizer with the same trainable parameters and parameter groups as in the run that was saved."
    return mismatch_problem("FSDP-E425", checkpoint, f"{'; '.join(found)}.", fix)


def _sizes(groups: list[frozenset[str]]) -> str:
    sizes = " + ".join(str(len(group)) for group in groups) or "0"
    return f"{plural(len(groups), 'parameter group')} of {sizes} parameters"


def _check_state(
    checkpoint: Path, optimizer: torch.optim.Optimizer, layout: ModelLayout, stored: StoredOptimizer
) -> None:
    """Check that all state can be loaded."""
    any_shape = step_mode(optimizer) == "whole"
    unsupported: list[str] = []
    other_shards: dict[str, set[str]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for own in (part for parameter in parameters for part in layout.by_id.get(id(parameter), ())):
        entry = stored.state.get(own.name, {})
        for key, value in entry.items():
            is_tensor = isinstance(value, StoredTensor) and split_key(key)[1] is None
            if is_tensor and not any_shape and state_layout(key, value.shape, own.shape) == "other":
                unsupported.append(f"{key} of {own.name} {list(value.shape)}, parameter {list(own.shape)}")
        ranges = {elements for _, elements in map(split_key, entry) if elements is not None}
        if ranges and own.boxes and (own.start is not None or range_of(own.boxes, own.shape) not in ranges):
            other_shards[own.name] = ranges
    problems = []
    if unsupported:
        message = f"has optimizer state that cannot be sharded like its parameters: {format_names(unsupported)}."
        problems.append(mismatch_problem("FSDP-E426", checkpoint, message))
    if other_shards:  # for example, quantized state
        count = plural(max(len(elements) for elements in other_shards.values()), "shard")
        names = format_names(list(other_shards))
        message = f"has optimizer state that only fits its own {count} per parameter; this rank has others: {names}."
        fix = "Resume with the same FSDP version, strategy and number of ranks, or start with a new optimizer."
        problems.append(mismatch_problem("FSDP-E426", checkpoint, message, fix))
    raise_if_any(problems)


_Saved = list[tuple[ParameterLayout, dict[str, Any]]]
"""The parameters in one object that an optimizer holds (FSDP1's flat parameters have several), with their state."""


def _read_state(
    reads: _Reads, optimizer: torch.optim.Optimizer, layout: ModelLayout, stored: StoredOptimizer
) -> dict[int, dict[str, Any]]:
    """Return the state by index of the parameter, as ``load_state_dict`` expects it."""
    state: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        saved: _Saved = []
        own: dict[str, StoredTensor] = {}
        for part in layout.by_id.get(id(parameter), ()):
            common, per_shard = _split_state(part, stored.state.get(part.name, {}))
            own |= per_shard
            if common or per_shard:
                saved.append((part, common))
        # Under FSDP1, a parameter with an empty shard on this rank gets no gradient here, and therefore has no state.
        if saved and (parameter.numel() or isinstance(parameter, DTensor)):
            held = optimizer.state.get(parameter, {})
            keys = dict.fromkeys(key for _, common in saved for key in common)
            inner = {key: tensor for key, tensor in own.items() if split_inner_key(key)[1]}
            state[index] = {
                **{key: _read_entry(reads, parameter, key, saved, held.get(key)) for key in keys},
                **{key: _read_per_shard(reads, parameter, own[key]) for key in own if key not in inner},
                **_read_subclasses(reads, optimizer, parameter, inner),
            }
    return state


def _split_state(part: ParameterLayout, entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return state that any shard can read, and quantized state of exactly this rank's shard.

    A rank without elements gets no state of a parameter with quantized state.
    """
    common = {key: value for key, value in entry.items() if split_key(key)[1] is None}
    if len(common) == len(entry):
        return common, {}
    if not part.boxes:
        return {}, {}
    elements = range_of(part.boxes, part.shape)
    return common, {split_key(key)[0]: value for key, value in entry.items() if split_key(key)[1] == elements}


def _read_subclasses(
    reads: _Reads, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, saved: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Return new state tensors of a subclass, and add the reads that fill their inner tensors."""
    factory = state_factory(optimizer)
    state: dict[str, torch.Tensor] = {}
    for name, stored in saved.items():
        key, attribute = split_inner_key(name)
        if key not in state and factory is not None:
            state[key] = factory(optimizer, parameter.detach(), key)
        inner = getattr(local_tensor(state[key]), attribute, None) if key in state else None
        if inner is None or tuple(inner.shape) != stored.shape:
            fix = "Create the optimizer with the settings of the run that was saved (block_size)."
            message = f"has quantized optimizer state that differs in {name}."
            raise CheckpointError([mismatch_problem("FSDP-E426", reads.root, message, fix)])
        reads.transfers += plan_transfers(stored, [Piece(whole_box(stored.shape), inner)])
    return state


def _read_entry(reads: _Reads, parameter: torch.Tensor, key: str, saved: _Saved, held: Any) -> Any:
    """Return the state ``key`` of one parameter object. It is zero in padding and for parameters without this state.

    Args:
        held: the current value of the state. Its memory is used again.
    """
    present = [(part, entry[key]) for part, entry in saved if key in entry]
    first, value = present[0]
    if not isinstance(value, StoredTensor):
        return _common_value(key, [(part.name, value) for part, value in present])
    kind = state_layout(key, value.shape, first.shape)
    if kind == "scalar":
        return _common_scalar(reads, key, present)
    if kind == "other":  # state of whole parameters
        return reads.whole(value)
    local, state = _like_shard(parameter, getattr(torch, value.dtype), held, padded=first.start is not None)
    for part, stored in present:
        reads.part(stored, part, local)
    return state


def _read_per_shard(reads: _Reads, parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return state that belongs to this rank's shard; a DTensor, if it has the shape of a DTensor's shard."""
    if not isinstance(parameter, DTensor) or not stored.shape or stored.shape != tuple(local_tensor(parameter).shape):
        return reads.whole(stored)
    local, state = _like_shard(parameter, getattr(torch, stored.dtype))
    reads.transfers += plan_transfers(stored, [Piece(whole_box(stored.shape), local)])
    return state


def _like_shard(
    parameter: torch.Tensor, dtype: torch.dtype, held: Any = None, *, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a state tensor laid out like this rank's shard, after its local part.

    Args:
        held: the current value of the state. Its memory is used if it is laid out in the same way.
        padded: zero the tensor.
    """
    shard = local_tensor(parameter).detach()
    if isinstance(held, torch.Tensor) and isinstance(held, DTensor) == isinstance(parameter, DTensor):
        local = local_tensor(held).detach()
        is_same = (local.shape, local.stride(), local.device, local.dtype) == (
            shard.shape, shard.stride(), shard.device, dtype,
        )  # fmt: skip
        if type(local) is torch.Tensor and is_same:
            return (local.zero_() if padded else local), held
    local = (torch.zeros_like if padded else torch.empty_like)(shard, dtype=dtype)
    return local, dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local


def _common_scalar(reads: _Reads, key: str, present: list[tuple[ParameterLayout, StoredTensor]]) -> torch.Tensor:
    """Return one scalar: for a flat parameter, the common value of the scalars of all parameters in it."""
    if len(present) == 1:
        return reads.whole(present[0][1])
    numbers = _Reads(reads.files, reads.root)
    tensors = [(part.name, numbers.whole(stored)) for part, stored in present]
    execute_transfers(reads.files, numbers.transfers)
    common = _common_value(key, [(name, tensor.item()) for name, tensor in tensors])
    return next(tensor for _, tensor in tensors if tensor.item() == common)


def _common_value(key: str, values: list[tuple[str, Any]]) -> Any:
    """Return one value for all parameters in a flat parameter: if numbers differ, the largest one."""
    distinct = [value for index, (_, value) in enumerate(values) if value not in [v for _, v in values[:index]]]
    if len(distinct) == 1:
        return distinct[0]
    common = max(distinct) if all(isinstance(value, (int, float)) for value in distinct) else distinct[0]
    logger.warning(
        "the checkpoint has different values of the optimizer's '%s' for parameters that FSDP1 merges into one flat "
        "parameter (%s). The flat parameter gets %s. Set fsdp_use_orig_params: true to keep the values separate.",
        key, format_names([f"{name}: {value}" for name, value in values]), common,
    )  # fmt: skip
    return common


def _param_groups(
    reads: _Reads, optimizer: torch.optim.Optimizer, stored: StoredOptimizer, groups: list[int | None]
) -> list[dict[str, Any]]:
    """Return the groups with parameters by index, saved hyperparameters, and own ones that the checkpoint lacks."""
    param_groups = []
    start = 0
    for own, index in zip(optimizer.param_groups, groups, strict=True):
        saved = {} if index is None else dict(_hyperparameters(reads, own, stored.groups[index]))
        stop = start + len(own["params"])
        param_groups.append({**own, **saved, "params": list(range(start, stop))})
        start = stop
    return param_groups


def _hyperparameters(reads: _Reads, own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the saved values, converted to the optimizer's types: some formats store tuples (``betas``) as lists."""
    for key, value in saved.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, StoredTensor):
            value = reads.whole(value)
        if isinstance(own.get(key), tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(own.get(key), torch.Tensor) and isinstance(value, (int, float)):
            value = torch.full_like(own[key], value)
        yield key, value
