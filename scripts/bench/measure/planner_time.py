"""The CPU time of ``hf-fsdp plan --advise`` and of the closed form, after imports, for models of several sizes.

python -m scripts.bench planner_time    (half a minute; writes docs/results/planner_time.json)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.planner import advise
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result

_LLAMA = hf.LlamaForCausalLM, hf.LlamaConfig
MODELS: dict[str, tuple[Any, Any, dict[str, int], int]] = {
    "Llama 8 B, 8 GPUs": (
        *_LLAMA,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}, 1,
    ),
    "Llama 70 B, 64 GPUs": (
        *_LLAMA,
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "vocab_size": 128256}, 8,
    ),
    "Mixtral 47 B, 32 GPUs": (hf.MixtralForCausalLM, hf.MixtralConfig, {}, 4),
}  # fmt: skip
"""Name -> class, class of the config, its sizes, machines of 8 GPUs."""


def main() -> int:
    parser = make_parser(__doc__, "planner_time")
    args = parser.parse_args()
    rows = []
    for name, (cls, config, sizes, machines) in MODELS.items():
        with torch.device("meta"):
            model = cls(config(**sizes)).to(torch.bfloat16)
        for version in (1, 2):
            for machine in (None, "h100-sxm"):
                rows.append({"model": name, "version": version, **_advise(model, version, machines, machine)})
                print(rows[-1], flush=True)
    write_result("planner_time", args.out, {"machine_of_times": "h100-sxm", "seq_len": 4096, "rows": rows})
    return 0


def _advise(model: torch.nn.Module, version: Any, machines: int, machine: str | None) -> dict[str, Any]:
    def run() -> Any:
        return advise(
            model, Workload(micro_batch=1, seq_len=4096), global_batch=32 * machines, gpu_memory=80 * 10**9,
            num_machines=machines, version=version, machine=machine_named(machine) if machine is not None else None,
        )  # fmt: skip

    seconds, advice = _cpu_seconds(run)
    best = advice.best
    return {
        "times": machine is not None, "cpu_seconds": round(seconds, 2), "rows": len(advice.rows),
        "fit": len(advice.fitting), "best": best.choice.strategy if best else None,
    }  # fmt: skip


def _cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


if __name__ == "__main__":
    raise SystemExit(main())
