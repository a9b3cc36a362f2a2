"""Predicts the memory of the strategies for the answers so far, and recommends one that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.wizard.question import State
from hf_fsdp_plugin.cli.wizard.settings import stock_limits
from hf_fsdp_plugin.estimate.sizes import parse_size
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_bytes, format_table

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.results import MemoryEstimate
    from hf_fsdp_plugin.estimate.workload import Workload
    from hf_fsdp_plugin.plan.model import FsdpPlan

HEADROOM: Final = 0.9
"""Part of a GPU's memory that a recommended row may need. The rest is for fragmentation and other libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The prediction for one strategy.

    Attributes:
        settings: canonical name -> value.
        communicated: bytes of all collectives of a rank per optimizer step.
    """

    settings: Mapping[str, Any]
    memory: MemoryEstimate
    communicated: int

    @property
    def cost(self) -> tuple[bool, bool, int]:
        """The order of rows that fit: offload and recomputation last, then the bytes that are communicated."""
        names = self.settings
        return names["offload.params"], names["activation.checkpointing"] != "none", self.communicated


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The rows, and the recommended one; ``None`` if the memory is unknown or nothing fits."""

    rows: tuple[Row, ...]
    best: Row | None
    text: str


def memory_of_gpu(state: State) -> int | None:
    """Return the bytes of a GPU; ``None`` if they are unknown."""
    return parse_size(str(state.answers.get("gpu_memory", ""))) if state.answers.get("gpu_memory") else None


def predict(state: State) -> Prediction:
    """Return the memory of each strategy with and without activation checkpointing, and with offload if nothing fits.

    Raises:
        SpecError: the model cannot be planned, or has other inputs than a batch of text or images.
    """
    limit = memory_of_gpu(state)
    rows = list(_rows(state, offload=False))
    fitting = _fitting(rows, limit)
    if limit is not None and not fitting:
        rows += _rows(state, offload=True)
        fitting = _fitting(rows, limit)
    limited = [row for row in fitting if any(stock_limits(row.settings, state.version))]
    best = min((row for row in fitting if row not in limited), key=lambda row: row.cost, default=None)
    text = _text(rows, best, limit)
    cheaper = next((row for row in limited if best is not None and row.cost < best.cost), None)
    if cheaper is not None:
        text += f" {' '.join(stock_limits(cheaper.settings, state.version))}"
    return Prediction(rows=tuple(rows), best=best, text=text)


def predict_settings(state: State, settings: Mapping[str, Any]) -> MemoryEstimate:
    """Return the predicted memory of the settings that were chosen. Raises ``SpecError`` as :func:`predict` does."""
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    assert state.model is not None, "the caller checks that there is a model"
    return estimate_memory(_plan(state, settings), state.model.model, _workload(state))


def memory_text(memory: MemoryEstimate, limit: int | None) -> str:
    """Return the peak in one line: ``31.2 GiB of 74.5 GiB per GPU, in the backward of model.layers.3``."""
    of = f" of {_size(limit)}" if limit is not None else ""
    return f"{_size(memory.peak.bytes)}{of} per GPU, in the {memory.peak.where}"


def _rows(state: State, *, offload: bool) -> Iterator[Row]:
    from hf_fsdp_plugin.estimate.communication import estimate_communication
    from hf_fsdp_plugin.estimate.memory import estimate_memory

    assert state.model is not None, "the caller checks that there is a model"
    model, workload = state.model.model, _workload(state)
    for settings in _candidates(state, offload=offload):
        plan = _plan(state, settings)
        memory = estimate_memory(plan, model, workload)
        collectives = estimate_communication(plan, model, workload).collectives
        communicated = sum(each.bytes * each.calls for each in collectives)
        yield Row(settings=settings, memory=memory, communicated=communicated)


def _candidates(state: State, *, offload: bool) -> Iterator[dict[str, Any]]:
    for checkpointing in ("none", "full"):
        for row in STRATEGIES.values():
            if (offload and row.name != "full_shard") or (row.hybrid and state.num_machines == 1):
                continue
            yield {
                "sharding.strategy": row.name,
                "activation.checkpointing": checkpointing,
                "offload.params": offload,
            }


def _plan(state: State, settings: Mapping[str, Any]) -> FsdpPlan:
    from hf_fsdp_plugin.plan.resolve import resolve

    model = state.model
    assert model is not None, "the caller checks that there is a model"
    general: dict[str, Any] = {
        "launch.distributed_type": "FSDP",
        "launch.num_processes": state.world_size,
        "launch.num_machines": state.num_machines,
        "launch.mixed_precision": state.answers["precision"],
        "fsdp.version": state.version,
        "wrap.policy": "transformer" if model.layers else "size",
    }
    if general["wrap.policy"] == "size":
        general["wrap.min_num_params"] = 100_000_000
    elif not model.declares_layers:
        general["wrap.classes"] = list(model.layers)
    if "wrap.policy" in settings:
        general = {name: value for name, value in general.items() if not name.startswith("wrap.")}
    chosen = {name: value for name, value in (general | dict(settings)).items() if value not in ("", ())}
    chosen = {name: list(value) if isinstance(value, tuple) else value for name, value in chosen.items()}
    spec = load_spec(overrides=chosen, environ={})
    return resolve(spec, model.model, world_size=state.world_size, device_type="cpu" if state.cpu else "cuda")


def _workload(state: State) -> Workload:
    from hf_fsdp_plugin.estimate.workload import Workload

    answers = state.answers
    micro_batch = int(answers.get("micro_batch", 1))
    return Workload(
        micro_batch=micro_batch,
        seq_len=int(answers["seq_len"]),
        accumulation=int(answers["global_batch"]) // (micro_batch * state.world_size),
        optimizer=answers["optimizer"],
    )


def _fitting(rows: Sequence[Row], limit: int | None) -> list[Row]:
    return [row for row in rows if limit is not None and row.memory.peak.bytes <= HEADROOM * limit]


def _text(rows: Sequence[Row], best: Row | None, limit: int | None) -> str:
    head = ("", "strategy", "checkpointing", "memory", "collectives", *(("fits",) if limit is not None else ()))
    lines = [head]
    for row in rows:
        offload = ", offload" if row.settings["offload.params"] else ""
        peak = row.memory.peak.bytes
        fits = "no" if limit is None or peak > limit else "yes" if peak <= HEADROOM * limit else "just"
        cells = (
            "»" if row is best else "",
            row.settings["sharding.strategy"] + offload,
            row.settings["activation.checkpointing"],
            _size(peak),
            format_bytes(row.communicated),
        )
        lines.append((*cells, *((fits,) if limit is not None else ())))
    table = format_table(lines, right=(3, 4))
    title = "Predicted per GPU with one sample per forward pass: memory at the peak, and bytes of collectives per step"
    return f"{title}\n\n{table}\n\n{_conclusion(rows, best, limit)}"


def _conclusion(rows: Sequence[Row], best: Row | None, limit: int | None) -> str:
    if limit is None:
        return "The memory of a GPU is unknown, so nothing is recommended."
    if best is None:
        least = min(rows, key=lambda row: row.memory.peak.bytes)
        return (
            f"Nothing fits with {1 - HEADROOM:.0%} headroom; the least is {_size(least.memory.peak.bytes)}. "
            "More GPUs, a shorter sequence or a smaller micro-batch need less."
        )
    reasons = [f"needs at most {HEADROOM:.0%} of the memory"]
    reasons += ["no offload"] if not best.settings["offload.params"] else []
    reasons += ["no recomputation"] if best.settings["activation.checkpointing"] == "none" else []
    return f"Recommended (»): {', '.join(reasons)}, and fewest bytes of collectives among these."


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)
