"""Compare predicted step times with measured ones, on real gloo ranks of this machine.

Calibration and measurement alternate: every round calibrates the machine with all ranks at work, predicts all points
with these figures, and then measures them. The result of a point is the median over the rounds of predicted and of
measured time. The points are not used in the calibration.

    python -m scripts.bench step_time        (about ten minutes on 2 cores; writes docs/results/step_time.json)
    python -m scripts.bench step_time --ranks 2 --rounds 1 --only bert --out /tmp/time.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result

_STEPS = 5
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One training step: model, settings and workload."""

    family: str
    hidden: int
    layers: int
    batch: int
    seq: int
    strategy: str = "full_shard"
    version: int = 2
    checkpointing: bool = False
    accumulation: int = 1
    precision: str = "no"

    @property
    def name(self) -> str:
        extras = [f"accumulation {self.accumulation}"] * (self.accumulation > 1)
        extras += ["checkpointing"] * self.checkpointing + [self.precision] * (self.precision != "no")
        sizes = f"{self.family} {self.hidden} x {self.layers}, {self.batch} x {self.seq} tokens"
        return ", ".join([sizes, f"{self.strategy}, FSDP{self.version}", *extras])


POINTS = [
    Point(family="llama", hidden=256, layers=4, batch=2, seq=128),
    Point(family="llama", hidden=512, layers=4, batch=2, seq=256, version=1),
    Point(family="llama", hidden=512, layers=8, batch=4, seq=128, checkpointing=True),
    Point(family="llama", hidden=384, layers=6, batch=2, seq=192, strategy="shard_grad_op"),
    Point(family="llama", hidden=384, layers=6, batch=2, seq=192, strategy="no_shard", version=1),
    Point(family="llama", hidden=512, layers=4, batch=1, seq=256, accumulation=4),
    Point(family="gpt2", hidden=256, layers=6, batch=4, seq=128, version=1, checkpointing=True),
    Point(family="gpt2", hidden=512, layers=4, batch=2, seq=256, strategy="shard_grad_op"),
    Point(family="bert", hidden=256, layers=6, batch=8, seq=64),
    Point(family="bert", hidden=512, layers=4, batch=4, seq=128, version=1, strategy="shard_grad_op"),
    Point(family="llama", hidden=768, layers=2, batch=1, seq=512, precision="bf16"),
    Point(family="gpt2", hidden=384, layers=3, batch=3, seq=160, version=1),
    Point(family="bert", hidden=320, layers=5, batch=2, seq=96, accumulation=2, strategy="no_shard"),
]


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "step_time")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(_CLOCKS), default="wall", help="cpu: without time of other processes")
    parser.add_argument("--only", default="", help="only points whose name contains this")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(point: Point) -> Any:
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads, vocab = point.hidden // 64, 4096
    if point.family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab, hidden_size=point.hidden, intermediate_size=3 * point.hidden,
                num_hidden_layers=point.layers, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False,
            )
        )  # fmt: skip
    if point.family == "gpt2":
        sizes = {"n_embd": point.hidden, "n_layer": point.layers, "n_head": heads, "vocab_size": vocab}
        return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocab, hidden_size=point.hidden, intermediate_size=4 * point.hidden,
            num_hidden_layers=point.layers, num_attention_heads=heads,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def make_spec(point: Point, ranks: int) -> Any:
    import hf_fsdp_plugin as hfp

    config = {
        "distributed_type": "FSDP", "num_processes": ranks, "use_cpu": True, "mixed_precision": point.precision,
        "fsdp_config": {
            "fsdp_version": point.version, "fsdp_sharding_strategy": point.strategy.upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_use_orig_params": True,
            "fsdp_activation_checkpointing": point.checkpointing,
        },
    }  # fmt: skip
    return hfp.load_spec(config, environ={})


def predict(point: Point, ranks: int, machine: Any) -> dict[str, float]:
    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel
    from hf_fsdp_plugin.tools.plan.estimate.types import Workload

    with torch.device("meta"):
        model = make_model(point)
    plan = hfp.resolve(make_spec(point, ranks), model, world_size=ranks, device_type="cpu")
    workload = Workload(
        micro_batch=point.batch, seq_len=point.seq, accumulation=point.accumulation, update_loop="for_loop"
    )
    estimate = TimeModel(plan, model, workload).estimate(machine)
    kept = ("step_seconds", "compute_seconds", "communication_seconds")
    return {key: value for key, value in asdict(estimate).items() if key in kept}


def measure(point: Point, ranks: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the mean step time, without the first two steps."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    import hf_fsdp_plugin as hfp

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = hfp.accelerator(make_spec(point, ranks))
    model = make_model(point)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False))
    ids = torch.randint(0, 4096, (point.batch, point.seq))
    times = []
    for _ in range(_STEPS + 2):
        dist.barrier()
        start = clock()
        for index in range(point.accumulation):
            if index < point.accumulation - 1:
                with accelerator.no_sync(model):
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
            else:
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(clock() - start)
    return statistics.mean(times[2:])


def worker(args: argparse.Namespace) -> None:
    """Run the rounds on one rank; rank 0 writes what was predicted and measured."""
    import torch
    import torch.distributed as dist

    from scripts.bench.calibration import Measuring, calibrate

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    points = [point for point in POINTS if args.only in point.name]
    rounds = []
    for _ in range(args.rounds):
        machine = calibrate(Measuring(device=torch.device("cpu"), clock=_CLOCKS[args.clock]))
        rows = []
        for point in points:
            predicted = predict(point, ranks, machine) if rank == 0 else None
            rows.append({"predicted": predicted, "measured": measure(point, ranks, _CLOCKS[args.clock])})
        rounds.append({"machine": asdict(machine), "rows": rows})
    if rank == 0:
        args.worker.write_text(json.dumps(rounds), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(args: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Return one row per point: medians over the rounds."""
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        out = Path(folder) / "rounds.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), __file__,
            "--rounds", str(args.rounds), "--only", args.only, "--clock", args.clock, "--worker", str(out),
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        subprocess.run(command, check=True, env=environ)
        rounds = json.loads(out.read_text(encoding="utf-8"))
    rows = []
    for index, point in enumerate(point for point in POINTS if args.only in point.name):
        each = [one["rows"][index] for one in rounds]
        measured = statistics.median(row["measured"] for row in each)
        found = {key: statistics.median(row["predicted"][key] for row in each) for key in each[0]["predicted"]}
        error = found["step_seconds"] / measured - 1
        rows.append({"ranks": ranks, "point": point.name, "measured_seconds": measured, **found, "error": error})
    return rows


def main() -> None:
    args = parse_args()
    if args.worker is not None:
        worker(args)
        return
    rows = [row for ranks in args.ranks for row in run_ranks(args, ranks)]
    errors = [abs(row["error"]) for row in rows]
    for row in rows:
        print(f"{row['ranks']} ranks, {row['point']}: {row['measured_seconds']:.3f} s, {row['error']:+.1%}")
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    summary = {"median_error": statistics.median(errors), "worst_error": max(errors), "rounds": args.rounds}
    command = f"python -m scripts.bench step_time --clock {args.clock} --rounds {args.rounds}"
    write_result("step_time", args.out, {**summary, "clock": args.clock, "command": command, "rows": rows})


if __name__ == "__main__":
    main()
