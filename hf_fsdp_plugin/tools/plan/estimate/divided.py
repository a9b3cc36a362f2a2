"""A model as one rank of the context, tensor and expert axes has it.

Transformers divides a copy of the model on the meta device, over ranks that do not exist, as ``from_pretrained`` does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan
from hf_fsdp_plugin.plan.units import sharded_units
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.plan.estimate.types import Axis


@dataclass(frozen=True, kw_only=True, slots=True)
class RankModel:
    """A model as a rank has it, before FSDP shards it.

    Attributes:
        axes: name of a process group -> its axis.
        context: the ranks that divide a sequence; ``None`` for one.
    """

    model: nn.Module
    axes: Mapping[str, Axis]
    context: DeviceMesh | None = None


@contextmanager
def divided(plan: FsdpPlan, model: nn.Module) -> Iterator[RankModel]:
    """Yield a model as one rank has it. Parameters that a tensor or expert axis divides are DTensors.

    Args:
        model: on the meta device, whole. It is unchanged.

    Raises:
        SpecError: this process is a rank of a run already, or nothing is sharded (FSDP-E813).
    """
    if not plan.mesh.has_model_axes:
        yield RankModel(model=model, axes={})
        return
    with _ranks(plan) as mesh:
        if not plan.mesh.has_divided_layers:
            yield RankModel(model=model, axes=_group(mesh, "context"), context=mesh["cp"])
            return
        model, axes = _divide(plan.mesh, model, fsdp=False)
        context = mesh["cp"] if plan.mesh.context > 1 else None
        yield RankModel(model=model, axes=axes | (_group(mesh, "context") if context else {}), context=context)


def as_loaded(plan: FsdpPlan, model: nn.Module) -> FsdpPlan:
    """Return the plan with the units that ``from_pretrained`` makes of a model whose layers it divides.

    Raises:
        SpecError: as :func:`divided`.
    """
    if not plan.mesh.has_divided_layers or plan.sharded_at_load:
        return plan
    with _ranks(plan):
        loaded, _ = _divide(plan.mesh, model, fsdp=True)
        units = sharded_units(loaded, "fsdp2")
    # Transformers never frees the last norm and the head, so these units are not checkpointed.
    units = tuple(replace(unit, from_policy=unit.from_policy and unit.reshard_after_forward) for unit in units)
    return replace(plan, units=units, sharded_at_load=True)


def dividing_axis(parameter: torch.Tensor) -> Axis | None:
    """Return the axis that divides a parameter of :func:`divided`."""
    if not isinstance(parameter, DTensor):
        return None
    return "expert" if parameter.device_mesh.mesh_dim_names == ("ep",) else "tensor"


@contextmanager
def _ranks(plan: FsdpPlan) -> Iterator[DeviceMesh]:
    """Make this process a rank of the smallest world that has these axes."""
    mesh = plan.mesh
    if dist.is_initialized() or mesh.replicate * mesh.num_shards == 1:
        axis = "context" if mesh.context > 1 else "tensor" if mesh.tensor > 1 else "expert"
        where = "in a rank of a run" if dist.is_initialized() else "without ranks over which FSDP shards the model"
        message = f"memory and time are not predicted for mesh.{axis}={getattr(mesh, axis)} {where}."
        fix = "Run hf-fsdp plan in a process of its own, or leave ranks for the shard axis."
        raise SpecError([plan.spec.problem("FSDP-E813", f"mesh.{axis}", message, fix)])
    # Its private names of torch are needed for predictions only; ranks that train import this module, too.
    from hf_fsdp_plugin.torch_private.fake_ranks import fake_process_group

    sizes = (_num_fsdp_ranks(mesh) // mesh.context, mesh.context, mesh.tensor)
    with fake_process_group(sizes[0] * sizes[1] * sizes[2]):
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "cp", "tp"))


def _num_fsdp_ranks(mesh: MeshPlan) -> int:
    return mesh.context * max(2, mesh.expert // mesh.tensor)


def _divide(mesh: MeshPlan, model: nn.Module, *, fsdp: bool) -> tuple[nn.Module, dict[str, Axis]]:
    """Return a copy that Transformers has divided, and sharded if `fsdp`, and name of a group -> its axis."""
    from transformers import DistributedConfig

    from hf_fsdp_plugin.torch_private.fake_ranks import transformers_mesh

    num = _num_fsdp_ranks(mesh)
    config = DistributedConfig(tp_size=mesh.tensor, fsdp_size=num, ep_size=mesh.expert)
    dense, experts = (
        init_device_mesh("cpu", (1, 1, *sizes), mesh_dim_names=("pp", "dp_replicate", *names))
        for sizes, names in (
            ((num, mesh.tensor), ("fsdp", "tp")),
            ((num * mesh.tensor // mesh.expert, mesh.expert), ("efsdp", "ep")),
        )
    )
    if not fsdp:
        config.fsdp_size = 1
    copied: Any = copy.deepcopy(model)
    type(copied).maybe_distribute_model(copied, config, transformers_mesh(dense, experts))
    copied.tie_weights()
    return copied, _group(dense, "tensor") | _group(experts, "expert")


def _group(mesh: DeviceMesh, axis: Axis) -> dict[str, Axis]:
    """Return the name of the group of an axis, and the axis."""
    return {mesh[MODEL_AXES[axis]].get_group().group_name: axis}
