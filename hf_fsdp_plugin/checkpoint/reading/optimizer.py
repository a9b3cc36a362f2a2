"""An optimizer's state out of a checkpoint of any format, by the names of its parameters.

What an optimizer keeps for a parameter is cut as the parameter is. So it is read into memory that is laid out like the
shard, and given to ``load_state_dict``, where the optimizer's own casts and hooks apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.boxes import whole
from hf_fsdp_plugin.checkpoint.formats.stored import StoredOptimizer, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_optimizer
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import Transfer, fill, transfers
from hf_fsdp_plugin.checkpoint.shards import Cut, Cuts, Piece, find_cuts
from hf_fsdp_plugin.problems import CheckpointError

logger = logging.getLogger(__name__)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path, number: int = 0) -> None:
    """Give the optimizer of a sharded model the state and the hyperparameters of a checkpoint. Collective.

    Parameters that had no state when it was saved have none afterwards: layers that no forward used, and all
    parameters of an optimizer that keeps nothing (plain SGD).

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its optimizer.
        number: which of several optimizers in one checkpoint.

    Raises:
        CheckpointError: with all that is wrong, and before anything is changed: no optimizer in the checkpoint, files
            that are not there or cut short, holes, other parameter groups, state that is cut like no parameter.
    """
    with on_all_ranks(f"comparing {checkpoint} with the optimizer"):
        index = read_stored_optimizer(checkpoint, number)
        if index is None:
            raise CheckpointError([mismatch.no_optimizer(checkpoint)])
        cuts = find_cuts(model)
        index = _under_own_names(index, cuts)
        places = _pair_groups(checkpoint, optimizer, cuts, index)
        _check_state(checkpoint, cuts, index)
    with on_all_ranks(f"reading {checkpoint}"):
        plan = _Reading(index.root)
        state = _read_state(plan, optimizer, cuts, index)
        groups = _groups(plan, optimizer, index, places)
        fill(index.root, plan.work)
        optimizer.load_state_dict({"state": state, "param_groups": groups})


@dataclass(slots=True)
class _Reading:
    """What is still to be read into the tensors that have been handed out."""

    root: Path
    work: list[Transfer] = field(default_factory=list)

    def whole(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor that is the same on all ranks, on the CPU until the optimizer says otherwise."""
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.work += transfers(stored, [Piece(whole(stored.shape), tensor)])
        return tensor

    def part(self, stored: StoredTensor, cut: Cut, local: torch.Tensor) -> None:
        """What ``cut`` holds, into ``local``."""
        self.work += transfers(stored, cut.hold(cut.name, local).pieces)


def _under_own_names(index: StoredOptimizer, cuts: Cuts) -> StoredOptimizer:
    """Tied parameters may have been saved under another of their names."""

    def own(name: str) -> str:
        return cuts.aliases.get(name, name)

    state = {own(name): entry for name, entry in index.state.items()}
    groups = [{**group, "params": [own(name) for name in group["params"]]} for group in index.groups]
    return StoredOptimizer(index.root, index.format, state, groups)


def _pair_groups(
    checkpoint: Path, optimizer: torch.optim.Optimizer, cuts: Cuts, index: StoredOptimizer
) -> list[int | None]:
    """For each group of the optimizer, the number of the saved one with the same parameters.

    Groups may have been saved in another order. Empty ones are paired in order, and one too many stays as it is.
    """
    own = [
        frozenset(cut.name for parameter in group["params"] for cut in cuts.of.get(id(parameter), ()))
        for group in optimizer.param_groups
    ]
    saved = [frozenset(group["params"]) for group in index.groups]
    if {group for group in own if group} != {group for group in saved if group}:
        raise CheckpointError([mismatch.other_groups(checkpoint, own, saved)])
    left: dict[frozenset[str], list[int]] = {}
    for number, group in enumerate(saved):
        left.setdefault(group, []).append(number)
    return [left[group].pop(0) if left.get(group) else None for group in own]


def _check_state(checkpoint: Path, cuts: Cuts, index: StoredOptimizer) -> None:
    foreign: dict[str, mismatch.Shapes] = {}
    for name, entry in index.state.items():
        for key, value in entry.items():
            if name not in cuts.locals or not isinstance(value, StoredTensor) or _is_scalar(value):
                continue
            shape = cuts.locals[name][0].shape
            if value.shape != shape:
                foreign[f"{key} of {name}"] = (shape, value.shape)
    if problems := list(mismatch.foreign_state(checkpoint, foreign)):
        raise CheckpointError(problems)


def _is_scalar(value: StoredTensor) -> bool:
    """A step count and its like, of which a parameter has one and not one an element."""
    return not value.shape or value.shape == (1,)


def _read_state(
    plan: _Reading, optimizer: torch.optim.Optimizer, cuts: Cuts, index: StoredOptimizer
) -> dict[int, dict[str, Any]]:
    """State by the number of the parameter, as ``load_state_dict`` takes it."""
    state: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        saved = [(cut, index.state[cut.name]) for cut in cuts.of.get(id(parameter), ()) if index.state.get(cut.name)]
        # FSDP1 gives a parameter of which a rank holds nothing no gradient there, and so no state.
        if saved and (parameter.numel() or isinstance(parameter, DTensor)):
            state[number] = {key: _state_of(plan, parameter, key, saved) for key in _keys(saved)}
    return state


_Saved = list[tuple[Cut, dict[str, Any]]]
"""The parameters in one object that an optimizer holds, several under FSDP1's flat ones, and the state of each."""


def _keys(saved: _Saved) -> Iterable[str]:
    return dict.fromkeys(key for _, entry in saved for key in entry)


def _state_of(plan: _Reading, parameter: torch.Tensor, key: str, saved: _Saved) -> Any:
    """One kind of state of one parameter; what was saved of neither the parameter nor the padding around it is zero."""
    present = [(cut, entry[key]) for cut, entry in saved if key in entry]
    sample = present[0][1]
    if not isinstance(sample, StoredTensor):
        return _only(key, [(cut.name, value) for cut, value in present])
    if _is_scalar(sample) and (key == "step" or sample.shape != present[0][0].shape):
        return _only_tensor(plan, key, present)
    flat = present[0][0].start is not None
    local, wrap = _laid_out_like(parameter, getattr(torch, sample.dtype), padded=flat)
    for cut, stored in present:
        plan.part(stored, cut, local)
    return wrap(local)


def _laid_out_like(
    parameter: torch.Tensor, dtype: torch.dtype, *, padded: bool
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Memory like this rank's shard, zero where it has padding, and what makes a state tensor of it."""
    fresh = torch.zeros_like if padded else torch.empty_like
    if not isinstance(parameter, DTensor):
        return fresh(parameter.detach(), dtype=dtype), lambda local: local

    def wrap(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    return fresh(parameter.to_local().detach(), dtype=dtype), wrap


def _only_tensor(plan: _Reading, key: str, present: list[tuple[Cut, StoredTensor]]) -> torch.Tensor:
    """One number; where it is one for all parameters in a flat one, they are read now, to be compared."""
    if len(present) == 1:
        return plan.whole(present[0][1])
    numbers = _Reading(plan.root)
    tensors = [(cut.name, numbers.whole(stored)) for cut, stored in present]
    fill(plan.root, numbers.work)
    chosen = _only(key, [(name, tensor.item()) for name, tensor in tensors])
    return next(tensor for _, tensor in tensors if tensor.item() == chosen)


def _only(key: str, values: list[tuple[str, Any]]) -> Any:
    """The value that one flat parameter takes for all of its parameters: the greatest where they are numbers."""
    distinct = [value for number, (_, value) in enumerate(values) if value not in [v for _, v in values[:number]]]
    if len(distinct) == 1:
        return distinct[0]
    numbers = all(isinstance(value, (int, float)) for value in distinct)
    chosen = max(distinct) if numbers else distinct[0]
    names = ", ".join(f"{name}: {value}" for name, value in values[: mismatch.NUM_EXAMPLES])
    logger.warning(
        "the checkpoint has several values of the optimizer's '%s' for parameters that are one flat parameter here "
        "(%s, …); %s is taken for all. Write fsdp_use_orig_params: true to keep them apart.",
        key, names, chosen,
    )  # fmt: skip
    return chosen


def _groups(
    plan: _Reading, optimizer: torch.optim.Optimizer, index: StoredOptimizer, places: list[int | None]
) -> list[dict[str, Any]]:
    """The saved hyperparameters, over those that only this optimizer has; parameters by number."""
    groups = []
    start = 0
    for own, place in zip(optimizer.param_groups, places, strict=True):
        said = {} if place is None else dict(_hyperparameters(plan, own, index.groups[place]))
        stop = start + len(own["params"])
        groups.append({**own, **said, "params": list(range(start, stop))})
        start = stop
    return groups


def _hyperparameters(plan: _Reading, own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of the type that the optimizer has them in: tuples (``betas``) come back from some formats as lists."""
    for key, value in saved.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, StoredTensor):
            value = plan.whole(value)
        if isinstance(own.get(key), tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(own.get(key), torch.Tensor) and isinstance(value, (int, float)):
            value = torch.full_like(own[key], value)
        yield key, value
