"""Compare the closed form with the traced step at random settings. No ranks are needed.

    python -m scripts.bench closed_against_trace --settings 60 --seed 0

Writes docs/results/closed_against_trace.json (three minutes on 2 cores). A setting that a method refuses is counted
with the code of its problem, one that cannot be traced as ``trace``.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.measure.memory_points import Point, make_model, make_spec, make_workload
from scripts.bench.tables.update_results import write_result

_CHOICES: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "llama", "gpt2", "bert", "mixtral", "t5", "whisper", "clip"), "version": (1, 2),
    "strategy": ("full_shard", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard"), "ranks": (2, 4, 8, 64),
    "checkpointing": (False, True), "selective": (False, False, False, True), "precision": ("no", "bf16"),
    "loop": ("for_loop", "foreach", "fused"), "optimizer": ("adamw", "adamw", "sgd", "adafactor", "muon"),
    "batch": (1, 2, 3, 6), "seq": (32, 64, 200), "accumulation": (1, 1, 2, 4), "sync": (False, True),
    "prefetch": ("pre", "post", "none"), "forward_prefetch": (False, False, True), "use_orig": (True, True, False),
    "layers": (2, 4, 7), "hidden": (64, 128, 256), "inter": (192, 512), "vocab": (500, 4096), "lora": (0, 0, 0, 8),
    "wrap": ("layers", "layers", "parts", "none"), "offload_params": (False, False, False, True),
}  # fmt: skip
"""Name of a field of a point -> values, of which each is as likely as it is often there."""
_CAUSAL = ("llama", "gpt2", "mixtral")


def main() -> int:
    parser = make_parser(__doc__, "closed_against_trace")
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    numbers = random.Random(args.seed)
    rows = []
    for _ in range(args.settings):
        rows.append(compared(random_point(numbers), numbers.choice(("cpu", "cuda"))))
        print(rows[-1], flush=True)
    errors = [row["error"] for row in rows if "error" in row]
    result = {
        "command": f"python -m scripts.bench closed_against_trace --settings {args.settings} --seed {args.seed}",
        "median": statistics.median(map(abs, errors)), "worst": max(errors, key=abs), "compared": len(errors),
        "refused": sorted(row["refused"] for row in rows if "refused" in row), "rows": rows,
    }  # fmt: skip
    write_result("closed_against_trace", args.out, result)
    return 0


def random_point(numbers: random.Random) -> Point:
    """Return a random setting, without combinations that have no meaning."""
    values = {name: numbers.choice(choices) for name, choices in _CHOICES.items()}
    if values["strategy"] == "hybrid_shard" and values["ranks"] == 2:
        values["ranks"] = 4
    if values["wrap"] == "none":
        values |= {"checkpointing": False, "selective": False}
    if values["selective"]:
        values["checkpointing"] = False
    if values["family"] not in _CAUSAL:
        values["lora"] = 0
    if values["family"] in ("whisper", "clip") and values["wrap"] == "parts":
        values["wrap"] = "layers"
    return Point(**values)


def compared(point: Point, device: str) -> dict[str, Any]:
    """Return the peaks of both methods; if one is refused, the code of its problem, or ``trace``."""
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
    from scripts.bench.traced_memory import CannotTrace, trace_memory

    start = time.process_time()
    row: dict[str, Any] = {"point": str(point), "device": device}
    try:
        with torch.device("meta"):
            model = make_model(point)
        plan = hfp.resolve(make_spec(point), model, world_size=point.ranks, device_type=device)
        closed = estimate_memory(plan, model, make_workload(point)).peak
        traced = trace_memory(plan, model, make_workload(point)).peak
    except hfp.SpecError as error:
        code = next(problem.code for problem in error.problems if problem.severity == "error")
        return {**row, "refused": code}
    except CannotTrace:
        return {**row, "refused": "trace"}
    error_of_closed = round(closed.bytes / traced.bytes - 1, 5)
    peaks = {"closed_form_bytes": closed.bytes, "traced_bytes": traced.bytes, "at": traced.where}
    return {**row, **peaks, "error": error_of_closed, "cpu_seconds": round(time.process_time() - start, 1)}


if __name__ == "__main__":
    raise SystemExit(main())
