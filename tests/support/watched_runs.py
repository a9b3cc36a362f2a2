"""Made-up folders of runs for ``hf-fsdp watch``."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

KINDS = {"params": 2.0, "grads": 2.0, "optimizer": 4.0, "activations": 7.5, "gathered": 0.4, "other": 0.1}


def line(event: str, **fields: Any) -> str:
    """Return a line of the file of events, of this moment."""
    return json.dumps({"time": time.time(), "event": event, **fields}) + "\n"


def start(attempt: int = 0) -> str:
    facts = {"machines": ["node1", "node2"], "backend": "fsdp2", "device": "cuda", "version": 1}
    return line("start", attempt=attempt, world_size=16, max_steps=1000, **facts)


def log(step: int, **figures: Any) -> str:
    """Return a logged step with a loss that falls, and all figures of the format."""
    loss = 1.8 + 9 * math.exp(-step / 80) + 0.05 * math.sin(step)
    values = {
        "epoch": step / 400, "loss": loss, "grad_norm": 0.5 + 40 / (step + 10),
        "learning_rate": 1e-4 * (1 - step / 1000),
        "tokens_per_second": 181_000 + 900 * math.sin(step / 9), "tokens_per_second_per_rank": 11_312.5, "mfu": 0.412,
        "memory_peak_gib": 61.25, "memory_reserved_gib": 66.5, "memory_share": 0.79, "communication_exposed": 0.034,
        "data_wait": 0.002, "steps_left": 1000 - step, "seconds_left": 7.2 * (1000 - step), "slowest_rank": 3,
        "slowest_rank_by": 0.04, **{f"memory_{kind}_gib": size for kind, size in KINDS.items()},
    }  # fmt: skip
    return line("log", step=step, **{**values, **figures})


def restarted_run(folder: Path) -> Path:
    """Write the events of a run that a killed rank has stopped after step 280, and that continues from step 250."""
    lines = [start(), *(log(step) for step in range(10, 290, 10))]
    lines += [line("save", step=250, checkpoint="checkpoint-250", seconds=4.2, stall_seconds=0.31, asynchronous=True)]
    lines += [line("straggler", step=270, rank=3, machine="node1", phase="data", slower_by=0.35, text="rank 3 is slow")]
    lines += [line("end", step=280, result="failed: rank 5: killed by SIGKILL"), start(attempt=1)]
    lines += [log(step) for step in range(260, 430, 10)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fsdp_run.jsonl").write_text("".join(lines))
    return folder


def write_report(folder: Path) -> None:
    """Write a report in which one setting differs."""
    rows = [
        {"setting": "fsdp.version", "status": "applied"},
        {"setting": "launch.machine_rank", "status": "unobservable"},
    ]
    rows += [{"setting": "prefetch.backward", "status": "differs", "asked": "post", "observed": "pre"}]
    report = {"model_class": "LlamaForCausalLM", "num_params": 8_030_000_000, "units": [{}] * 34, "settings": rows}
    report |= {"restarts": {"count": 1, "lost_steps": 30}, "problems": [{"severity": "warning", "code": "FSDP-W519"}]}
    (folder / "fsdp_report.json").write_text(json.dumps(report))
