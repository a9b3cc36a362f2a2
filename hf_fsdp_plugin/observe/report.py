"""The report of a run: what was asked beside what the live, sharded model is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.observe.memory import observe_memory, unmanaged_parameters
from hf_fsdp_plugin.observe.optimizer import optimizer_problems, unwrapped_optimizer
from hf_fsdp_plugin.observe.readings_run import state_dict_kind
from hf_fsdp_plugin.observe.record import BatchShape, RankObservation, Report, rank_here
from hf_fsdp_plugin.observe.render import render
from hf_fsdp_plugin.observe.scene import Scene
from hf_fsdp_plugin.observe.settings import SettingObservation, observe_settings, setting_problems
from hf_fsdp_plugin.observe.subject import subject_of
from hf_fsdp_plugin.observe.units import UnitObservation, observe_units
from hf_fsdp_plugin.observe.watch import watched
from hf_fsdp_plugin.observe.weights import compare_weights
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem

__all__ = ["BatchShape", "RankObservation", "Report", "observe", "render", "report"]

_PACKAGES = ("torch", "transformers", "accelerate")


def observe(
    model: nn.Module,
    plan: FsdpPlan,
    *,
    optimizer: Any = None,
    accelerator: Any = None,
    batch: BatchShape | Mapping[str, int | None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    saved_asynchronously: bool | None = None,
    output_dtype: torch.dtype | None = None,
) -> Report:
    """Read the live model and compare it with the plan. Collective: every rank of the process group must enter.

    Args:
        model: the sharded model, as its backend returned it.
        optimizer: checked against the model's parameters, and counted; Accelerate's wrapper is looked through.
        batch: what one rank reads a step, for the effective batch size; a mapping may have ``per_device_batch_size``,
            ``accumulation_steps`` and ``seq_len``.
        accelerator: tells the kind of state dict that it saves.
        checkpoint: a folder that this run saved; what lies there comes before what the accelerator says.
        saved_asynchronously: how this run's last checkpoint was written; ``None`` where there is none.
        output_dtype: of an output or loss that was seen; otherwise what ``observe.watch.watch`` noted.

    Raises:
        SpecError: a rank could not be read; all ranks raise it, and it names the rank.
    """
    optimizer = unwrapped_optimizer(optimizer)
    shape = _batch_shape(batch)
    with on_all_ranks("reading the live model"):
        notes = watched(model)
        units = observe_units(model)
        memory = observe_memory(model, units, optimizer, noted_grads_bytes=notes.grads_bytes)
        device = _device(model, units)
        plain = sum(p.numel() for p in unmanaged_parameters(model, units))
        mine = RankObservation(
            rank=rank_here(),
            host=socket.gethostname(),
            device=str(device),
            num_local_params=sum(unit.num_local_params for unit in units) + plain,
            memory=memory,
        )
    ranks: tuple[RankObservation, ...] = tuple(_gather(mine))
    loads = plan.ram_efficient or plan.sync_module_states
    weights = compare_weights(model, units) if loads else None
    with on_all_ranks("comparing the live model with the plan"):
        scene = Scene(
            model=model,
            plan=plan,
            units=units,
            world_size=len(ranks),
            device_type=device.type,
            hosts=len({row.host for row in ranks}),
            output_dtype=output_dtype or notes.output_dtype,
            state_dict=_state_dict(accelerator, checkpoint),
            saved_asynchronously=saved_asynchronously,
            weights=weights,
        )
        settings = observe_settings(scene)
        problems = [*_structure_problems(plan, units), *optimizer_problems(model, units, optimizer)]
    settings, found = _agree(settings, problems)
    mesh = _mesh(units, len(ranks))
    # The mesh is what the data is split over; ranks of other axes (tensor parallel) read the same samples.
    effective = shape.per_device * shape.accumulation * mesh["replicate"] * mesh["shard"] if shape else 0
    return Report(
        backend=_backend(model, units),
        model_class=plan.model_class,
        world_size=len(ranks),
        mesh=mesh,
        device=device.type,
        units=units,
        num_params=sum(unit.num_params for unit in units) + plain,
        settings=settings,
        memory=memory,
        ranks=ranks,
        problems=(*plan.problems, *setting_problems(settings, plan), *found),
        batch=shape,
        effective_batch_size=effective,
        tokens=effective * (shape.seq_len or 0) if shape else 0,
        versions={name: version(name) for name in _PACKAGES},
    )


def report(subject: Any) -> Report:
    """The report of a prepared model, an ``Accelerator`` or a ``Trainer``. Collective: every rank must call it.

    Raises:
        SpecError: the plugin has sharded nothing there.
    """
    found = subject_of(subject)
    batch = BatchShape(per_device=found.per_device, accumulation=found.accumulation) if found.per_device else None
    return observe(found.model, found.plan, optimizer=found.optimizer, accelerator=found.accelerator, batch=batch)


def _batch_shape(batch: BatchShape | Mapping[str, int | None] | None) -> BatchShape | None:
    """A mapping has Transformers' words: ``per_device_batch_size``, ``accumulation_steps``, ``seq_len``."""
    if batch is None or isinstance(batch, BatchShape):
        return batch
    per_device = batch.get("per_device_batch_size")
    if not per_device:
        return None
    accumulation = batch.get("accumulation_steps") or 1
    return BatchShape(per_device=per_device, accumulation=accumulation, seq_len=batch.get("seq_len"))


def _structure_problems(plan: FsdpPlan, units: Sequence[UnitObservation]) -> list[Problem]:
    """What no single setting says: nothing sharded at all, master weights in a low precision."""
    if not units:
        return [
            Problem(
                severity="error",
                message=f"nothing is sharded: no module of {plan.model_class} is an FSDP unit, each rank holds all.",
                fix="Let the plugin prepare the model: install() before the Accelerator or Trainer is built.",
            )
        ]
    wrong = [
        unit
        for unit in units
        if plan.precision.master != "unchanged"
        and unit.num_frozen < unit.num_params
        and unit.master_dtype != plan.precision.master
    ]
    if not wrong or plan.pre_sharded:
        return []
    return [
        Problem(
            severity="error",
            setting="precision.param",
            message=f"{len(wrong)} units keep and update their weights in {wrong[0].master_dtype} "
            f"({wrong[0].name or 'the root'} for one), planned was {plan.precision.master}.",
            fix=f"Load the model in {plan.precision.master}, or do not cast it after it was prepared.",
        )
    ]


def _agree(
    settings: tuple[SettingObservation, ...], problems: list[Problem]
) -> tuple[tuple[SettingObservation, ...], list[Problem]]:
    """One verdict for all ranks: what differs on any rank differs; a problem of some names the first."""
    everybody = _gather((settings, problems))
    rows = []
    for index, row in enumerate(everybody[0][0]):
        rows.append(next((other[index] for other, _ in everybody if other[index].status == "differs"), row))
    merged: dict[tuple[str, str], Problem] = {}
    for rank, (_, found) in enumerate(everybody):
        for problem in found:
            everywhere = all(problem in others for _, others in everybody)
            with_rank = problem if everywhere else replace(problem, rank=rank)
            merged.setdefault((problem.severity, problem.message), with_rank)
    return tuple(rows), list(merged.values())


def _gather(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _device(model: nn.Module, units: Sequence[UnitObservation]) -> torch.device:
    """Where the model computes: the units' own device (offloaded shards lie elsewhere), or that of its parameters."""
    computes = [unit.live.device for unit in units if unit.live.device is not None]
    if computes:
        return computes[0]
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _mesh(units: Sequence[UnitObservation], world_size: int) -> dict[str, int]:
    owner = next((unit.live for unit in units if unit.num_params), None)
    if owner is None:
        return {"replicate": world_size, "shard": 1}
    return {"replicate": owner.replicate_size, "shard": owner.shard_size}


def _backend(model: nn.Module, units: Sequence[UnitObservation]) -> str:
    versions = sorted({unit.version for unit in units})
    if not versions:
        return "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "none"
    return " and ".join(f"fsdp{number}" for number in versions)


def _state_dict(accelerator: Any, checkpoint: str | os.PathLike[str] | None) -> str | None:
    """``full``, ``sharded`` or ``local``: from the files, else from Accelerate's plugin, for the next save."""
    if checkpoint is not None and (kind := state_dict_kind(Path(checkpoint))) is not None:
        return kind
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    kind_asked = getattr(plugin, "state_dict_type", None)
    if kind_asked is None:
        return None
    return str(getattr(kind_asked, "name", kind_asked)).upper().removesuffix("_STATE_DICT").lower()
