"""Loads an optimizer's state from a checkpoint of any format, by the names of the parameters.

State that is laid out like a parameter is read into memory with the layout of the parameter's shard: that of the
optimizer's current state, if it has one, so that no rank holds the state twice. The result is passed to
``load_state_dict``, so that the optimizer's own casts and hooks apply.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.offloaded_steps import load_on_host, wait_for_state
from hf_fsdp_plugin.backends.optimizers.parameters import step_mode
from hf_fsdp_plugin.backends.torch_types import dtensor_like, move_scalars
from hf_fsdp_plugin.checkpoint.errors import problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats import optimizer_state
from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredOptimizer, StoredTensor
from hf_fsdp_plugin.checkpoint.reading import resharding
from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, ModelShards, Piece, parameter_shards
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.functions import can_create_state, create_state
from hf_fsdp_plugin.torch_private.modules import local_tensor

logger = logging.getLogger(__name__)
_OF_GROUPS: Final = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
)
"""Entries of the state of torch's schedulers that are lists with a value for each group."""


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
        stored = read_stored_optimizer(checkpoint, number)
        if stored is None:
            fix = "Resume from a checkpoint with optimizer state (save_only_model: false), or use a new optimizer."
            refuse("FSDP-E424", checkpoint, "has no optimizer state.", fix)
        return stored

    def match(stored: StoredOptimizer) -> resharding.ReadElements:
        return _StateLoader(optimizer, parameter_shards(model), stored, checkpoint).load

    resharding.load_stored(checkpoint, "optimizer", read, match, verify=verify)


class SavedPositions(tuple[int, ...]):
    """The position of the saved group for each group of an optimizer."""


@contextlib.contextmanager
def schedules_follow_groups(schedulers: Iterable[Any]) -> Iterator[None]:
    """Let schedulers that are loaded in this block have a learning rate for each group of their optimizers.

    The optimizers are loaded first. Their groups may have been others when saved: they depend on the axes of the mesh.
    """
    known = list(schedulers)
    for scheduler in known:
        scheduler.load_state_dict = functools.partial(_load_schedule, scheduler)
    try:
        yield
    finally:
        for scheduler in known:
            del scheduler.load_state_dict


def _load_schedule(scheduler: Any, state: Mapping[str, Any]) -> None:
    optimizer = getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)  # inside that of Accelerate
    positions = find_part(optimizer, SavedPositions)
    type(scheduler).load_state_dict(scheduler, state if positions is None else _schedule_of(state, positions))


def _schedule_of(state: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Return a scheduler's state, and that of the schedulers in it, with the values of the groups at ``positions``."""
    found = dict(state)
    for name in _OF_GROUPS & found.keys():
        if isinstance(found[name], list) and len(found[name]) > max(positions):
            found[name] = [found[name][position] for position in positions]
    for name, parts in found.items():
        if isinstance(parts, list) and all(isinstance(part, dict) and "base_lrs" in part for part in parts):
            found[name] = [_schedule_of(part, positions) for part in parts]
    return found


class _StateLoader:
    """Loads the stored state of one optimizer.

    Raises:
        CheckpointError: the state cannot be loaded into this optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, shards: ModelShards, stored: StoredOptimizer, checkpoint: Path
    ) -> None:
        self._optimizer, self._root, self._checkpoint = optimizer, stored.root, checkpoint
        self._is_offloaded = wait_for_state(optimizer)
        self._transfers: list[resharding.Transfer] = []
        self._parameters = [
            [(parameter, shards.by_id.get(id(parameter), ())) for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        """The parameter objects of each group, with their shards: FSDP1's flat parameters have several."""
        own_names = {**shards.aliases, **self._names_by_number(stored)}  # a tied parameter may have another saved name
        self._state = {own_names.get(name, name): entry for name, entry in stored.state.items()}
        self._groups = [
            {**group, "params": [own_names.get(name, name) for name in group["params"]]} for group in stored.groups
        ]
        self._saved_groups = self._pair_groups()
        self._check_state()

    def load(self, files: InputFiles) -> None:
        state = {}
        parameters = [each for group in self._parameters for each in group]
        for index, (parameter, shards) in enumerate(parameters):
            entry = self._entry(files, parameter, shards)
            # Under FSDP1, a parameter with an empty shard on this rank gets no gradient here, and so has no state.
            if entry and (parameter.numel() or isinstance(parameter, DTensor)):
                state[index] = entry
        numbers = itertools.count()
        param_groups = [
            {**own, **self._hyperparameters(own, saved), "params": [next(numbers) for _ in own["params"]]}
            for own, saved in zip(self._optimizer.param_groups, self._saved_groups, strict=True)
        ]
        resharding.execute_transfers(files, self._transfers)
        _move_scalars(self._optimizer, state)
        state_dict = {"state": state, "param_groups": param_groups}
        if self._is_offloaded:
            load_on_host(self._optimizer, state_dict)
        else:
            self._optimizer.load_state_dict(state_dict)

    def _names_by_number(self, stored: StoredOptimizer) -> dict[str, str]:
        """Return number -> name, if the state dict has numbers: torch's optimizers and DDP number the parameters."""
        saved = [group["params"] for group in stored.groups]
        own = [[part.name for _, parts in group for part in parts] for group in self._parameters]
        is_flat = any(len(parts) > 1 for group in self._parameters for _, parts in group)  # in another order
        if is_flat or not all(name.isdecimal() for names in saved for name in names):
            return {}
        if [len(names) for names in saved] != [len(names) for names in own]:
            return {}
        return dict(zip(itertools.chain(*saved), itertools.chain(*own), strict=True))

    def _pair_groups(self) -> list[dict[str, Any]]:
        """Return, for each group of the optimizer, the saved group with its parameters, or an empty dict.

        Groups may have been saved in another order. Their sizes may differ if parameters that are grouped differently
        have the same options: the Trainer has a group for each mesh of parameters, so that groups depend on the axes.
        """
        own = [frozenset(part.name for _, parts in group for part in parts) for group in self._parameters]
        saved = [frozenset(group["params"]) for group in self._groups]
        if frozenset[str]().union(*own) != frozenset[str]().union(*saved):
            self._refuse_groups(own, saved)
        pairs: list[dict[str, Any]] = []
        positions: list[int] = []
        empty = (position for position, names in enumerate(saved) if not names)
        for names in own:
            found = [position for position, others in enumerate(saved) if others & names]
            found = found if names else [*itertools.islice(empty, 1)]
            sources = [self._groups[position] for position in found]
            of_sources = frozenset[str]().union(*(source["params"] for source in sources))
            groups = zip(self._optimizer.param_groups, own, strict=True)
            sharing = [group for group, others in groups if others & of_sources]
            if not (_have_same_options(sources) and _have_same_options(sharing)):
                self._refuse_groups(own, saved)
            pairs.append(sources[0] if sources else {})
            positions.append(found[0] if found else 0)
        parts_of(self._optimizer).put(SavedPositions(positions))
        return pairs

    def _refuse_groups(self, own: list[frozenset[str]], saved: list[frozenset[str]]) -> None:
        """Raise the problem of parameter groups that do not contain the same parameters."""
        here, there = frozenset[str]().union(*own), frozenset[str]().union(*saved)
        found = [f"the optimizer has {_sizes(own)}, but the checkpoint has {_sizes(saved)}"]
        if here - there:
            found.append(f"not in the checkpoint: {format_names(sorted(here - there))}")
        if there - here:
            found.append(f"only in the checkpoint: {format_names(sorted(there - here))}")
        if here == there:
            split = [name for group in own for name in sorted(group)[:1] if group not in saved]
            found.append(f"the same parameters are grouped differently, such as {format_names(split)}")
        fix = "Create the optimizer with the same trainable parameters and parameter groups as in the saved run."
        refuse("FSDP-E425", self._checkpoint, f"{'; '.join(found)}.", fix)

    def _check_state(self) -> None:
        """Check that all state can be loaded."""
        any_shape = step_mode(self._optimizer) == "whole"
        unsupported: list[str] = []
        other_shards: list[str] = []
        for own in (part for group in self._parameters for _, parts in group for part in parts):
            entry = self._state.get(own.name, {})
            for key, value in entry.items():
                is_tensor = isinstance(value, StoredTensor) and optimizer_state.split_key(key)[2] is None
                if is_tensor and not any_shape and optimizer_state.state_layout(key, value.shape, own.shape) == "other":
                    unsupported.append(f"{key} of {own.name} {list(value.shape)}, parameter {list(own.shape)}")
            ranges = {elements for *_, elements in map(optimizer_state.split_key, entry) if elements is not None}
            if ranges and own.pieces:
                held = optimizer_state.range_of(own.boxes, own.shape) if own.start is None else None
                other_shards += [own.name] if held not in ranges else []
        problems = []
        if unsupported:
            message = f"has optimizer state that cannot be sharded like its parameters: {format_names(unsupported)}."
            problems.append(problem("FSDP-E426", self._checkpoint, message, resharding.OTHER_MODEL))
        if other_shards:  # for example, quantized state
            message = f"has optimizer state of other shards than those of this rank: {format_names(other_shards)}."
            fix = "Resume with the same FSDP version, strategy and number of ranks, or start with a new optimizer."
            problems.append(problem("FSDP-E426", self._checkpoint, message, fix))
        raise_if_any(problems)

    def _entry(self, files: InputFiles, parameter: torch.Tensor, shards: Sequence[LocalShard]) -> dict[str, Any]:
        """Return the state of one parameter object, and add the reads that fill its tensors."""
        common: dict[str, list[tuple[LocalShard, Any]]] = {}
        per_shard: dict[tuple[str, str], StoredTensor] = {}
        for shard in shards:
            saved = self._state.get(shard.name, {})
            if not shard.pieces and any(optimizer_state.split_key(key)[2] for key in saved):
                continue  # a rank without elements gets no state of a parameter with quantized state
            for key, value in saved.items():
                name, attribute, elements = optimizer_state.split_key(key)
                if elements is None:
                    common.setdefault(key, []).append((shard, value))
                elif elements == optimizer_state.range_of(shard.boxes, shard.shape):
                    per_shard[name, attribute] = value
        held = self._optimizer.state.get(parameter, {})
        entry = {key: self._common(files, parameter, key, saved, held.get(key)) for key, saved in common.items()}
        self._add_per_shard(entry, parameter, per_shard)
        return entry

    def _common(
        self, files: InputFiles, parameter: torch.Tensor, key: str, saved: list[tuple[LocalShard, Any]], held: Any
    ) -> Any:
        """Return state that any shard can read. It is zero in padding and for parameters without this state.

        Args:
            saved: the state of each parameter in the object that has it.
            held: the current value of the state. Its memory is used again.
        """
        first, value = saved[0]
        if not isinstance(value, StoredTensor):
            return _common_value(key, [(shard.name, value) for shard, value in saved])
        kind = optimizer_state.state_layout(key, value.shape, first.shape)
        if kind == "scalar" and len(saved) > 1:  # of all parameters in a flat parameter
            planned, self._transfers = self._transfers, []
            tensors = [(shard.name, self._whole(stored)) for shard, stored in saved]
            resharding.execute_transfers(files, self._transfers)
            self._transfers = planned
            found = _common_value(key, [(name, tensor.item()) for name, tensor in tensors])
            return next(tensor for _, tensor in tensors if tensor.item() == found)
        if kind != "like_parameter":  # a scalar, or state of whole parameters
            return self._whole(value)
        local, state = _like_shard(
            parameter, getattr(torch, value.dtype), held, padded=first.start is not None, on_host=self._is_offloaded
        )
        for shard, stored in saved:
            self._transfers += resharding.plan_transfers(stored, shard.like(shard.name, local).pieces)
        return state

    def _add_per_shard(
        self, entry: dict[str, Any], parameter: torch.Tensor, saved: Mapping[tuple[str, str], StoredTensor]
    ) -> None:
        """Add state that belongs to this rank's shard: plain tensors, and the inner tensors of a tensor subclass."""
        for (key, attribute), stored in saved.items():
            if not attribute:
                is_like = isinstance(parameter, DTensor) and stored.shape == tuple(local_tensor(parameter).shape)
                if not is_like or not stored.shape:
                    entry[key] = self._whole(stored)
                    continue
                local, entry[key] = _like_shard(parameter, getattr(torch, stored.dtype))
                self._fill(local, stored)
                continue
            if key not in entry and can_create_state(self._optimizer):
                entry[key] = create_state(self._optimizer, parameter.detach(), key)
            inner = getattr(local_tensor(entry[key]), attribute, None) if key in entry else None
            if inner is None or tuple(inner.shape) != stored.shape:
                fix = "Create the optimizer with the settings of the run that was saved (block_size)."
                message = f"has quantized optimizer state that differs in {key}.{attribute}."
                refuse("FSDP-E426", self._root, message, fix)
            self._fill(inner, stored)

    def _hyperparameters(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved values in the optimizer's types: some formats store tuples (``betas``) as lists."""
        found = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        for key, value in found.items():
            if isinstance(value, StoredTensor):
                found[key] = self._whole(value)
            elif isinstance(own.get(key), tuple) and isinstance(value, list):
                found[key] = tuple(value)
            elif isinstance(own.get(key), torch.Tensor) and isinstance(value, (int, float)):
                found[key] = torch.full_like(own[key], value)
        return found

    def _whole(self, stored: StoredTensor) -> torch.Tensor:
        """Allocate a whole tensor on the CPU, and add the reads that fill it."""
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")
        self._fill(tensor, stored)
        return tensor

    def _fill(self, tensor: torch.Tensor, stored: StoredTensor) -> None:
        self._transfers += resharding.plan_transfers(stored, [Piece(whole_box(stored.shape), tensor)])


def _have_same_options(groups: Sequence[Mapping[str, Any]]) -> bool:
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
    return all(each == options[0] for each in options)


def _sizes(groups: list[frozenset[str]]) -> str:
    sizes = " + ".join(str(len(group)) for group in groups) or "0"
    return f"{plural(len(groups), 'parameter group')} of {sizes} parameters"


def _like_shard(
    parameter: torch.Tensor, dtype: torch.dtype, held: Any = None, *, padded: bool = False, on_host: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a state tensor laid out like this rank's shard, after its local part.

    Args:
        held: the current value of the state. Its memory is used if it is laid out in the same way.
        padded: zero the tensor.
        on_host: whether the state is in host memory while the shard is on an accelerator.
    """
    shard = local_tensor(parameter).detach()
    device = torch.device("cpu") if on_host else shard.device
    if isinstance(held, torch.Tensor) and isinstance(held, DTensor) == isinstance(parameter, DTensor):
        local = local_tensor(held).detach()
        layout, wanted = (local.shape, local.stride(), local.device), (shard.shape, shard.stride(), device)
        if type(local) is torch.Tensor and layout == wanted and local.dtype == dtype:
            return (local.zero_() if padded else local), held
    local = (torch.zeros_like if padded else torch.empty_like)(shard, dtype=dtype, device=device)
    return local, dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local


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


def _move_scalars(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> None:
    """Move the scalars together that ``load_state_dict`` would move to an accelerator one by one."""
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    moved: dict[torch.device, dict[tuple[int, str], torch.Tensor]] = {}
    for index, entry in state.items():
        parameter, group = groups[index]
        for key, value in entry.items():
            # As torch.optim.Optimizer decides: the step of most optimizers stays in host memory.
            stays = key == "step" and not (group.get("capturable") or group.get("fused"))
            is_scalar = type(value) is torch.Tensor and value.dim() == 0 and value.device.type == "cpu"
            if is_scalar and parameter.device.type != "cpu" and not stays:
                moved.setdefault(parameter.device, {})[index, key] = value
    for device, scalars in moved.items():
        for (index, key), value in move_scalars(scalars, device).items():
            state[index][key] = value
