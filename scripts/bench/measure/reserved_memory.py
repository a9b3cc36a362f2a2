"""What torch's allocator reserves for a step on GPUs, by simulation: the ratios that the closed form assumes.

    python -m scripts.bench reserved_memory

Writes docs/results/reserved_memory.json (five minutes on 2 cores). Steps of models with layers and vocabularies of
usual sizes, but fewer layers, are traced, and replayed through the model of the allocator. No GPU is used.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.measure.memory_points import Point, make_model, make_spec, make_workload
from scripts.bench.tables.update_results import write_result

_LAYERS = Point(
    precision="bf16", ranks=8, loop="fused", batch=1, seq=4096, layers=8, hidden=2048, inter=8192, vocab=32000, heads=32
)  # fmt: skip
_VOCABULARY = replace(_LAYERS, vocab=128256, checkpointing=True)
POINTS = (
    _LAYERS,
    replace(_LAYERS, version=1),
    replace(_LAYERS, checkpointing=True),
    replace(_LAYERS, strategy="shard_grad_op", batch=2),
    replace(_LAYERS, accumulation=4),
    replace(_LAYERS, family="gpt2", hidden=1600, vocab=50257, seq=1024, batch=4, heads=25),
    _VOCABULARY,
    replace(_VOCABULARY, version=1),
    replace(_VOCABULARY, precision="no"),
    replace(_VOCABULARY, strategy="hybrid_shard", ranks=16),
    replace(_VOCABULARY, hidden=4096, inter=14336),
)


def main() -> int:
    parser = make_parser(__doc__, "reserved_memory")
    parser.add_argument("--points", type=int, default=len(POINTS), help="only the first ones")
    args = parser.parse_args()
    rows = []
    for point in POINTS[: args.points]:
        rows.append(simulated(point))
        print(rows[-1], flush=True)
    ratios = {
        name: {
            "median": round(statistics.median(row[name] for row in rows), 3),
            "least": min(row[name] for row in rows), "largest": max(row[name] for row in rows),
        } for name in ("reserved", "needed", "expandable")
    }  # fmt: skip
    write_result("reserved_memory", args.out, {"ratios": ratios, "rows": rows})
    return 0


def simulated(point: Point) -> dict[str, Any]:
    """Return the allocated peak of a point in bytes, and the memory of the allocator over it."""
    import torch

    import hf_fsdp_plugin as hfp
    from scripts.bench.traced_memory import trace_memory

    with torch.device("meta"):
        model = make_model(point)
    plan = hfp.resolve(make_spec(point, use_cpu=False), model, world_size=point.ranks, device_type="cuda")
    traced = trace_memory(plan, model, make_workload(point))
    device = traced.device
    assert device is not None, "the plan is for CUDA"
    bytes_of = {"reserved": device.reserved, "needed": device.needed, "expandable": traced.expandable}
    ratios = {name: round(size / device.allocated, 3) for name, size in bytes_of.items()}
    return {"point": str(point), "allocated_bytes": device.allocated, **ratios}


if __name__ == "__main__":
    raise SystemExit(main())
