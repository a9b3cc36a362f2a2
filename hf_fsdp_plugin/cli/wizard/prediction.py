"""Predicts what strategies need for the answers so far, and recommends settings that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.cli.wizard.question import State
from hf_fsdp_plugin.cli.wizard.settings import stock_limits
from hf_fsdp_plugin.estimate.sizes import parse_size
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.strategies import STRATEGIES

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.planner_rows import Advice, AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.model import FsdpPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The prediction for one strategy with one sample per forward pass.

    Attributes:
        settings: canonical name -> value.
        communicated: bytes of all collectives of a rank per optimizer step.
    """

    settings: Mapping[str, Any]
    memory: MemoryEstimate
    communicated: int


def memory_of_gpu(state: State) -> int | None:
    """Return the bytes of a GPU; ``None`` if they are unknown."""
    return parse_size(str(state.answers.get("gpu_memory", ""))) if state.answers.get("gpu_memory") else None


def advice_of(state: State, gpu_memory: int) -> Advice:
    """Return the planner's answer. Raises ``SpecError`` if the model cannot be planned."""
    from hf_fsdp_plugin.estimate.planner import advise

    assert state.model is not None, "the caller checks that there is a model"
    precision = state.answers["precision"]
    return advise(
        state.model.model,
        seq_len=int(state.answers["seq_len"]),
        global_batch=int(state.answers["global_batch"]),
        gpu_memory=gpu_memory,
        num_machines=state.num_machines,
        gpus_per_machine=state.gpus,
        machine=state.named_machine(),
        version=1 if state.version == 1 else 2,
        precision="auto" if precision == "no" else precision,
        wrap=_wrap(state),
        optimizer=state.answers["optimizer"],
    )


def recommended_row(advice: Advice, state: State) -> AdviceRow | None:
    """Return the first row that fits and that stock Accelerate runs, too; ``None`` if nothing fits."""
    rows = (row for row in advice.fitting if not any(stock_limits(row.settings, state.version, gpus=state.gpus)))
    return next(rows, None)


def recommended_answers(row: AdviceRow) -> dict[str, Any]:
    """Return the settings of a row, and its answers to questions that are not settings."""
    choice = row.choice
    settings = {name: value for name, value in row.settings.items() if name != "fsdp.version"}
    return {**settings, "micro_batch": choice.micro_batch, "sync_each_batch": choice.sync_each_batch}


def rows_of(state: State) -> Iterator[Row]:
    """Yield each strategy with and without activation checkpointing, for GPUs whose memory is unknown.

    Raises:
        SpecError: the model cannot be planned, or has other inputs than a batch of text or images.
    """
    from hf_fsdp_plugin.estimate.communication import estimate_communication
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    assert state.model is not None, "the caller checks that there is a model"
    model, workload = state.model.model, _workload(state)
    for checkpointing in ("none", "full"):
        for strategy in STRATEGIES.values():
            if strategy.hybrid and state.num_machines == 1:
                continue
            settings = {"sharding.strategy": strategy.name, "activation.checkpointing": checkpointing}
            plan = _plan(state, settings | _wrap(state))
            memory = estimate_memory(plan, model, workload)
            collectives = estimate_communication(plan, model, workload).collectives
            communicated = sum(each.bytes * each.calls for each in collectives)
            yield Row(settings=settings, memory=memory, communicated=communicated)


def predict_settings(state: State, settings: Mapping[str, Any]) -> MemoryEstimate:
    """Return the predicted memory of the settings that were chosen. Raises ``SpecError`` as :func:`rows_of` does."""
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    assert state.model is not None, "the caller checks that there is a model"
    return estimate_memory(_plan(state, settings), state.model.model, _workload(state))


def _wrap(state: State) -> dict[str, Any]:
    """Return the settings of the wrap policy that the wizard offers as default."""
    model = state.model
    if model is None or model.declares_layers:
        return {"wrap.policy": "transformer"}
    if model.layers:
        return {"wrap.policy": "transformer", "wrap.classes": list(model.layers)}
    return {"wrap.policy": "size", "wrap.min_num_params": 100_000_000}


def _plan(state: State, settings: Mapping[str, Any]) -> FsdpPlan:
    from hf_fsdp_plugin.plan.resolve import resolve

    assert state.model is not None, "the caller checks that there is a model"
    general: dict[str, Any] = {
        "launch.distributed_type": "FSDP",
        "launch.num_processes": state.world_size,
        "launch.num_machines": state.num_machines,
        "launch.mixed_precision": state.answers["precision"],
        "fsdp.version": state.version,
    }
    chosen = {name: value for name, value in (general | dict(settings)).items() if value not in ("", ())}
    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    spec = load_spec(overrides=chosen, environ={})
    device_type = "cpu" if state.cpu else "cuda"
    return resolve(spec, state.model.model, world_size=state.world_size, device_type=device_type)


def _workload(state: State) -> Workload:
    from hf_fsdp_plugin.estimate.workload import Workload

    answers = state.answers
    micro_batch = int(answers.get("micro_batch", 1))
    return Workload(
        micro_batch=micro_batch,
        seq_len=int(answers["seq_len"]),
        accumulation=int(answers["global_batch"]) // (micro_batch * state.world_size),
        sync_each_batch=bool(answers.get("sync_each_batch", False)),
        optimizer=answers["optimizer"],
    )
