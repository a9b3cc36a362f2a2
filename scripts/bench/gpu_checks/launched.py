"""Checks that start ranks of their own: with ``hf-fsdp launch``, ``bench`` and ``profile``. Only rank 0 starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.common import child_environment
from scripts.bench.gpu_checks.base import (
    TINY,
    Case,
    Size,
    check,
    config,
    device_of,
    expect,
    on_accelerator,
    on_rank_0,
    size_for,
)

_HANG_LIMIT = 8.0
"""Seconds: longer than the first steps of the small model, for which NCCL starts and kernels are compiled."""


@check(seconds=20, limit=120)
def launcher(case: Case) -> Case:
    """Start a Trainer with ``hf-fsdp launch``. It runs in processes of its own; only rank 0 starts it."""
    result = on_rank_0(lambda folder: launch(case, folder))
    expect(result["code"] == 0, f"exit code {result['code']}: {result['text']}")
    found = result["report"]
    expect((found["world_size"], found["device"]) == (case["ranks"], case["device"]), f"report: {found}")
    return found


@check(seconds=25, limit=150)
def spawned_child(case: Case) -> Case:
    """Let each rank of a Trainer start a process that calls ``install()``: it waits for nobody and uses no device."""
    result = on_rank_0(lambda folder: launch(case, folder, "child"))
    expect(result["code"] == 0, f"exit code {result['code']}: {result['text']}")
    return {"text": "children of all ranks have no process group and no device context", **result["report"]}


@check(seconds=35, limit=150)
def restart(case: Case) -> Case:
    """Kill a rank of a launched Trainer. The launcher frees the devices and resumes from the last checkpoint."""
    result = on_rank_0(lambda folder: launch(case, folder, "kill", "--max_restarts", "1"))
    expect(result["code"] == 0, f"exit code {result['code']}: {result['text']}")
    restarts = result["restarts"]
    expect((restarts["count"], restarts["lost_steps"]) == (1, 1), f"restarts: {restarts}")
    return {"restarts": restarts["count"], "lost_steps": restarts["lost_steps"]}


@check(seconds=40, limit=150, min_ranks=2)
def resume_on_one_rank(case: Case) -> Case:
    """Save with a launched Trainer, and resume on one rank with ``hf-fsdp launch``."""

    def run(folder: Path) -> list[Case]:
        return [launch(case, folder, "stop"), launch({**case, "ranks": 1, "strategy": "full_shard"}, folder, "resume")]

    saved, resumed = on_rank_0(run)
    for result in (saved, resumed):
        expect(result["code"] == 0, f"exit code {result['code']}: {result['text']}")
    worlds = [result["report"]["world_size"] for result in (saved, resumed)]
    expect(worlds == [case["ranks"], 1], f"ranks: {worlds}")
    expect("resumed at step 3" in resumed["text"], resumed["text"])
    return {"text": f"saved on {worlds[0]} ranks, resumed on one", "worlds": worlds}


@check(seconds=40, limit=150, min_ranks=2)
def hangs(case: Case) -> Case:
    """Let a rank sleep in a launched Trainer: the launcher names it, its place and the unit, and frees the devices.

    Each rank on an accelerator writes torch's flight record before it exits. It contains collectives if NCCL ran them.
    """

    def run(folder: Path) -> tuple[Case, dict[str, int]]:
        done = launch(case, folder, "hang", "--hang_timeout", f"{_HANG_LIMIT:g}")
        return done, {path.stem.rpartition("_")[2]: _collectives(path) for path in folder.glob("fsdp_nccl_*.json")}

    done, recorded = on_rank_0(run)
    last = case["ranks"] - 1
    expect(done["code"] == 75, f"exit code {done['code']}: {done['text']}")
    found = re.search(rf"rank {last} is late: .* waited for (\d+) s in (.*?\))", done["text"])
    expect(found is not None and "time.sleep" in done["text"] and "FSDP-E728" in done["text"], done["text"])
    assert found is not None
    ranks = {str(rank) for rank in range(case["ranks"])} if on_accelerator(case) else set()
    expect(set(recorded) == ranks, f"flight records of ranks {sorted(recorded)} instead of {sorted(ranks)}")
    has_nccl = on_accelerator(case) and case["backend"] != "gloo"
    expect(not has_nccl or all(recorded.values()), f"collectives in the flight records by rank: {recorded}")
    return {"waited_s": int(found[1]), "collective": found[2], "flight_record_collectives": recorded}


def _collectives(flight_record: Path) -> int:
    return len(json.loads(flight_record.read_text()).get("entries", []))


def launch(case: Case, folder: Path, fault: str = "", *flags: str) -> Case:
    """Run a Trainer on the ranks of a case, and return its exit code, output and a part of its report.

    Args:
        fault: ``kill`` or ``hang``: what happens to the last rank in the first attempt; empty for nothing.
        flags: of the launcher.
    """
    done = run_verb(case, folder, "launch", flags, [fault] * bool(fault))
    report = folder / "out" / "fsdp_report.json"
    found = json.loads(report.read_text()) if report.exists() else {}
    kept = {key: found.get(key) for key in ("world_size", "device", "backend")}
    text, restarts = (done.stdout + done.stderr)[-4000:], found.get("restarts")
    return {"code": done.returncode, "text": text, "report": kept, "restarts": restarts}


@check(seconds=35, limit=150)
def bench(case: Case) -> Case:
    """Measure DDP and a sharded case with ``hf-fsdp bench``, in processes: times, and peaks of accelerators."""
    code, tree, text = on_rank_0(lambda folder: run_bench(case, folder))
    expect(code == 0 and tree["ok"], f"exit code {code}: {text}")
    source = device_of(case).peak_source if on_accelerator(case) else None
    for row in tree["cases"]:
        has_peak = bool(row["peak_bytes"]) == on_accelerator(case) and row["peak_source"] == source
        expect(row["step_seconds"] > 0 and has_peak, f"{row}")
    ddp, sharded = tree["cases"]
    expect(abs(sharded["loss"] / ddp["loss"] - 1) < 1e-2, f"losses {ddp['loss']} and {sharded['loss']}")
    names = ("case", "step_seconds", "peak_bytes")
    return {"cases": [{name: row[name] for name in names} for row in tree["cases"]]}


def run_bench(case: Case, folder: Path) -> tuple[int, Case, str]:
    """Run ``hf-fsdp bench`` on the ranks of a case, and return its exit code, its result and its last messages."""
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY.config}
    (folder / "config.json").write_text(json.dumps(model))
    command = [
        sys.executable, "-m", "hf_fsdp_plugin.cli.main", "bench", "--json", "--model", str(folder), "--blocks", "1",
        "--world-sizes", str(case["ranks"]), "--strategies", "ddp,full_shard", "--versions", str(case["version"]),
        "--seq-len", "64", "--steps", "3", *(["--cpu"] if case["device"] == "cpu" else []),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr[-600:]


def run_profile(case: Case, folder: Path, size: Size = TINY) -> Case:
    """Run ``hf-fsdp profile`` on the ranks of a case, and return its result, or its last messages after a failure."""
    flags = ["--json", "--output", f"{folder}/profile", "--warmup", "1", "--active", "2", "--after", "1"]
    done = run_verb(case, folder, "profile", flags, size=size)
    tree: Case = json.loads(done.stdout) if done.returncode == 0 else {"failed": (done.stdout + done.stderr)[-600:]}
    return tree


def run_verb(
    case: Case, folder: Path, verb: str, flags: Sequence[str], more: Sequence[str] = (), size: Size = TINY
) -> subprocess.CompletedProcess[str]:
    """Run the Trainer's script with a verb that starts ranks."""
    (folder / "config.json").write_text(json.dumps(config(case)))
    command = [
        sys.executable, "-m", "hf_fsdp_plugin.cli.main", verb, "--config_file", str(folder / "config.json"), *flags,
        str(Path(__file__).parent / "trainer.py"), str(folder / "out"), case["precision"],
        size.name, *more,
    ]  # fmt: skip
    # In the folder, where the launcher writes what it knows of a hang.
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def environment() -> dict[str, str]:
    """Return the variables of this rank for a program that starts ranks of its own."""
    set_by_launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC", "ACCELERATE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(set_by_launchers)}
    return child_environment(environ)


@check(seconds=30, limit=150)
def profiler(case: Case) -> Case:
    """Profile a launched Trainer: the phases add up to the step, and the kernels of collectives are recognized."""
    found = on_rank_0(lambda folder: run_profile(case, folder))
    expect("failed" not in found, f"profile: {found.get('failed')}")
    wall, total = found["overhead"]["profiled_seconds"], found["total"]
    # A device may be a step behind the CPU, whose clock measures the step.
    expect(
        abs(total["seconds"] / wall - 1) < (0.03 if case["device"] == "cpu" else 0.1),
        f"phases: {total['seconds']} s of {wall} s",
    )
    expect(total["compute_seconds"] > 0, f"computation: {total}")
    calls = {kind: sums["calls"] for kind, sums in found["collectives"].items()}
    expect(case["ranks"] == 1 or {"all_gather", "reduce_scatter"} <= set(calls), f"collectives: {calls}")
    return {"step_seconds": wall, "exposed_seconds": total["exposed_seconds"], "calls": calls}


@check(seconds=60, limit=200, min_ranks=2)
def overlap(case: Case) -> Case:
    """Profile a larger model: the share of communication during which the device computes."""
    size = size_for(case, 24, largest="0.4 B")
    found = on_rank_0(lambda folder: run_profile(case, folder, size))
    expect("failed" not in found, f"profile: {found.get('failed')}")
    communication, exposed = (found["total"][f"{name}_seconds"] for name in ("communication", "exposed"))
    expect(communication > 0, f"no communication: {found['total']}")
    share = round(1 - exposed / communication, 3)
    expect(share > 0.3 or size is TINY, f"only {share:.0%} of the communication is overlapped: {found['total']}")
    return {
        "text": f"{size.name}: {share:.0%} of {communication:.4f} s of communication in a step is overlapped",
        "overlapped_share": share,
        "communication_seconds": communication,
        "exposed_seconds": exposed,
    }
