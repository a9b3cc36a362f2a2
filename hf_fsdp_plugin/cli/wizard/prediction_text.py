"""The tables that the wizard shows: what the planner recommends, or what each strategy needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.wizard.question import State
from hf_fsdp_plugin.cli.wizard.settings import stock_limits
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import fit_table, format_bytes, format_table, wrap_words

if TYPE_CHECKING:
    from hf_fsdp_plugin.cli.wizard.prediction import Row
    from hf_fsdp_plugin.estimate.planner_rows import Advice, AdviceRow
    from hf_fsdp_plugin.estimate.results import MemoryEstimate

MAX_ROWS: Final = 8


def memory_text(memory: MemoryEstimate, limit: int | None) -> str:
    """Return the peak in one line: ``31.2 GiB of 74.5 GiB per GPU, in the backward of model.layers.3``."""
    of = f" of {_size(limit)}" if limit is not None else ""
    return f"{_size(memory.needed_bytes)}{of} per GPU, in the {memory.peak.where}"


def advice_text(advice: Advice, best: AdviceRow | None, state: State, width: int | None) -> str:
    """Return the planner's table: the best row of each strategy and checkpointing, and what does not fit."""
    timed = any(row.tokens_per_second for row in advice.fitting)
    head = ("", "strategy", "checkpointing", "batch", "memory", *(("tokens/s", "") if timed else ("collectives",)))
    lines: list[Sequence[str]] = [head]
    for row in _shown(advice.fitting, best):
        speed = (f"{row.tokens_per_second or 0:,.0f}", row.reason) if timed else (format_bytes(row.communicated),)
        batch = f"{row.choice.micro_batch}{'*' if row.choice.sync_each_batch else ''}"
        lines.append(
            ("»" if row is best else "", _strategy(row), _checkpointing(row), batch, _size(row.needed_bytes), *speed)
        )
    parts = [f"Predicted per GPU of {_size(advice.gpu_memory)}, of which {_size(advice.limit)} may be used:"]
    if advice.fitting:
        parts.append(_table(lines, (3, 4, 5), width))
    if any("*" in line[3] for line in lines[1:]):
        parts.append("* gradients are reduced after every micro-batch, not only the last (sync_each_batch)")
    if rejected := _rejected(advice):
        parts.append("\n".join(part for line in rejected for part in wrap_words(line, width)))
    parts.append(_conclusion(advice, best, state))
    return "\n\n".join(parts)


def rows_text(rows: Iterable[Row], width: int | None) -> str:
    """Return the table of strategies for GPUs whose memory is unknown."""
    lines: list[Sequence[str]] = [("strategy", "checkpointing", "memory", "collectives")]
    for row in rows:
        names = (str(row.settings["sharding.strategy"]), str(row.settings["activation.checkpointing"]))
        lines.append((*names, _size(row.memory.needed_bytes), format_bytes(row.communicated)))
    title = "Predicted per GPU with one sample per forward pass: memory at the peak, and bytes of collectives per step:"
    end = "The memory of a GPU is unknown, so nothing is recommended."
    return f"{title}\n\n{_table(lines, (2, 3), width)}\n\n{end}"


def _table(lines: Sequence[Sequence[str]], right: Collection[int], width: int | None) -> str:
    """Align the columns. On a narrow terminal, leave out the last column, then shorten the longest cells."""
    for columns in (lines, [line[:-1] for line in lines]):
        table = format_table(columns, right=[number for number in right if number < len(columns[0])])
        if width is None or max(map(len, table.splitlines())) <= width:
            return table
    return fit_table([line[:-1] for line in lines], width)


def _shown(rows: Iterable[AdviceRow], best: AdviceRow | None) -> list[AdviceRow]:
    """Return the first row of each combination of strategy and checkpointing, and the recommended one."""
    first: dict[Any, AdviceRow] = {}
    for row in rows:
        first.setdefault((_strategy(row), _checkpointing(row)), row)
    shown = list(first.values())[:MAX_ROWS]
    return shown if best is None or best in shown else [*shown[: MAX_ROWS - 1], best]


def _rejected(advice: Advice) -> list[str]:
    """Return a line for each strategy of which no combination fits: the one that needs least."""
    fitting = {row.settings["sharding.strategy"] for row in advice.fitting}
    least: dict[str, AdviceRow] = {}
    for row in advice.rejected:
        name = str(row.settings["sharding.strategy"])
        if name not in fitting and (name not in least or row.needed_bytes < least[name].needed_bytes):
            least[name] = row
    return [f"{name} does not fit: {least[name].reason}" for name in STRATEGIES if name in least]


def _conclusion(advice: Advice, best: AdviceRow | None, state: State) -> str:
    if best is None and not advice.fitting:
        return " ".join(["Nothing fits.", *advice.remedies])
    fastest = advice.fitting[0]
    limits = " ".join(stock_limits(fastest.settings, state.version, gpus=state.gpus))
    if best is None:
        return f"Nothing that fits runs with stock Accelerate. {limits}"
    basis = "the fastest that fits" if best.time is not None else "it fits, with least recomputation and communication"
    return f"Recommended (»): {basis}." + (f" {limits}" if best is not fastest else "")


def _strategy(row: AdviceRow) -> str:
    sharding = row.choice.sharding
    mesh = f" {sharding.replicate}×{sharding.shard}" if STRATEGIES[sharding.strategy].hybrid else ""
    offload = ", offload" if row.choice.offload_params else ""
    units = f", {row.choice.units.label}" if row.choice.units.label else ""
    return f"{sharding.strategy}{mesh}{offload}{units}"


def _checkpointing(row: AdviceRow) -> str:
    return f"{row.choice.checkpointing}{', offload' if row.choice.offload_activations else ''}"


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes, binary=True)
