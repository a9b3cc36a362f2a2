"""Profile a run, switch each suggested setting on, and compare the promised with the measured gain of a step.

Each case has a setting that is worse than necessary. `hf-fsdp profile` must suggest the better one; then both run
alternately through `hf-fsdp launch` without the profiler, and the gain is the difference of their median steps.

    python -m scripts.bench suggestions              (half an hour on 2 cores; writes docs/results/suggestions.json)
    python -m scripts.bench suggestions --cases sync,data --pairs 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result

CONFIG = """\
distributed_type: FSDP
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that can be improved.

    Attributes:
        setting: the setting that the profile must suggest.
        flags: flags of the launcher, before and after the change.
        arguments: arguments of the script, before and after the change.
        pairs: pairs of runs, of which each gain is the difference. The smaller the gain, the more are needed.
    """

    what: str
    setting: str
    flags: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    arguments: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    pairs: int = 3


CASES = {
    "sync": Case(
        what="gradients are reduced after each of 4 micro-batches",
        setting="training.sync_each_batch",
        arguments=(("--accumulation", "4", "--sync_each_batch"), ("--accumulation", "4")),
    ),
    "reshard": Case(
        what="units are gathered again in backward",
        setting="sharding.strategy",
        arguments=(("--hidden", "768"), ("--hidden", "768")),
        flags=((), ("--set", "sharding.strategy=shard_grad_op")),
    ),
    "checkpointing": Case(
        what="activations are computed again in backward",
        setting="activation.checkpointing",
        flags=(("--set", "activation.checkpointing=full"), ("--set", "activation.checkpointing=none")),
        pairs=9,
    ),
    "data": Case(
        what="the data loader waits 50 ms for each sample",
        setting="training.dataloader_num_workers",
        arguments=(("--seconds_per_sample", "0.05"), ("--seconds_per_sample", "0.05", "--workers", "2")),
    ),
    "batch": Case(
        what="4 micro-batches of 1 sample",
        setting="training.per_device_train_batch_size",
        arguments=(("--accumulation", "4", "--batch", "1"), ("--accumulation", "2", "--batch", "2")),
    ),
}
_PROGRAM = [sys.executable, "-m", "hf_fsdp_plugin.cli.main"]


def main() -> int:
    parser = make_parser(__doc__, "suggestions")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--pairs", type=int, help="pairs of runs (default: those of the case)")
    parser.add_argument("--steps", type=int, default=14, help="steps of a run; the first four are not counted")
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fsdp.yaml").write_text(CONFIG)
        for case in args.cases.split(","):
            rows[case] = _measure(CASES[case], folder / case, folder / "fsdp.yaml", args)
            _show(case, rows[case])
    write_result("suggestions", args.out, {"cases": rows, "ranks": 2})
    return 0 if all(row["promised_seconds"] is not None for row in rows.values()) else 1


def _measure(case: Case, folder: Path, config: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the promised and the measured gain, in seconds of a step."""
    script = [__file__, "--train"]
    profile = [*_PROGRAM, "profile", "--config_file", str(config), "--output", str(folder), "--json", *case.flags[0]]
    done = _run([*profile, *script, *case.arguments[0]])
    found = [each for each in json.loads(done.stdout)["suggestions"] if each["setting"] == case.setting]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(args.pairs or case.pairs):
        for changed in (0, 1) if number % 2 == 0 else (1, 0):
            launch = [*_PROGRAM, "launch", "--config_file", str(config), "--quiet", *case.flags[changed]]
            words = [*script, "--steps", str(args.steps), *case.arguments[changed]]
            out = _run([*launch, *words]).stdout
            steps = next(line for line in out.splitlines() if line.startswith("steps: "))
            times[changed].append(float(steps.removeprefix("steps: ")))
    before, after = (statistics.median(each) for each in times)
    gains = [one - other for one, other in zip(*times, strict=True)]
    promised = found[0]["seconds"] if found else None
    return {
        "what": case.what, "setting": case.setting, "value": found[0]["value"] if found else None,
        "promised_seconds": promised, "measured_seconds": statistics.median(gains), "gains": gains,
        "step_seconds": [before, after],
        "ratio": statistics.median(gains) / promised if promised else None,
    }  # fmt: skip


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done


def _show(name: str, row: dict[str, Any]) -> None:
    promised = f"{row['promised_seconds'] * 1000:.0f} ms" if row["promised_seconds"] is not None else "not suggested"
    before, after = row["step_seconds"]
    text = f"{name}: {row['setting']}: promised {promised}, measured {row['measured_seconds'] * 1000:.0f} ms "
    print(textwrap.fill(f"{text}(a step took {before * 1000:.0f} ms, then {after * 1000:.0f} ms)", 120), flush=True)


def train() -> None:
    """The script that is profiled: an Accelerate loop. Prints the median of the steps of rank 0."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from scripts.bench.common import make_llama

    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--sync_each_batch", action="store_true")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds_per_sample", type=float, default=0.0)
    args = parser.parse_args()

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> Any:
            time.sleep(args.seconds_per_sample)
            return torch.randint(0, 4096, (64,), generator=torch.Generator().manual_seed(index))

    accumulation = GradientAccumulationPlugin(num_steps=args.accumulation, sync_each_batch=args.sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=accumulation)
    model: Any = make_llama(
        vocab_size=4096, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader: Any = torch.utils.data.DataLoader(Samples(), batch_size=args.batch, num_workers=args.workers)
    ends: list[float] = []
    optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if len(ends) >= args.steps:
            break
    steps = [later - earlier for earlier, later in pairwise(ends[3:])]
    accelerator.print(f"steps: {statistics.median(steps)}")


if __name__ == "__main__":
    if "--train" in sys.argv:
        train()
    else:
        sys.exit(main())
