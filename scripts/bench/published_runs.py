"""Predict runs whose throughput others published, and write the error of each. The runs are in published_runs.yaml.

    python scripts/bench/published_runs.py        (minutes; writes docs/results/published_runs.json)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from common import make_parser
from update_results import write_result

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.estimate.machine_file import machine_named
from hf_fsdp_plugin.estimate.machines import Link, Machine
from hf_fsdp_plugin.estimate.time import TimeModel
from hf_fsdp_plugin.estimate.workload import Workload

DATA = Path(__file__).with_suffix(".yaml")


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


def machine_of(run: Run) -> Machine:
    named = run.network if isinstance(run.network, str) else None
    machine = machine_named(f"{run.machine}:{named}" if named else run.machine)
    if isinstance(run.network, (int, float)):
        bandwidth = run.network / 8 / run.ranks_per_machine * 1e9
        machine = replace(machine, inter=Link(bandwidth=bandwidth, latency=machine.inter.latency))
    if run.flash == 1:  # FlashAttention-2 is "around 2 times" as fast (arXiv 2307.08691)
        machine = replace(machine, attention=machine.attention / 2)
    return replace(machine, ranks_per_machine=run.ranks_per_machine)


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
        return TimeModel(plan, model, workload, compiled=run.compiled)

    def estimates(self, machine: Machine) -> list[tuple[float, Any]]:
        return [(weight, model.estimate(machine)) for weight, model in self.parts]


def predict(run: Run) -> dict[str, Any]:
    machine = machine_of(run)
    estimates = Prepared(run).estimates(machine)

    def mean(name: str) -> float:
        return sum(weight * getattr(estimate, name) for weight, estimate in estimates)

    predicted = run.tokens / mean("step_seconds")
    return {
        "source": run.source, "table": run.table, "run": run.name, "published": run.throughput, "predicted": predicted,
        "low": 0, "high": 0,
        "error": predicted / run.throughput - 1, "mfu": mean("mfu"), "exposed_seconds": mean("exposed_seconds"),
        "step_seconds": mean("step_seconds"),
    }  # fmt: skip
