"""Checkpoints with the layout of DeepSpeed's, written without DeepSpeed.

The layout was compared with the files of DeepSpeed 0.19.8:

- ``TAG/mp_rank_00_model_states.pt`` (stages 0 to 2) or one ``zero_pp_rank_R_mp_rank_00_model_states.pt`` for each rank
  (stage 3): ``module``, ``param_shapes`` by group, ``shared_params``, ``buffer_names``, frozen parameters.
- ``TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``: ``optimizer_state_dict``. Stages 1 and 2 pad the vector of
  a group to a multiple of twice the number of ranks. The fp32 weights are stored without this padding.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

STEP = 3
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True)
class Zero:
    """What a checkpoint contains.

    Attributes:
        weights: name -> whole tensor of the model in its order, with buffers and frozen parameters.
        groups: the names of each parameter group. Only these have optimizer state.
        states: name -> key -> whole tensor of the optimizer state; by default random ones.
        shared: tied name -> name.
    """

    weights: Mapping[str, torch.Tensor]
    groups: Sequence[Sequence[str]]
    states: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[Mapping[str, Any]] = ()
    dtype: torch.dtype = torch.bfloat16
    schedule: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = self.states or {
            name: {key: torch.rand(self.weights[name].shape, generator=generator) for key in STATES}
            for names in self.groups
            for name in names
        }

    @property
    def frozen(self) -> list[str]:
        known = {*self.buffers, *self.shared, *(name for names in self.groups for name in names)}
        return [name for name in self.weights if name not in known]

    def rounded(self, name: str) -> torch.Tensor:
        """Return a tensor as the model has it, in its 16-bit dtype."""
        tensor = self.weights[name]
        return tensor.to(self.dtype) if tensor.is_floating_point() and name not in self.buffers else tensor

    def write(self, folder: Path, stage: int, world_size: int, *, tag: str = f"global_step{STEP}") -> Path:
        """Write a checkpoint and ``latest``, and return the folder of the tag."""
        place = folder / tag
        place.mkdir(parents=True, exist_ok=True)
        (folder / "latest").write_text(tag)
        for rank in range(world_size if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            save(self.model_states(stage, world_size, rank), place / f"{prefix}mp_rank_00_model_states.pt")
        prefix = "bf16_" if self.dtype is torch.bfloat16 else ""
        for rank in range(world_size if stage else 0):
            state = self.optimizer_states(stage, world_size, rank)
            save(state, place / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return place

    def write_universal(self, folder: Path, stage: int, *, tag: str = f"global_step{STEP}_universal") -> Path:
        """Write a universal checkpoint and ``latest_universal``, and return the folder of the tag."""
        place = self.write(folder, stage, 1, tag=tag)
        (folder / "latest").unlink()
        (folder / "latest_universal").write_text(tag)
        (file,) = place.glob("*_optim_states.pt")
        file.unlink()
        for name, states in self.states.items():
            own = place / "zero" / name
            own.mkdir(parents=True)
            for key, tensor in {"fp32": self.weights[name], **states}.items():
                save(tensor.flatten() if stage == 3 else {"cat_dim": 0, "param": tensor}, own / f"{key}.pt")
            if stage < 3:
                save(torch.tensor(float(STEP)), own / "step.pt")
        optimizer = self.optimizer_states(stage, 1, 0)["optimizer_state_dict"]
        inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        kept = {key: value for key, value in optimizer.items() if stage == 3 or key != inner}
        kept.pop("single_partition_of_fp32_groups", None)
        save({**kept, "param_groups": optimizer[inner]["param_groups"]}, place / "zero" / "optimizer_state.pt")
        return place

    def model_states(self, stage: int, world_size: int, rank: int) -> dict[str, Any]:
        module = OrderedDict((name, self.rounded(name)) for name in self.weights)
        frozen = OrderedDict((name, module[name]) for name in self.frozen) if stage >= 2 else None
        shapes = [OrderedDict((name, self.weights[name].shape) for name in names) for names in self.groups]
        fragments = frozen
        if stage == 3:
            fragments = OrderedDict((name, _part(module[name], world_size, rank)) for name in self.frozen)
            module = OrderedDict(
                (name, tensor if name in self.buffers else tensor.new_empty(0)) for name, tensor in module.items()
            )
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None if stage else self._plain_optimizer(),
            "param_shapes": shapes if stage else None,
            "frozen_param_shapes": None if frozen is None else OrderedDict((n, t.shape) for n, t in frozen.items()),
            "shared_params": dict(self.shared if rank == 0 else {}) if stage else None,
            "frozen_param_fragments": fragments,
            "lr_scheduler": self.schedule,
            "skipped_steps": 0,
            "global_steps": STEP,
            "dp_world_size": world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8",
        }

    def optimizer_states(self, stage: int, world_size: int, rank: int) -> dict[str, Any]:
        groups = self._param_groups([[number] for number in range(len(self.groups))])
        inner: dict[str, Any] = {"state": {}, "param_groups": groups}
        weights, sizes = [], []
        for number, names in enumerate(self.groups):
            vectors = {key: [self.states[name][key] for name in names] for key in STATES}
            vectors["fp32"] = [self.weights[name] for name in names]
            padded = {key: self._vector(tensors, stage, world_size, rank) for key, tensors in vectors.items()}
            numel = sum(tensor.numel() for tensor in vectors["fp32"])
            sizes.append(padded["fp32"].numel() * world_size - numel if rank == world_size - 1 and stage < 3 else 0)
            weights.append(padded["fp32"][: padded["fp32"].numel() - sizes[-1]].clone())
            inner["state"][number] = {"step": torch.tensor(float(STEP)), **{key: padded[key] for key in STATES}}
        state = {
            "loss_scaler": _scaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "zero_stage": ZeroStageEnum(stage),
        }
        if stage == 3:
            state |= {"partition_count": world_size, "optimizer_state_dict": inner, "fp32_flat_groups": weights}
        else:
            state |= {"clip_grad": 1.0, "base_optimizer_state": inner, "single_partition_of_fp32_groups": weights}
            state |= {"partition_count": [world_size] * len(weights), "group_paddings": sizes}
            state |= {"param_alignment_paddings": [[0] * len(names) for names in self.groups]}
        return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}

    def _param_groups(self, numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        options = self.options or [{"lr": 0.1, "betas": (0.9, 0.99)}] * len(self.groups)
        return [{**option, "params": list(own)} for option, own in zip(options, numbers, strict=True)]

    def _plain_optimizer(self) -> dict[str, Any]:
        """Return the state dict of an optimizer without ZeRO, which numbers the parameters."""
        names = [name for group in self.groups for name in group]
        numbers = [[names.index(name) for name in group] for group in self.groups]
        step = torch.tensor(float(STEP))
        state = {number: {"step": step, **self.states[name]} for number, name in enumerate(names)}
        return {"state": state, "param_groups": self._param_groups(numbers)}

    def _vector(self, tensors: Sequence[torch.Tensor], stage: int, world_size: int, rank: int) -> torch.Tensor:
        if stage == 3:
            return torch.cat([_part(tensor, world_size, rank) for tensor in tensors])
        whole = torch.cat([tensor.flatten() for tensor in tensors])
        size = 2 * world_size * math.ceil(whole.numel() / (2 * world_size))
        padded = torch.cat([whole, whole.new_zeros(size - whole.numel())])
        return padded.chunk(world_size)[rank].clone()


def _part(tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """Return the part of a parameter that a rank of stage 3 has, with padding."""
    size = math.ceil(tensor.numel() / world_size)
    padded = torch.cat([tensor.flatten(), tensor.new_zeros(size * world_size - tensor.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


class ZeroStageEnum(int, enum.Enum):
    disabled, optimizer_states, gradients, weights = range(4)


class LossScaler:
    cur_scale: float
    dynamic: bool


LossScaler.__module__, ZeroStageEnum.__module__ = "deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config"


def _scaler() -> LossScaler:
    scaler = LossScaler()
    scaler.cur_scale, scaler.dynamic = 1.0, False
    return scaler


@contextmanager
def _importable_classes() -> Iterator[None]:
    """Make the classes importable by the names of DeepSpeed's, as pickle requires."""
    with pytest.MonkeyPatch.context() as patch:
        for own in (LossScaler, ZeroStageEnum):
            parts = own.__module__.split(".")
            for end in range(1, len(parts) + 1):
                patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            setattr(sys.modules[own.__module__], own.__name__, own)
        yield


def save(value: Any, path: Path) -> None:
    """Save an object as DeepSpeed does, with the names of its classes."""
    with _importable_classes():
        torch.save(value, path)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Change the contents of a file."""
    with _importable_classes():
        value = torch.load(path, weights_only=False)
        edit(value)
        torch.save(value, path)
