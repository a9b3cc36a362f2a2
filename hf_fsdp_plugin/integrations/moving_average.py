"""``ExponentialMovingAverage``: an average of a sharded model's weights, of which each rank holds its shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import collective_call
from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.backends.torch_types import wait_for_reads
from hf_fsdp_plugin.checkpoint.names import MOVING_AVERAGE, numbered_from_one
from hf_fsdp_plugin.checkpoint.reading.resharding import copy_whole_tensors, load_tensors
from hf_fsdp_plugin.checkpoint.shards import ModelShards, parameter_shards, shards_below
from hf_fsdp_plugin.checkpoint.writing.manager import Save
from hf_fsdp_plugin.checkpoint.writing.state_files import gathered_state
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import find_part, parts_of


class _Averages(list["weakref.ref[ExponentialMovingAverage]"]):
    """Weak references to the averages of a sharded model, in the order of their creation."""


class ExponentialMovingAverage:
    """The exponential moving average of the trained parameters of a prepared model.

    It begins with the values of the parameters. Each rank holds the averages of its own shards, in fp32 or in the dtype
    of the shards if that is wider. Frozen parameters and buffers have no average. A parameter that is unfrozen later
    gets one in the next update.

    Every checkpoint of ``accelerator.save_state`` and of the Trainer contains the averages of its models that exist,
    and ``load_state`` loads them, with any number of ranks and either FSDP version. ``register_for_checkpointing`` is
    not needed.

    Args:
        model: a model that ``accelerator.prepare`` returned, or a module of it.
        decay: the weight of the average in an update: ``average = decay * average + (1 - decay) * parameter``. It may
            be changed between updates.

    Attributes:
        is_applied: whether the model has the averages now.

    Raises:
        SpecError: the model is not sharded.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} is not between 0 and 1.")
        place = locate_module(model)
        if place is None:
            message = f"ExponentialMovingAverage was called with a {type(model).__name__} that FSDP has not sharded."
            fix = "Pass the model after accelerator.prepare(); without FSDP, use torch.optim.swa_utils.AveragedModel."
            raise SpecError([Problem(code="FSDP-E312", message=message, fix=fix)])
        self.decay, self._place = decay, place
        self.is_applied = False
        self.reset()
        averages = parts_of(place.root).get(_Averages)
        averages[:] = [*(reference for reference in averages if reference() is not None), weakref.ref(self)]

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the values of the parameters."""
        self._averages = _copies(self._parameters())

    @torch.no_grad()
    def update(self) -> None:
        """Include the values of the parameters. Call it on all ranks after each optimizer step."""
        self._check_not_applied("updated")
        parameters = self._parameters()
        for parameter, average in _pairs(parameters, self._averages):
            average.lerp_(parameter.to(average.dtype), 1 - self.decay)
        known = {shard.name for shard in self._averages.tensors}
        if new := tuple(shard for shard in parameters.tensors if shard.name not in known):
            more = _copies(replace(parameters, tensors=new))
            self._averages = replace(more, tensors=(*self._averages.tensors, *more.tensors))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages in the block, for an evaluation or an export with ``save_pretrained``.

        The parameters get their values back at the end. Meanwhile this rank holds its shards twice. Do not train or
        save checkpoints in the block.
        """
        self._check_not_applied("applied")
        with torch.no_grad():
            parameters = self._parameters()
            kept = _copies(parameters, same_dtype=True)
            _copy(self._averages, parameters)
        self.is_applied = True
        try:
            yield
        finally:
            self.is_applied = False
            with torch.no_grad():
                _copy(kept, self._parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole averages by the names of the parameters, on the CPU of rank 0; else nothing. Collective."""
        with collective_call(f"ExponentialMovingAverage.state_dict of {self._model_class}"):
            return gathered_state(self._averages)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole averages, which every rank passes.

        Raises:
            ValueError: an average is missing or has another shape. Nothing was loaded.
        """
        copy_whole_tensors(state_dict, self._averages)

    def save(self, folder: Path | Save, index: int = 0) -> None:
        """Write the averages to a folder in the safetensors format, each rank its shards. Collective."""
        self._check_not_applied("saved with the model")
        into = folder if isinstance(folder, Save) else manager().open_save(folder) or folder
        manager().save_tensors(self._averages, into, numbered_from_one(MOVING_AVERAGE, index))

    def load(self, checkpoint: Path, index: int = 0, *, verify: bool = True) -> None:
        """Load the averages of a checkpoint. Without averages in it, they begin with the loaded parameters. Collective.

        Raises:
            CheckpointError: they are those of other parameters, or are damaged.
        """
        if not load_tensors(self._averages, checkpoint, numbered_from_one(MOVING_AVERAGE, index), verify=verify):
            self.reset()
            message = f"{checkpoint} has no moving average of the {self._model_class} (model {index}), so the average "
            message += "starts from the weights that were loaded."
            print_once(Problem(code="FSDP-W435", message=message))

    @property
    def _model_class(self) -> str:
        return type(unwrapped(self._place.root)).__name__

    def _parameters(self) -> ModelShards:
        """Return this rank's shards of the trained parameters. Gathered parameters are freed."""
        shards = parameter_shards(self._place.root)
        trained = [shard for shard in shards.tensors if not shard.frozen and shard.dtype.is_floating_point]
        names = {shard.name for shard in trained}
        aliases = {alias: name for alias, name in shards.aliases.items() if name in names}
        return shards_below(ModelShards(tuple(trained), aliases), self._place.prefix)

    def _check_not_applied(self, doing: str) -> None:
        if self.is_applied:
            message = f"the average of {self._model_class} is {doing} while the model has the averages as its weights."
            raise SpecError([Problem(code="FSDP-E312", message=message, fix="Do it after the block of applied().")])


def _copies(shards: ModelShards, *, same_dtype: bool = False) -> ModelShards:
    """Return copies of shards, in fp32 at least unless ``same_dtype`` is set."""
    tensors = []
    for shard in shards.tensors:
        dtype = shard.dtype if same_dtype else torch.promote_types(shard.dtype, torch.float32)
        pieces = tuple(replace(piece, tensor=piece.tensor.to(dtype, copy=True)) for piece in shard.pieces)
        tensors.append(replace(shard, dtype=dtype, pieces=pieces))
    return ModelShards(tuple(tensors), shards.aliases)


def _pairs(source: ModelShards, into: ModelShards) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors of shards with the same names."""
    values = {shard.name: shard for shard in source.tensors}
    for shard in into.tensors:
        if shard.name in values:
            for new, old in zip(values[shard.name].pieces, shard.pieces, strict=True):
                yield new.tensor, old.tensor


def _copy(source: ModelShards, into: ModelShards) -> None:
    """Copy the values of shards to those with the same names."""
    wait_for_reads(piece.tensor for shard in into.tensors for piece in shard.pieces)
    for new, old in _pairs(source, into):
        old.copy_(new)


def _averages_of(models: Iterable[nn.Module]) -> Iterator[tuple[int, ExponentialMovingAverage]]:
    """Return the averages of sharded models that exist, with their numbers in a checkpoint."""
    averages = (reference() for model in models for reference in find_part(model, _Averages) or ())
    return enumerate(average for average in averages if average is not None)


def save_averages(models: Iterable[nn.Module], save: Save) -> None:
    """Write the averages of the models to a checkpoint that is being written. Collective."""
    for index, average in _averages_of(models):
        average.save(save, index)


def load_averages(models: Iterable[nn.Module], checkpoint: Path, *, verify: bool = True) -> None:
    """Load the averages of the models from a checkpoint. Collective."""
    for index, average in _averages_of(models):
        average.load(checkpoint, index, verify=verify)
