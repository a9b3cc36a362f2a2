"""The cases of ``hf-fsdp bench``: numbers of ranks × strategies × FSDP versions, and the systems that run each.

Also what the ranks get, the workload and the tasks, and what becomes of it: samples of each case, the figures that are
computed from them, and the tables. Imports no torch, because the command line reads it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_memory, format_table, plural

System = Literal["plugin", "stock"]
"""This package, or Accelerate without it."""
DDP: Final = "ddp"
OFFLOAD: Final = "offload"
TITLES: Final[Mapping[str, str]] = {
    DDP: "DDP",
    "shard_grad_op": "ZeRO-2",
    "full_shard": "ZeRO-3",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid ZeRO-3",
    "hybrid_shard_zero2": "hybrid ZeRO-2",
    OFFLOAD: "ZeRO-3, offload",
}
"""Name of a strategy in ``--strategies`` -> its name in a table."""
WORKLOAD: Final[Mapping[str, tuple[int, str]]] = {
    "micro_batch": (1, "samples per rank and step"),
    "seq_len": (512, "tokens per sample"),
    "steps": (5, "steps of a timed block"),
    "warm_up": (2, "steps of a case before its blocks"),
    "blocks": (5, "timed blocks of a case"),
}
"""Number of the workload -> its default and its meaning."""
JOB_FILE: Final = "job.pickle"
"""The file with the :class:`WorldJob` of the ranks. For each group of cases they write ``NUMBER.json`` beside it."""
_SMALLEST_HYBRID: Final = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of a number of ranks, a strategy and an FSDP version, and the system that runs it.

    Attributes:
        strategy: a key of :data:`TITLES`.
        version: FSDP version; 0 for DDP.
    """

    world_size: int
    strategy: str
    version: int = 0
    system: System = "plugin"

    @property
    def label(self) -> str:
        """The case without the number of ranks: ``FSDP2 full_shard``."""
        return "DDP" if self.strategy == DDP else f"FSDP{self.version} {self.strategy}"

    @property
    def name(self) -> str:
        """The name of the case, unique in a benchmark: ``2 ranks, FSDP2 full_shard, stock``."""
        return f"{plural(self.world_size, 'rank')}, {self.label}{'' if self.system == 'plugin' else ', stock'}"

    @property
    def overrides(self) -> list[str]:
        """``NAME=VALUE`` of every setting that the case sets, with the precedence of ``--set``."""
        values: dict[str, Any] = {"launch.num_processes": self.world_size, "launch.num_machines": 1}
        if self.strategy != DDP:
            values |= {
                "launch.distributed_type": "FSDP",
                "fsdp.version": self.version,
                "sharding.strategy": "full_shard" if self.strategy == OFFLOAD else self.strategy,
                "offload.params": str(self.strategy == OFFLOAD).lower(),
            }
        if self.is_hybrid:
            values |= {"mesh.replicate": 2, "mesh.shard": self.world_size // 2}
        return [f"{name}={value}" for name, value in values.items()]

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in STRATEGIES and STRATEGIES[self.strategy].hybrid

    @property
    def impossible(self) -> str:
        """Why no plan of this number of ranks has the strategy; empty if one may have it."""
        if self.is_hybrid and (self.world_size < _SMALLEST_HYBRID or self.world_size % 2):
            return f"two replicas of at least two ranks need an even number of at least {_SMALLEST_HYBRID} ranks"
        return ""


CaseGroup = tuple[Case, ...]
"""A case of this package, and the same case of the systems with which it is compared."""


@dataclass(frozen=True, kw_only=True)
class WorldJob:
    """What the ranks of one world measure.

    Attributes:
        workload: what every case trains, and how often, by the names of :data:`WORKLOAD`.
        groups: the cases. Those of a group are built together, and their blocks alternate.
    """

    model: str
    device: str
    threads: int
    workload: Mapping[str, int]
    groups: Sequence[CaseGroup]


def why_not_in_stock(case: Case, device: str, *, prefetches: bool = False) -> str:
    """Return why stock Accelerate cannot run a case on a type of device; empty if it can.

    Args:
        prefetches: whether the settings have another prefetch than FSDP's default.
    """
    if case.strategy == DDP:
        return "DDP is run by stock Accelerate itself"
    if case.is_hybrid:
        # Its parallelism_config makes a mesh for FSDP2 on accelerators, but is refused on CPU ranks.
        return "Accelerate passes no mesh to FSDP1, and has no hybrid strategy under FSDP2"
    if case.version == 1:
        return ""
    if prefetches:
        return "Accelerate has no prefetch setting under FSDP2"
    if case.strategy == OFFLOAD and device == "cpu":
        return "Accelerate pins the memory of FSDP2's offload, which needs an accelerator"
    return "Accelerate has no no_shard under FSDP2" if case.strategy == "no_shard" else ""


_DRAWS: Final = 2000
"""Draws of a bootstrap interval."""
_FIGURES: Final = (
    "step_seconds", "step_quartiles", "samples_per_second", "tokens_per_second", "efficiency", "loss",
)  # fmt: skip
ResultRow = Mapping[str, Any]


class Results:
    """The results of one benchmark: a row of its JSON for every case, in the order of the tables."""

    def __init__(self, cases: Iterable[Case]) -> None:
        empty = {"status": "pending", "reason": None, "peak_source": None, "peak_bytes": None}
        self._rows: dict[str, dict[str, Any]] = {
            case.name: {"case": case.name, **asdict(case), **empty, "seconds": [], "losses": []} for case in cases
        }

    def add(self, measured: Mapping[str, Any]) -> None:
        """Add what the ranks have measured of a case."""
        self._rows[measured["case"]] |= {**measured, "status": "measured"}

    def end(self, cases: Iterable[Case], status: str, reason: str) -> None:
        """Set why cases are not measured: ``failed`` or ``left out``."""
        for case in cases:
            self._rows[case.name] |= {"status": status, "reason": reason}

    def is_over(self, group: CaseGroup) -> bool:
        """Return whether a group is measured, or will not be. Its cases are measured together."""
        return self._rows[group[0].name]["status"] != "pending"

    def to_json(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole result, with the figures of all cases.

        Args:
            head: what the benchmark measures.
        """
        rows = list(self._rows.values())
        statuses, measured = {row["status"] for row in rows}, [row for row in rows if row["seconds"]]
        return {
            "ok": "failed" not in statuses and "measured" in statuses,
            **head,
            "cases": [{**row, **_figures(row, measured, head["workload"])} for row in rows],
            "comparisons": [
                comparison_of(self._rows[row["case"].removesuffix(", stock")], row)
                for row in measured
                if row["system"] == "stock"
            ],
        }


def _figures(row: ResultRow, measured: Sequence[ResultRow], workload: Mapping[str, int]) -> dict[str, Any]:
    """Return the figures of a case; null if it is not measured.

    ``step_seconds`` is the median of all blocks, and samples and tokens per second are those of all ranks in this
    time. ``efficiency`` is the throughput of a rank over that of the same case in the smallest measured world.
    """
    seconds = row["seconds"]
    if not seconds:
        return dict.fromkeys(_FIGURES)
    step = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds
    samples = row["world_size"] * workload["micro_batch"] / step
    same = [each for each in measured if all(each[name] == row[name] for name in ("strategy", "version", "system"))]
    smallest = min(same, key=lambda each: each["world_size"])
    return {
        "step_seconds": step,
        "step_quartiles": [quartiles[0], quartiles[-1]],
        "samples_per_second": samples,
        "tokens_per_second": samples * workload["seq_len"],
        "efficiency": statistics.median(smallest["seconds"]) / step,
        "loss": row["losses"][-1],
    }


def comparison_of(ours: ResultRow, other: ResultRow) -> dict[str, Any]:
    """Return the comparison of a case of this package with another system, whose blocks ran in alternation.

    ``ratio`` is the throughput of this package over that of the other one: the median over the pairs of blocks, with a
    95% bootstrap interval of the median.
    """
    ratios = [theirs / own for own, theirs in zip(ours["seconds"], other["seconds"], strict=True)]
    losses = zip(ours["losses"], other["losses"], strict=True)
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return {
        "case": ours["case"],
        "vs": other["system"],
        "pairs": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_95": [medians[int(0.025 * _DRAWS)], medians[int(0.975 * _DRAWS) - 1]],
        "relative_loss_difference": max(abs(own - theirs) / max(abs(theirs), 1e-12) for own, theirs in losses),
    }


def bench_text(tree: Mapping[str, Any]) -> str:
    """Return all tables of a result."""
    model, workload = tree["model"], tree["workload"]
    device = tree["device"]["name"] or tree["device"]["type"]
    parts = [
        f"{model['class']}, {format_count(model['num_params'])} parameters, on {device}; "
        f"{workload['micro_batch']} × {workload['seq_len']:,} tokens per rank and step; medians of "
        f"{plural(workload['blocks'], 'block')} of {plural(workload['steps'], 'step')}"
    ]
    rows = [row for row in tree["cases"] if row["system"] == "plugin"]
    source = next((row["peak_source"] for row in rows if row["peak_source"]), "not measured")
    tables: list[tuple[str, Callable[[ResultRow, ResultRow | None], str]]] = [
        ("tokens/s of all ranks, half the interquartile range, and difference from DDP", _throughput),
        (
            f"peak memory of a rank ({source})",
            lambda row, _: "–" if row["peak_bytes"] is None else format_memory(row["peak_bytes"]),
        ),
    ]
    if len({row["world_size"] for row in rows if row["efficiency"] is not None}) > 1:
        title = "efficiency: throughput of a rank over that in the smallest world"
        tables.append((title, lambda row, _: f"{row['efficiency']:.0%}"))
    parts += [f"{title}\n{_grid(rows, cell)}" for title, cell in tables]
    if tree["comparisons"]:
        title = "this package against stock Accelerate, on the same settings"
        parts.append(f"{title}\n{_comparisons(tree['comparisons'])}")
    return "\n\n".join(parts)


def _grid(rows: Sequence[ResultRow], cell: Callable[[ResultRow, ResultRow | None], str]) -> str:
    """Return a table with a row per number of ranks and a column per strategy.

    Args:
        cell: returns the text of a measured case, from its row and that of DDP in the same world.
    """
    has_versions = len({row["version"] for row in rows if row["strategy"] != DDP}) > 1
    table: dict[int, dict[str, ResultRow]] = {}
    for row in rows:
        title = TITLES[row["strategy"]]
        column = f"FSDP{row['version']} {title}" if has_versions and row["strategy"] != DDP else title
        table.setdefault(row["world_size"], {})[column] = row
    lines = [["ranks", *next(iter(table.values()))]]
    for world_size, columns in table.items():
        line = [str(world_size)]
        for row in columns.values():
            if row["step_seconds"] is not None:
                line.append(cell(row, columns.get(TITLES[DDP])))
            elif row["status"] == "failed":
                line.append("out of memory" if "OutOfMemoryError" in row["reason"] else "failed")
            else:
                line.append("–")
        lines.append(line)
    return format_table(lines, right=range(1, len(lines[0])))


def _throughput(row: ResultRow, baseline: ResultRow | None) -> str:
    (low, high), tokens = row["step_quartiles"], row["tokens_per_second"]
    text = f"{tokens:,.0f} ±{(high - low) / 2 / row['step_seconds']:.1%}"
    if baseline is None or baseline is row or baseline["tokens_per_second"] is None:
        return text
    return f"{text} ({tokens / baseline['tokens_per_second'] - 1:+.0%})"


def _comparisons(comparisons: Sequence[ResultRow]) -> str:
    table = [["case", "throughput", "95% interval", "losses differ by"]]
    for row in comparisons:
        low, high = row["ratio_95"]
        difference = f"{row['relative_loss_difference']:.1e}"
        table.append([row["case"], f"× {row['ratio']:.3f}", f"{low:.3f} to {high:.3f}", difference])
    return format_table(table, right=range(1, 4))
