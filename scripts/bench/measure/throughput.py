"""Compare the throughput of this package with stock Accelerate, by ``hf-fsdp bench``.

Two models: one whose layers compute long enough that Python's share of a step is small, as on a real run, and a tiny
one, whose steps are mostly Python, which shows the overhead of this package.

    python -m scripts.bench throughput             (an hour on 2 cores; writes docs/results/throughput.json)
    python -m scripts.bench throughput --quick --out /tmp/throughput.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import ROOT, make_parser
from scripts.bench.tables.update_results import write_result

LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "usual": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip
BATCHES: Final = {"usual": ("4", "192"), "tiny": ("1", "16")}
STEPS: Final = {"usual": "1", "tiny": "20"}


def bench(name: str, folder: Path, *words: str) -> dict[str, Any]:
    """Run ``hf-fsdp bench`` on a model, and return its result."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**LLAMA, **MODELS[name]}))
    batch, length = BATCHES[name]
    command = [
        sys.executable, "-m", "hf_fsdp_plugin.cli.main", "bench", "--cpu", "--json", "--model", str(model),
        "--strategies", "full_shard", "--vs", "stock", "--micro-batch", batch, "--seq-len", length,
        "--steps", STEPS[name], *words,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(f"hf-fsdp bench failed:\n{done.stdout.decode()}")
    tree: dict[str, Any] = json.loads(done.stdout)
    batch_text = f"{batch} × {length} tokens per rank"
    tree["about"] = f"{tree['model']['class']}, {tree['model']['num_params'] / 1e6:.1f} M parameters, {batch_text}"
    return tree


def main() -> None:
    parser = make_parser(__doc__, "throughput")
    parser.add_argument("--blocks", default="60", help="alternating blocks")
    parser.add_argument("--versions", default="1,2")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--quick", action="store_true", help="the tiny model under FSDP2, two blocks")
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.versions, args.models = "2", "2", ["tiny"]
    words = ["--blocks", args.blocks, "--versions", args.versions, "--mixed_precision", args.precision]
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="throughput_") as folder:
        for name in args.models:
            found = bench(name, Path(folder), *words)
            kept = ("about", "workload", "threads", "comparisons")
            cases = [
                {key: case[key] for key in ("case", "system", "step_seconds", "step_quartiles", "peak_bytes")}
                for case in found["cases"]
            ]
            runs[name] = {**{key: found[key] for key in kept}, "cases": cases}
    write_result("throughput", args.out, {"ranks": 2, "precision": args.precision, "runs": runs})


if __name__ == "__main__":
    main()
