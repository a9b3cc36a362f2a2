"""Kill a random rank at a random moment, ten times, and compare the losses with those of an uninterrupted run.

``hf-fsdp launch --max_restarts``, or torchrun, starts two gloo ranks, which train a small Llama with an unmodified
Trainer script, or with a loop of Accelerate, that saves every few steps. In each attempt one rank is killed with
SIGKILL: during the imports, at a random moment of the training, or while a checkpoint is written. The run must end with
exit code 0, and every loss, also of steps that were trained again, must equal that of the run that is not killed.

    python -m scripts.bench restarts           (20 minutes on 2 cores; writes docs/results/restarts.json)
    python -m scripts.bench restarts --launcher torchrun       (keeps the other rows of the file)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.text import format_table
from scripts.bench.common import RANKS, child_environment, make_parser
from scripts.bench.tables.update_results import write_result

STEPS, SAVE_STEPS = 60, 5
MOMENTS = ("imports", "training", "saving")
HANG_S = 900.0
LAUNCHERS = {
    "hf-fsdp": ["hf_fsdp_plugin.cli.main", "launch"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
"""Name -> module and first arguments."""
CONFIG = """\
distributed_type: FSDP
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "restarts")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=("trainer", "loop"), default=["trainer", "loop"])
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def start(folder: Path, launcher: str, version: int, way: str, max_restarts: int) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "fsdp.yaml").write_text(CONFIG.format(version=version))
    words = ["--max_restarts", str(max_restarts), *(["-m", "hf_fsdp_plugin"] if launcher == "torchrun" else [])]
    words += ["--config_file", str(folder / "fsdp.yaml"), "--report", str(folder / "fsdp_report.json")]
    script = [str(RANKS / "restarts.py"), str(folder), str(STEPS), str(SAVE_STEPS), way]
    environ = child_environment()
    # Otherwise the ranks of an attempt may find the addresses of those before in the store, and torchrun fails.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", *LAUNCHERS[launcher], *words, *script]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environ)


def read_losses(folder: Path) -> list[tuple[int, float, int, float]]:
    """Return step, loss, attempt and time of each log of rank 0."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(loss), int(attempt), float(at)) for step, loss, attempt, at in map(str.split, lines)]


def until(process: subprocess.Popen[bytes], folder: Path, what: Callable[[], Any]) -> bool:
    """Wait for something, and return whether it happened before the launcher exited."""
    deadline = time.monotonic() + HANG_S
    while process.poll() is None:
        if what():
            return True
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the run hangs:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.002)
    return False


def kill_one(process: subprocess.Popen[bytes], folder: Path, attempt: int, source: random.Random) -> dict[str, Any]:
    """Kill a random rank of one attempt at a random moment. Returns what was killed when."""
    pids = [folder / f"pid_{attempt}_{rank}" for rank in (0, 1)]
    rank, moment = source.randrange(2), source.choices(MOMENTS, weights=(2, 5, 3))[0]
    until(process, folder, lambda: all(path.exists() and path.read_text() for path in pids))
    before = max((step for step, *_ in read_losses(folder)), default=0)
    if moment == "imports":
        time.sleep(source.random() * 5)
    else:
        # A tenth of the steps in each attempt on average, so that there is something left to kill.
        target = min(before + source.randint(1, 2 * STEPS // 12), STEPS - 1)
        until(process, folder, lambda: any(step >= target and a == attempt for step, _, a, _ in read_losses(folder)))
    if moment == "training":
        time.sleep(source.random() * 0.1)
    elif moment == "saving":
        until(process, folder, lambda: list((folder / "out").glob(".*.saving")))
        time.sleep(source.random() * 0.02)
    with suppress(ProcessLookupError):
        os.kill(int(pids[rank].read_text()), signal.SIGKILL)
    return {"rank": rank, "moment": moment, "step": max((step for step, *_ in read_losses(folder)), default=0)}


def measure(launcher: str, version: int, way: str, kills: int, seed: int, root: Path) -> dict[str, Any]:
    """Return the result of a run that is killed, compared with one that is not.

    Args:
        way: ``trainer`` or ``loop``.
    """
    whole = root / f"whole_{launcher}_{way}_{version}"
    began = time.monotonic()
    start(whole, launcher, version, way, 0).wait(HANG_S)
    seconds = {"uninterrupted": round(time.monotonic() - began, 1)}
    expected = {step: loss for step, loss, *_ in read_losses(whole)}
    assert len(expected) == STEPS, (whole / "log").read_text()[-3000:]
    folder, source = root / f"killed_{launcher}_{way}_{version}", random.Random(f"{seed} {version}")
    began = time.monotonic()
    process = start(folder, launcher, version, way, kills)
    killed = []
    for attempt in range(kills):
        killed.append(kill_one(process, folder, attempt, source))
        print(f"{launcher}, FSDP{version}, {way}: killed {killed[-1]}", flush=True)
        if not until(process, folder, lambda attempt=attempt: (folder / f"pid_{attempt + 1}_0").exists()):
            break
    code = process.wait(HANG_S)
    seconds["killed"] = round(time.monotonic() - began, 1)
    found = read_losses(folder)
    differences = [abs(loss - expected[step]) / abs(expected[step]) for step, loss, *_ in found]
    reported = json.loads((folder / "fsdp_report.json").read_text())["restarts"] if code == 0 else {}
    return {
        "launcher": launcher,
        "date": date.today().isoformat(),
        "version": version,
        "way": way,
        "exit_code": code,
        "kills": killed,
        "restarts": reported.get("count"),
        "lost_steps": reported.get("lost_steps"),
        "losses": len(found),
        "steps": len({step for step, *_ in found}),
        "bitwise_equal": sum(difference == 0 for difference in differences),
        "largest_relative_difference": max(differences, default=None),
        "seconds": seconds,
        "log": "" if code == 0 else (folder / "log").read_text()[-3000:],
    }


def table(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row per run; the first row is the head. The last column has the seconds of the run without kills."""
    head = [
        "launcher",
        "FSDP",
        "script",
        "exit code",
        "kills",
        "restarts",
        "lost steps",
        "equal losses",
        "seconds",
        "without kills",
    ]
    rows = [
        [
            run["launcher"], str(run["version"]), run["way"], str(run["exit_code"]), str(len(run["kills"])),
            str(run["restarts"]), str(run["lost_steps"]), f"{run['bitwise_equal']} of {run['losses']}",
            f"{run['seconds']['killed']:.0f}", f"{run['seconds']['uninterrupted']:.0f}",
        ]
        for run in runs
    ]  # fmt: skip
    return [head, *rows]


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="restarts_") as name:
        runs = [
            measure(launcher, version, way, args.kills, args.seed, Path(name))
            for launcher in args.launcher
            for way in args.ways
            for version in args.versions
        ]
    before = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    words = f"--kills {args.kills} --seed {args.seed} --launcher {' '.join(args.launcher)}"
    kept = [run for run in before if run["launcher"] not in args.launcher]
    result = {
        "command": f"python -m scripts.bench restarts {words}",
        "model": "Llama, 4 layers, hidden 128, fp32, AdamW, 2 gloo ranks",
        "steps": STEPS,
        "steps_between_saves": SAVE_STEPS,
        "runs": sorted([*runs, *kept], key=lambda run: list(LAUNCHERS).index(run["launcher"])),
    }
    write_result("restarts", args.out, result)
    print(format_table(table(runs), right=range(3, 10)))
    for run in runs:
        print(
            f"{run['launcher']}, FSDP{run['version']}, {run['way']} failed:\n{run['log']}" if run["log"] else "", end=""
        )
    return 0 if all(run["exit_code"] == 0 and run["largest_relative_difference"] <= 1e-6 for run in runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
