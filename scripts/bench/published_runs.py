"""Predict runs whose throughput others published, from the table of machines, and write the error of each.

Nothing is fitted to these runs. Settings that a source does not state are assumptions, which the notes name.

    python scripts/bench/published_runs.py        (seconds; writes docs/results/published_runs.json)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from common import make_parser
from update_results import write_result

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.estimate.machine_file import machine_named
from hf_fsdp_plugin.estimate.machines import Link, Machine
from hf_fsdp_plugin.estimate.time import estimate_time
from hf_fsdp_plugin.estimate.workload import Workload

_TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_IBM = "https://github.com/foundation-model-stack/fms-fsdp#training-throughput-benchmarks"
_ACCELERATE = "https://github.com/huggingface/accelerate/pull/4022"
_AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx"


def llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int = 32000) -> Callable[[], Any]:
    def make() -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    return make


def qwen3_moe() -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def lora_8b() -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(LLAMA3_8B(), LoraConfig(r=16, lora_alpha=32, target_modules=targets))


LLAMA3_8B = llama(4096, 14336, 32, 32, 8, 128256)


def grand_teton() -> Machine:
    """torchtitan's machine: H100 with 96 GB HBM2e at 2.4 TB/s, limited to 500 W, and 400 Gb/s RDMA per GPU."""
    return replace(machine_named("h100-sxm:roce-400"), memory_bandwidth=2.4e12, device="NVIDIA H100 96 GB, 500 W")


def with_network(name: str, gbits_per_machine: float) -> Machine:
    machine = machine_named(name)
    return replace(machine, inter=Link(bandwidth=gbits_per_machine / 8 / 8 * 1e9, latency=30e-6))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: tokens/s per GPU, and its settings."""

    name: str
    source: str
    published: float
    model: Callable[[], Any]
    machine: Callable[[], Machine]
    ranks: int
    batch: int
    seq: int
    strategy: str = "full_shard"
    version: int = 2
    checkpointing: str | bool = False
    compiled: bool = False
    accumulation: int = 1
    clip: bool = True
    reduce: str = "fp32"
    note: str = ""


def _ibm(size: str, model: Callable[[], Any], a100: float, h100: float, *, hybrid: bool = False) -> list[Run]:
    common: dict[str, Any] = {
        "source": _IBM, "model": model, "batch": 2, "seq": 4096, "version": 1, "compiled": True,
        "reduce": "bf16",
        "strategy": "hybrid_shard" if hybrid else "full_shard", "checkpointing": False if hybrid else "selective",
        "note": "" if hybrid else "the selection of recomputed blocks is theirs; the estimate has the plugin's",
    }  # fmt: skip
    return [
        Run(name=f"fms-fsdp Llama 2 {size}, 128 A100", published=a100, ranks=128,
            machine=lambda: with_network("a100-80gb", 400), **common),
        Run(name=f"fms-fsdp Llama 2 {size}, 96 H100", published=h100, ranks=96,
            machine=lambda: with_network("h100-sxm", 800), **common),
    ]  # fmt: skip


def _titan(ranks: int, published: float, *, compiled: bool) -> Run:
    how = ", compiled" if compiled else ""
    return Run(
        name=f"torchtitan Llama 3.1 8B, {ranks} H100{how}", source=_TORCHTITAN, published=published, model=LLAMA3_8B,
        machine=grand_teton, ranks=ranks, batch=2, seq=8192, checkpointing="selective", compiled=compiled,
        note="power limit of 500 W, below the 700 W of the peak in the table",
    )  # fmt: skip


def _qwen(how: str, published_ms: float, *, compiled: bool) -> Run:
    return Run(
        name=f"{how} Qwen3-30B-A3B, 16 H100", source=_ACCELERATE, published=16384 / published_ms * 1000,
        model=qwen3_moe, machine=lambda: machine_named("h100-sxm"), ranks=16, batch=1, seq=16384, checkpointing=True,
        compiled=compiled, note="one sample per rank, which reproduces the published MFU; network not stated",
    )  # fmt: skip


RUNS = [
    _titan(8, 5762, compiled=False),
    _titan(8, 6667, compiled=True),
    _titan(128, 5605, compiled=False),
    _titan(128, 6514, compiled=True),
    *_ibm("7B", llama(4096, 11008, 32, 32, 32), 4550, 9600, hybrid=True),
    *_ibm("13B", llama(5120, 13824, 40, 40, 40), 2150, 4850),
    *_ibm("34B", llama(8192, 22016, 48, 64, 8), 820, 1830),
    *_ibm("70B", llama(8192, 28672, 80, 64, 8), 410, 890),
    _qwen("Accelerate", 4160, compiled=False),
    _qwen("fully_shard", 3888, compiled=False),
    _qwen("fully_shard, compiled,", 3031, compiled=True),
    Run(
        name="NeMo Automodel Llama 3 8B LoRA, 1 H100", source=_AUTOMODEL, published=12472.87, model=lora_8b,
        machine=lambda: machine_named("h100-sxm"), ranks=1, batch=2, seq=4096, accumulation=16, compiled=True,
        clip=False, note="Transformer Engine and Triton kernels, predicted as compiled",
    ),
]  # fmt: skip
NOT_COMPARED = {
    "torchtitan Llama 3.1 70B on 256 H100 (597 tokens/s per GPU in bf16)": "tensor parallelism of 8",
    "NeMo Automodel Llama 3 70B on 64 H100 (867)": "context parallelism of 2",
    "NeMo Automodel Qwen3 30B on 8 H100 (12,040)": "expert parallelism of 8",
}


def predict(run: Run) -> dict[str, Any]:
    model, machine = run.model(), run.machine()
    config = {
        "distributed_type": "FSDP", "num_processes": run.ranks,
        "fsdp_config": {
            "fsdp_version": run.version, "fsdp_sharding_strategy": run.strategy.upper(),
            "fsdp_mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": run.reduce},
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": run.checkpointing,
        },
    }  # fmt: skip
    spec = hfp.load_spec(config, environ={})
    local = min(8, run.ranks)
    plan = hfp.resolve(spec, model, world_size=run.ranks, device_type="cuda", local_world_size=local)
    workload = Workload(
        micro_batch=run.batch, seq_len=run.seq, accumulation=run.accumulation, clip_norm=run.clip, update_loop="fused"
    )
    estimate = estimate_time(plan, model, workload, machine, compiled=run.compiled)
    tokens = run.batch * run.seq * run.accumulation
    predicted = tokens / estimate.step_seconds
    return {
        "run": run.name, "source": run.source, "machine": machine.device, "published": run.published,
        "predicted": predicted, "low": tokens / estimate.high_seconds, "high": tokens / estimate.low_seconds,
        "error": predicted / run.published - 1, "mfu": estimate.mfu, "exposed_seconds": estimate.exposed_seconds,
        "settings": f"{run.ranks} ranks, FSDP{run.version} {run.strategy}, {run.batch} x {run.seq} tokens, "
        f"checkpointing {run.checkpointing}, gradients in {run.reduce}", "note": run.note,
    }  # fmt: skip


def main() -> None:
    args = make_parser(__doc__, "published_runs").parse_args()
    rows = [predict(run) for run in RUNS]
    median = statistics.median(abs(row["error"]) for row in rows)
    write_result("published_runs", args.out, {"median_error": median, "rows": rows, "not_compared": NOT_COMPARED})


if __name__ == "__main__":
    main()
