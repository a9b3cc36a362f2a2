"""Builds the report: reads the live model on every rank and compares it with the plan."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.observe.first_step import FirstStep, recorded_first_step
from hf_fsdp_plugin.observe.live_run import LiveRun
from hf_fsdp_plugin.observe.memory import MemoryObservation, observe_memory, unmanaged_parameters
from hf_fsdp_plugin.observe.optimizer import check_optimizer, trained_pair, unwrapped_optimizer
from hf_fsdp_plugin.observe.ranks import current_rank, gather_objects
from hf_fsdp_plugin.observe.report import BatchShape, RankObservation, Report
from hf_fsdp_plugin.observe.settings import SettingObservation, check_settings, observe_settings
from hf_fsdp_plugin.observe.units import UnitObservation, observe_units
from hf_fsdp_plugin.observe.weights import compare_weights
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError

_PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class _RankState:
    """The live model as read on this rank; ``num_unmanaged`` counts elements that no unit shards."""

    units: tuple[UnitObservation, ...]
    memory: MemoryObservation
    device: torch.device
    num_unmanaged: int
    first_step: FirstStep


def build_report(
    model: nn.Module,
    plan: FsdpPlan,
    *,
    optimizer: Any = None,
    batch: BatchShape | None = None,
    state_dict: str | None = None,
    saved_asynchronously: bool | None = None,
) -> Report:
    """Read the live model and compare it with the plan. Collective: every rank of the process group must call it.

    Args:
        model: the sharded model, as its backend returned it.
        optimizer: torch's or Accelerate's; it is checked against the parameters of the model, and its state counted.
        batch: the input of one step on one rank, for the effective batch size.
        state_dict: ``full``, ``sharded`` or ``local``, of the last checkpoint or, if there is none, of the next one.
        saved_asynchronously: how the last checkpoint was written; ``None`` if there is none.

    Raises:
        SpecError: a rank could not be read; all ranks raise it, and it names the rank.
    """
    optimizer = unwrapped_optimizer(optimizer)
    with on_all_ranks("reading the live model"):
        state = _read_rank(model, optimizer)
        observation = _rank_observation(state)
    ranks: tuple[RankObservation, ...] = tuple(gather_objects(observation))
    loads = plan.ram_efficient or plan.sync_module_states
    weights = compare_weights(model, state.units) if loads else None
    with on_all_ranks("comparing the live model with the plan"):
        run = LiveRun(
            model=model,
            plan=plan,
            units=state.units,
            world_size=len(ranks),
            device_type=state.device.type,
            num_hosts=len({row.host for row in ranks}),
            output_dtype=state.first_step.output_dtype,
            state_dict=state_dict,
            saved_asynchronously=saved_asynchronously,
            weights=weights,
        )
        settings = observe_settings(run)
        problems = [*check_structure(state.units, plan), *check_optimizer(model, state.units, optimizer)]
    settings, problems = _merge_ranks(settings, problems)
    return Report(
        backend=_backend(model, state.units),
        model_class=plan.model_class,
        world_size=len(ranks),
        mesh=_mesh(state.units, len(ranks)),
        device=state.device.type,
        units=state.units,
        num_params=sum(unit.num_params for unit in state.units) + state.num_unmanaged,
        settings=settings,
        memory=state.memory,
        ranks=ranks,
        problems=(*plan.problems, *check_settings(settings, plan), *problems),
        batch=batch,
        versions={name: version(name) for name in _PACKAGES},
    )


def build_report_of_trained(models: Sequence[Any], optimizers: Sequence[Any] = (), **facts: Any) -> Report:
    """Build the report of the first prepared model that one of the optimizers updates. Collective.

    Args:
        facts: ``batch``, ``state_dict`` and ``saved_asynchronously`` of :func:`build_report`.

    Raises:
        SpecError: none of the models was prepared.
    """
    prepared = [model for model in models if find_plan(model) is not None]
    if not prepared:
        names = ", ".join(type(model).__name__ for model in models) or "it has no model"
        raise SpecError(
            [
                Problem(
                    code="FSDP-E508",
                    message=f"report() found no model that hf_fsdp_plugin prepared ({names}).",
                    fix="Call install() before the Accelerator or Trainer is created, and report() after prepare().",
                )
            ]
        )
    model, optimizer = trained_pair(prepared, optimizers)
    plan = find_plan(model)
    assert plan is not None
    return build_report(model, plan, optimizer=optimizer, **facts)


def find_plan(model: Any) -> FsdpPlan | None:
    """Return the plan of a model or, if it is compiled or wrapped, of the prepared model inside it.

    Raises:
        SpecError: it is not a model.
    """
    if not isinstance(model, nn.Module):
        message = f"report() takes a prepared model, an Accelerator or a Trainer, not {type(model).__name__}."
        raise SpecError([Problem(code="FSDP-E507", message=message)])
    return next((plan for module in model.modules() if (plan := plan_of(module)) is not None), None)


def check_structure(units: Sequence[UnitObservation], plan: FsdpPlan) -> list[Problem]:
    """Find the problems that belong to no single setting: no unit at all, or weights kept in another dtype."""
    if not units:
        return [
            Problem(
                code="FSDP-E501",
                message=f"nothing is sharded: no module of {plan.model_class} is an FSDP unit, so every rank has the "
                "whole model.",
                fix="Call install() before the Accelerator or Trainer is created, so that the plugin prepares it.",
            )
        ]
    master = plan.precision.master
    differing = [unit for unit in units if unit.num_frozen < unit.num_params and unit.master_dtype != master]
    if master == "unchanged" or not differing or plan.pre_sharded:
        return []
    return [
        Problem(
            code="FSDP-E502",
            setting="precision.param",
            message=f"{len(differing)} units keep and update their weights in {differing[0].master_dtype} instead of "
            f"{master}, for example {differing[0].name or 'the root'}.",
            fix=f"Load the model in {master}, and do not cast it after prepare().",
        )
    ]


def _read_rank(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> _RankState:
    first_step = recorded_first_step(model)
    units = observe_units(model)
    return _RankState(
        units=units,
        memory=observe_memory(model, units, optimizer, recorded_grads_bytes=first_step.grads_bytes),
        device=_compute_device(model, units),
        num_unmanaged=sum(parameter.numel() for parameter in unmanaged_parameters(model, units)),
        first_step=first_step,
    )


def _rank_observation(state: _RankState) -> RankObservation:
    return RankObservation(
        rank=current_rank(),
        host=socket.gethostname(),
        device=str(state.device),
        num_local_params=sum(unit.num_local_params for unit in state.units) + state.num_unmanaged,
        memory=state.memory,
    )


def _merge_ranks(
    settings: tuple[SettingObservation, ...], problems: list[Problem]
) -> tuple[tuple[SettingObservation, ...], list[Problem]]:
    """Return the same result on all ranks: a setting differs if it does on any; a problem of some names the first."""
    results = gather_objects((settings, problems))
    rows = []
    for index, row in enumerate(results[0][0]):
        rows.append(next((other[index] for other, _ in results if other[index].status == "differs"), row))
    merged: dict[tuple[str, str], Problem] = {}
    for rank, (_, found) in enumerate(results):
        for problem in found:
            on_every_rank = all(problem in others for _, others in results)
            merged.setdefault(
                (problem.code, problem.message), problem if on_every_rank else replace(problem, rank=rank)
            )
    return tuple(rows), list(merged.values())


def _compute_device(model: nn.Module, units: Sequence[UnitObservation]) -> torch.device:
    """Return the device that the units compute on (offloaded shards are elsewhere), else that of the parameters."""
    devices = [unit.live.device for unit in units if unit.live.device is not None]
    if devices:
        return devices[0]
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _mesh(units: Sequence[UnitObservation], world_size: int) -> dict[str, int]:
    unit = next((unit.live for unit in units if unit.num_params), None)
    if unit is None:
        return {"replicate": world_size, "shard": 1}
    return {"replicate": unit.replicate_size, "shard": unit.shard_size}


def _backend(model: nn.Module, units: Sequence[UnitObservation]) -> str:
    versions = sorted({unit.version for unit in units})
    if not versions:
        return "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "none"
    return " and ".join(f"fsdp{number}" for number in versions)
