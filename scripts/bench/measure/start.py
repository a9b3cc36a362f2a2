"""The time from the command to the end of the first training step, and what it is made of.

Each round runs the same Trainer script on two CPU ranks, in turn: with ``hf-fsdp launch`` and FSDP2, and with
``torchrun`` and the stock stack, which trains with DDP there (``accelerate launch`` starts one process on the CPU). The
order changes with each round. The model is tiny, so that the time is that of processes, imports, process groups and
preparation. Rank 0 records when it reaches each point. Times are medians of the rounds, in seconds since the command
was started. The time in which the model is created is left out.

    python -m scripts.bench start    (two minutes; writes docs/results/start.json)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.common import child_environment, make_parser
from scripts.bench.tables.update_results import write_result

SCRIPT = """
import json, os, sys, time
marks = {"script": time.time()}
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
marks["imports"] = time.time()

class Marks(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        marks.setdefault("preparation", time.time())
    def on_step_end(self, *args, **kwargs):
        if "first step" not in marks:
            marks["first step"] = time.time()
            marks["modules"] = sorted(sys.modules)

args = TrainingArguments(
    output_dir=os.environ["START_OUT"], max_steps=2, per_device_train_batch_size=2, report_to="none",
    save_strategy="no", disable_tqdm=True, use_cpu=True,
)
begin = time.time()
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=64, use_cache=False,
))
marks["model"] = time.time() - begin
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(32)]
Trainer(model=model, args=args, train_dataset=rows, callbacks=[Marks()]).train()
if os.environ["RANK"] == "0":
    with open(os.environ["START_MARKS"], "w") as file:
        json.dump(marks, file)
"""
CONFIG = """
distributed_type: FSDP
use_cpu: true
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
HF_FSDP = "import sys; from hf_fsdp_plugin.cli.main import main; sys.exit(main())"
STOCK = "torchrun"
OURS = "hf-fsdp launch"
COMMANDS = {
    OURS: ["-c", HF_FSDP, "launch", "--config_file", "fsdp.yaml"],
    STOCK: ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
POINTS = ("script", "imports", "preparation", "first step")
OPTIONAL = (
    "torch._dynamo", "torch._inductor", "torchvision", "datasets", "sympy", "tensorboard", "trl", "peft", "scipy",
    "pandas", "sklearn", "bitsandbytes", "torchao", "torch.distributed.checkpoint", "torch.distributed.tensor",
)  # fmt: skip
"""Heavy modules that a training step of this model does not need."""


def main() -> int:
    parser = make_parser(__doc__, "start")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in COMMANDS}
    modules: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("train.py", SCRIPT), ("fsdp.yaml", CONFIG)):
            (Path(folder) / name).write_text(text)
        for number in range(args.rounds + 1):  # the first round writes the bytecode files
            for name in sorted(COMMANDS, reverse=number % 2 == 1):
                points, modules[name] = measure(name, Path(folder))
                if number:
                    found[name].append(points)
    medians = {
        name: {point: round(statistics.median(run[point] for run in runs), 2) for point in POINTS}
        for name, runs in found.items()
    }
    result = {
        "rounds": args.rounds,
        "seconds": medians,
        "ratio": round(medians[OURS]["first step"] / medians[STOCK]["first step"], 3),
        "ratios_of_rounds": [
            round(ours["first step"] / stock["first step"], 3)
            for ours, stock in zip(found[OURS], found[STOCK], strict=True)
        ],
        "imported": {name: [module for module in OPTIONAL if module in modules[name]] for name in COMMANDS},
        "only_ours": sorted(
            module for module in modules[OURS] - modules[STOCK] if module.partition(".")[0] != "hf_fsdp_plugin"
        ),
    }
    print(f"first step: {result['ratio']} of stock's time; rounds: {result['ratios_of_rounds']}")
    write_result("start", args.out, result)
    return 0


def measure(name: str, folder: Path) -> tuple[dict[str, float], set[str]]:
    """Run a command, and return point -> seconds since its start without the model's, and the imported modules."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"START_OUT": str(folder / "out"), "START_MARKS": str(folder / "marks.json")}
    environ = child_environment(environ)
    start = time.time()
    command = [sys.executable, *COMMANDS[name], "train.py"]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    marks = json.loads((folder / "marks.json").read_text())
    model = {"preparation": marks["model"], "first step": marks["model"]}
    return {point: marks[point] - start - model.get(point, 0.0) for point in POINTS}, set(marks["modules"])


if __name__ == "__main__":
    raise SystemExit(main())
