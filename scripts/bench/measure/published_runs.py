"""Predict runs whose throughput others published (published_runs.yaml), and write the error of each.

Achieved fractions of kernels are fitted. The error of a run is that of a fit without any run of its source, and so is
the interval that it is counted in. All sources together give the figures of machines.yaml.

    python -m scripts.bench published_runs        (minutes; writes docs/results/published_runs.json)
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.plan.estimate.machines import Link, Machine, machine_named
from hf_fsdp_plugin.tools.plan.estimate.memory.step import OpCost
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel, UnitCosts
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from scripts.bench.common import make_parser
from scripts.bench.measure.clock_fit import (
    PRIORS,
    Array,
    Linear,
    fit,
    folds,
    held_out,
    interval,
    linearize,
    start,
    values_of,
)
from scripts.bench.tables.update_results import write_result

DATA = Path(__file__).with_suffix(".yaml")
COVERAGE = 0.9
SPECIAL = ("accelerate", "automodel")
"""Sources of mixtures of experts and of LoRA."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: tokens/s per GPU, and its settings.

    Attributes:
        checkpointing: none, full, selective or the fraction of blocks that are recomputed.
        network: a name of machines.yaml or Gbit/s per machine; ``None`` for the machine's own.
    """

    source: str
    table: str
    model: str
    machine: str
    throughput: float
    ranks: int
    micro_batch: int
    seq_len: int
    version: int
    reduce: str
    update_loop: str
    strategy: str = "full_shard"
    accumulation: int = 1
    checkpointing: str | float = "none"
    compiled: bool = False
    network: float | str | None = None
    ranks_per_machine: int = 8
    sync_each_batch: bool = False
    clip_norm: bool = True
    prefetch: str = "pre"
    flash: int = 2
    how: str = ""

    @property
    def name(self) -> str:
        words = [f"{self.how} {self.model}".strip(), f"{self.ranks} x {self.machine}", "compiled" * self.compiled]
        batch = f"{self.micro_batch}x{self.accumulation}x{self.seq_len}"
        recompute = "" if self.checkpointing == "none" else f"recompute {self.checkpointing}"
        return ", ".join(word for word in (*words, batch, recompute) if word)

    @property
    def tokens(self) -> int:
        """Tokens per GPU and step."""
        return self.micro_batch * self.seq_len * self.accumulation


@cache
def data() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return read


def runs() -> Iterator[Run]:
    for name, source in data()["sources"].items():
        for table in source["tables"]:
            for row in table["rows"]:
                values = dict(zip(table["columns"], row, strict=True))
                yield Run(source=name, table=table["name"], **{**source["all"], **table.get("all", {}), **values})


@cache
def model_named(name: str, seq_len: int) -> Any:
    """Return a model on the meta device."""
    import torch
    import transformers

    sizes = data()["models"][name]
    common = {
        "vocab_size": sizes["vocab"], "hidden_size": sizes["hidden"], "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"], "use_cache": False, "max_position_embeddings": seq_len,
    }  # fmt: skip
    if "inner" in sizes:
        common |= {"intermediate_size": sizes["inner"], "num_key_value_heads": sizes["kv"]}
    if "head" in sizes:
        common["head_dim"] = sizes["head"]
    if sizes["family"] == "gpt2":
        common |= {"n_positions": seq_len, "activation_function": "gelu"}
        common |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if "experts" in sizes:
        experts = "num_experts" if sizes["family"] == "qwen3_moe" else "num_local_experts"
        common |= {experts: sizes["experts"], "num_experts_per_tok": sizes["top_k"]}
        common["moe_intermediate_size"] = sizes["inner"]
    config = transformers.AutoConfig.for_model(sizes["family"], **common)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if "lora" in sizes:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=sizes["lora"], lora_alpha=32, target_modules=targets))
    return model


def device_of(run: Run) -> str:
    """Return the generation of the device, which has parameters of its own."""
    return "a100" if run.machine.startswith("a100") else "h100"


def machine_of(run: Run, values: Mapping[str, float]) -> Machine:
    """Return the machine of a run with values of the parameters."""
    named = run.network if isinstance(run.network, str) else None
    machine = machine_named(f"{run.machine}:{named}" if named else run.machine)
    if isinstance(run.network, (int, float)):
        bandwidth = run.network / 8 / run.ranks_per_machine * 1e9
        machine = replace(machine, inter=Link(bandwidth=bandwidth, latency=machine.inter.latency))
    device = device_of(run)
    attention = values[f"{device} attention"] * (values["flash 1"] if run.flash == 1 else 1)
    return replace(
        machine, ranks_per_machine=run.ranks_per_machine, matmul=values[f"{device} matmul"], attention=attention,
        memory=values["memory"], fusion=values["fusion"], kernel_seconds=values["kernel seconds"],
        contention=values["contention"], network_fraction=values["network"], op_seconds=values["op seconds"],
    )  # fmt: skip


def fused(costs: Mapping[OpCost, int]) -> Counter[OpCost]:
    """Return the operations after fusion by ``torch.compile``, as an upper bound of what fusion saves.

    Products and attention stay. Everything between them is fused into kernels that read their results and write their
    operands, so that each of these bytes moves once more.
    """
    kept = Counter({cost: count for cost, count in costs.items() if cost.flops})
    for cost, count in list(kept.items()):
        kept[OpCost(kind="fused", flops=0, bytes=cost.bytes, dtype=cost.dtype)] += count
    return kept if kept else Counter(costs)


@dataclass
class Prepared:
    """The counted operations of a run, for predictions with several machines. Fractions of recomputed blocks are the
    weighted mean of the times with and without recomputation."""

    run: Run
    parts: list[tuple[float, TimeModel]] = field(default_factory=list)

    def __post_init__(self) -> None:
        checkpointing = self.run.checkpointing
        fraction = checkpointing if isinstance(checkpointing, float) else None
        modes = {checkpointing: 1.0} if fraction is None else {"full": fraction, "none": 1 - fraction}
        self.parts = [(weight, self._model(str(mode))) for mode, weight in modes.items()]

    def _model(self, checkpointing: str) -> TimeModel:
        run, model = self.run, model_named(self.run.model, self.run.seq_len)
        config = {
            "distributed_type": "FSDP", "num_processes": run.ranks,
            "fsdp_config": {
                "fsdp_version": run.version, "fsdp_sharding_strategy": run.strategy.upper(),
                "fsdp_mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": run.reduce},
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": f"BACKWARD_{run.prefetch.upper()}",
                "fsdp_activation_checkpointing": {"none": False, "full": True}.get(checkpointing, checkpointing),
            },
        }  # fmt: skip
        spec = hfp.load_spec(config, environ={})
        local = min(run.ranks_per_machine, run.ranks)
        plan = hfp.resolve(spec, model, world_size=run.ranks, device_type="cuda", local_world_size=local)
        workload = Workload(
            micro_batch=run.micro_batch, seq_len=run.seq_len, accumulation=run.accumulation, clip_norm=run.clip_norm,
            sync_each_batch=run.sync_each_batch, update_loop=run.update_loop,
        )  # fmt: skip
        times = TimeModel(plan, model, workload)
        if run.compiled:
            known = {id(each): UnitCosts(fused(each.forward), fused(each.backward)) for each in times.costs.values()}
            times.costs = {name: known[id(each)] for name, each in times.costs.items()}
        return times

    def seconds(self, values: Mapping[str, float]) -> float:
        machine = machine_of(self.run, values)
        return sum(weight * model.estimate(machine).step_seconds for weight, model in self.parts)

    def error(self, values: Mapping[str, float]) -> float:
        """Return the logarithm of predicted over published seconds."""
        return math.log(self.seconds(values) * self.run.throughput / self.run.tokens)


def linear_model(prepared: Sequence[Prepared]) -> Linear:
    """Return the errors of the runs near the best fit to all of them."""
    sources = [each.run.source for each in prepared]

    def errors(values: Mapping[str, float]) -> Array:
        return np.array([each.error(values) for each in prepared])

    linear, everything = None, np.ones(len(sources), dtype=bool)
    for _ in range(3):  # overlap has kinks, so that the derivatives are those at the fit
        linear = linearize(sources, fit(linear, everything) if linear else start(), errors)
    assert linear is not None
    return linear


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "runs": len(rows), "inside": sum(row["inside"] for row in rows),
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "median_signed_error": statistics.median(row["error"] for row in rows),
    }  # fmt: skip


def evaluate(prepared: Sequence[Prepared], linear: Linear) -> dict[str, Any]:
    """Return the result: rows with errors on runs that were not used to fit, and the interval."""
    values = values_of(fit(linear, np.ones(len(prepared), dtype=bool)))
    known = {fold.source: fold for fold in folds(linear, COVERAGE)}
    low, high = interval(held_out(linear), linear.sources, COVERAGE)
    rows = []
    for each, error, slopes in zip(prepared, linear.errors, linear.slopes, strict=True):
        run, fold = each.run, known[each.run.source]
        slowdown = math.exp(each.error(values_of(fold.point)))
        rows.append(
            {
                "source": run.source, "table": run.table, "run": run.name, "device": device_of(run),
                "published": run.throughput,
                "predicted": run.throughput / slowdown, "error": 1 / slowdown - 1,
                "inside": fold.low <= 1 / slowdown <= fold.high, "fitted": run.tokens / each.seconds(values),
                "logarithm": float(error), "slopes": " ".join(f"{slope:.4f}" for slope in slopes),
            }
        )  # fmt: skip
    dense = [row for row in rows if row["source"] not in SPECIAL]
    groups = {
        "dense models": dense,
        "dense models, A100": [row for row in dense if row["device"] == "a100"],
        "dense models, H100 and H200": [row for row in dense if row["device"] == "h100"],
        "dense models, all but llm-foundry": [row for row in dense if row["source"] != "llm-foundry"],
        "first 16 runs": [row for row, each in zip(rows, prepared, strict=True) if was_compared_first(each.run)],
    } | {name: [row for row in rows if row["source"] == name] for name in dict.fromkeys(linear.sources)}
    summaries = {name: summary_of(group) for name, group in groups.items()}
    of_sources = [summaries[name]["median_error"] for name in dict.fromkeys(linear.sources)]
    return {
        "parameters": {n: {"value": values[n], "prior": p.value, "source": p.source} for n, p in PRIORS.items()},
        "point": [float(value) for value in linear.point], "low": low, "high": high, **summary_of(rows),
        "mean_of_sources": statistics.mean(of_sources), "groups": summaries, "rows": rows,
        "not_compared": data()["not_compared"],
    }  # fmt: skip


def was_compared_first(run: Run) -> bool:
    """Whether a run is one of the 16 that were compared before more were found."""
    if run.source == "torchtitan":
        return run.table == "H100 500 W"
    return run.source == "accelerate" or run.model == "llama3-8b-lora" or (run.source == "ibm" and run.compiled)


def main() -> None:
    args = make_parser(__doc__, "published_runs").parse_args()
    prepared = [Prepared(run) for run in runs()]
    write_result("published_runs", args.out, evaluate(prepared, linear_model(prepared)))


if __name__ == "__main__":
    main()
