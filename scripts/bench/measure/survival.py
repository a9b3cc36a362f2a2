"""Kill ranks while they save, fill their disk and flip bytes of their checkpoints, and check that they can resume.

In a trial two gloo ranks train a small Llama with a Trainer that saves every two steps, and are killed (one or both,
with SIGKILL or SIGTERM) at a random moment. New ranks then resume with ``resume_from_checkpoint=True``. The trial fails
and counts as lost if

- the ranks resume from an older step than that of the newest checkpoint that was committed before the kill;
- they resume more than one save interval before the last save that had started, or, for synchronous saves, before the
  last step that was trained;
- a write that was in the background on all ranks was not finished after SIGTERM to all of them;
- `verify` finds a problem, the next loss differs from the uninterrupted run, or files other than checkpoints are left.

A tenth as many trials fill a small tmpfs. The ranks are forked from one process, because imports take seconds.

    python -m scripts.bench survival               (eight minutes on 2 cores; writes docs/results/survival.json)
    python -m scripts.bench survival --trials 1000 --log trials.jsonl     (two hours; continues where it was stopped)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.metrics.run_file import RUN_FILE
from scripts.bench.common import make_llama, make_parser
from scripts.bench.ranks.forked import WORLD_SIZE, RanksFailed, World, preload
from scripts.bench.ranks.survival import INTERVAL, Setting, resume, train
from scripts.bench.tables.update_results import write_result

UNSHARED = "HF_FSDP_SURVIVAL_UNSHARED"
# The phases of a save, in order. phase_of derives the phase from the staging folder.
PHASES = ("between saves", "nothing written", "writing", "one part finished", "all parts finished", "manifest written",
          "renamed")  # fmt: skip
KILLS = (("SIGKILL", "one"), ("SIGKILL", "all"), ("SIGTERM", "one"), ("SIGTERM", "all"))
SETTINGS = [
    Setting(version, kind, asynchronous)
    for version, kind, asynchronous in itertools.product((1, 2), ("SHARDED", "FULL", "LOCAL"), (False, True))
]


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "survival")
    parser.add_argument("--trials", type=int, default=100, help="number of kills; a tenth as many disks are filled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-disk-full", action="store_true", help="for systems on which no tmpfs can be mounted")
    parser.add_argument("--folder", type=Path, help="folder for the runs")
    parser.add_argument("--log", type=Path, help="file of finished trials, which are not repeated")
    return parser.parse_args()


class Lost(RanksFailed):
    """A checkpoint was lost, or the resumed run differs."""


@dataclass(slots=True)
class Trial:
    """The setting, disturbance and result of a trial."""

    setting: Setting
    disturbance: str
    phase: str = ""
    resumed: int = -1
    steps_lost: int = -1
    saves_lost_steps: int = -1
    lost: str = ""
    seconds: float = 0.0


def phase_of(run: Path, step: int) -> str:
    root = run / f".checkpoint-{step}.saving"
    folder = root / f"checkpoint-{step}"
    if not root.exists():
        return "between saves"
    if (run / f"checkpoint-{step}").exists():
        return "renamed"
    if (folder / "fsdp_manifest.json").exists():
        return "manifest written"
    num_parts = len(list((root / "parts").glob("rank*.record")))
    if num_parts:
        return "all parts finished" if num_parts == WORLD_SIZE else "one part finished"
    try:
        return "writing" if any(path.is_file() for path in folder.rglob("*")) else "nothing written"
    except FileNotFoundError:  # the folder was renamed in this moment
        return "renamed"


def wait_for_moment(world: World, run: Path, source: random.Random) -> str:
    """Wait for the moment of the kill: a random time, or the start of one of the late phases, which are short.

    The time is drawn from the duration of the previous save, or from the interval between the previous two saves.
    """
    step = INTERVAL * source.choice((3, 4))
    way = source.choices(("in a save", "in an interval", "in a phase"), weights=(5, 1, 4))[0]
    world.until(lambda: world.time_of("began", step))
    began, before, before_done = (
        world.time_of("began", step), world.time_of("began", step - INTERVAL), world.time_of("done", step - INTERVAL)
    )  # fmt: skip
    assert began is not None and before is not None and before_done is not None
    if way == "in a phase":
        wanted = PHASES.index(source.choice(PHASES[3:]))
        while PHASES.index(phase_of(run, step)) < wanted and world.time_of("done", step) is None:
            world.listen(0)
    else:
        moment = began + source.random() * ((before_done if way == "in a save" else began) - before)
        time.sleep(max(moment - time.monotonic(), 0))
    world.listen(0)
    return phase_of(run, world.last("began"))


def kill_trial(
    model: Any, folder: Path, setting: Setting, kill: tuple[str, str], source: random.Random, losses: list[float]
) -> Trial:
    run, log = folder / "run", folder / "log"
    name, whom = kill
    trial = Trial(setting, f"{name} {whom}")
    limit = source.choice((None, 1, 2))
    with closing(World.fork(train, log, model, run, setting, save_total_limit=limit)) as world:
        trial.phase = wait_for_moment(world, run, source)
        ranks = list(range(WORLD_SIZE)) if whom == "all" else [source.randrange(WORLD_SIZE)]
        in_background = min(world.last("handed over", rank) or 0 for rank in range(WORLD_SIZE))
        done, began, step = (world.last(event) or 0 for event in ("done", "began", "step"))
        world.signal(signal.Signals[name], ranks)
        world.end(patience=25.0 if kill == ("SIGTERM", "all") else 1.0)
    if kill == ("SIGTERM", "all") and setting.asynchronous:
        done = max(done, in_background)
    _resume(trial, model, folder, losses)
    trial.saves_lost_steps, trial.steps_lost = began - trial.resumed, step - trial.resumed
    if trial.resumed < done:
        raise Lost(f"resumed from step {trial.resumed}, but the checkpoint of step {done} was committed")
    if trial.saves_lost_steps > INTERVAL:
        raise Lost(f"resumed from step {trial.resumed}, but the save of step {began} had started")
    if trial.steps_lost > INTERVAL and not setting.asynchronous:
        raise Lost(f"resumed from step {trial.resumed}, but step {step} was trained")
    return trial


def _resume(trial: Trial, model: Any, folder: Path, losses: list[float]) -> None:
    with closing(World.fork(resume, folder / "log", model, folder / "run", trial.setting)) as world:
        world.until(lambda: world.last("verdict") is not None)
        resumed, verdict, (step, loss) = (world.last(event) for event in ("resumed", "verdict", "loss"))
    trial.resumed = resumed
    if verdict["problems"] or verdict["left"]:
        raise Lost(f"after the resume from step {resumed}: {verdict}")
    if step != resumed + 1 or not math.isclose(loss, losses[step], rel_tol=1e-6):
        raise Lost(f"step {step} after the resume has loss {loss}, but {losses[step]} in the uninterrupted run")


def disk_full_trial(
    model: Any, folder: Path, setting: Setting, size: int, source: random.Random, losses: list[float]
) -> Trial:
    """Train on a disk that has space for the first checkpoint but not for the second, until both ranks raise."""
    share = source.uniform(0.02, 0.98)
    trial = Trial(setting, "disk full", f"{share:.0%} of the save on the disk")
    run = folder / "run"
    run.mkdir()
    space = int(size * (1 + share))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={space}", "tmpfs", run], check=True)
    try:
        with closing(World.fork(train, folder / "log", model, run, setting)) as world:
            world.until(lambda: all(world.last("error", rank) is not None for rank in range(WORLD_SIZE)))
            errors = [world.last("error", rank) for rank in range(WORLD_SIZE)]
        for rank, error in enumerate(errors):
            if "No space left on device" not in error or f"checkpoint-{2 * INTERVAL}" not in error:
                raise Lost(f"rank {rank} does not report the full disk, but: {error}")
        left = sorted(path.name for path in run.iterdir() if path.name != RUN_FILE)
        if left != [f"checkpoint-{INTERVAL}"]:
            raise Lost(f"after the error the folder contains {left}")
        _resume(trial, model, folder, losses)
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)
    trial.steps_lost = trial.saves_lost_steps = 2 * INTERVAL - trial.resumed
    return trial


def flip_trial(checkpoint: Path, source: random.Random) -> tuple[int, list[str]]:
    """Flip a byte in each file. Returns the number of files, and the files in which `verify` did not find it."""
    from hf_fsdp_plugin.tools.verify.verification import verify

    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    overlooked = []
    for path in files:
        original = path.read_bytes()
        at, flip = source.randrange(len(original)), source.randrange(1, 256)
        path.write_bytes(original[:at] + bytes([original[at] ^ flip]) + original[at + 1 :])
        problems = verify(checkpoint).problems
        path.write_bytes(original)
        if not any(path.name in str(problem) for problem in problems):
            overlooked.append(f"{path.relative_to(checkpoint)} byte {at} ^ {flip:#x}")
    if problems := verify(checkpoint).problems:
        raise Lost(f"{checkpoint} was not restored: {problems}")
    return len(files), overlooked


def uninterrupted(model: Any, folder: Path, setting: Setting) -> list[float]:
    """Return the losses of a run that is not killed, by step (NaN at 0), for more steps than a killed run reaches."""
    last = 8 * INTERVAL
    with closing(World.fork(train, folder / "log", model, folder / "run", setting)) as world:
        world.until(lambda: (world.last("loss") or [0])[0] >= last and world.last("done"))
        losses = dict(value for _, event, value in world.events[0] if event == "loss")
    return [math.nan, *(losses[step] for step in range(1, last + 1))]


def measure(args: argparse.Namespace) -> int:
    source = random.Random(args.seed)
    preload()
    model = make_llama(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="survival_") as name:
        root = Path(name)
        losses, flips, size = references(model, root, source)
        trials = list(run_trials(args, model, root, losses, size))
    result = summary(args, trials, flips)
    write_result("survival", args.out, result)
    return 1 if result["lost"] or any(found["found"] < found["files"] for found in result["flipped_bytes"]) else 0


def references(
    model: Any, root: Path, source: random.Random
) -> tuple[dict[int, list[float]], list[dict[str, Any]], dict[str, int]]:
    """Return the losses of uninterrupted runs by version, results of flipped bytes, and checkpoint sizes by type."""
    losses, flips, size = {}, [], {}
    for version, kind in ((1, "SHARDED"), (2, "FULL"), (2, "LOCAL")):
        setting = Setting(version, kind, asynchronous=False)
        folder = root / "reference"
        folder.mkdir()
        losses[version] = uninterrupted(model, folder, setting)
        checkpoint = folder / "run" / f"checkpoint-{INTERVAL}"
        size[kind] = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        num_files, overlooked = flip_trial(checkpoint, source)
        flips.append({
            "checkpoint": str(setting), "files": num_files, "found": num_files - len(overlooked),
            "overlooked": overlooked,
        })  # fmt: skip
        print(
            f"{setting}: flipped a byte in each of {num_files} files, found {num_files - len(overlooked)}", flush=True
        )
        shutil.rmtree(folder)
    return losses, flips, size


def run_trials(
    args: argparse.Namespace, model: Any, root: Path, losses: dict[int, list[float]], size: dict[str, int]
) -> Iterator[Trial]:
    """Run the trials: every setting with every kind of kill, equally often, in random order.

    A trial draws its random numbers from the seed and its own number, so that a run can be continued after any trial.
    """
    cases = list(itertools.product(SETTINGS, KILLS))
    random.Random(args.seed).shuffle(cases)
    plan: list[tuple[Setting, tuple[str, str] | None]] = [cases[i % len(cases)] for i in range(args.trials)]
    if not args.no_disk_full:
        plan += [(SETTINGS[i % len(SETTINGS)], None) for i in range(math.ceil(args.trials / 10))]
    finished = read_log(args.log)
    yield from finished[: len(plan)]
    for number, (setting, kill) in enumerate(plan, 1):
        if number <= len(finished):
            continue
        source = random.Random(f"{args.seed} {number}")
        folder = root / f"trial{number}"
        folder.mkdir()
        began = time.monotonic()
        try:
            if kill is not None:
                trial = kill_trial(model, folder, setting, kill, source, losses[setting.version])
            else:
                trial = disk_full_trial(model, folder, setting, size[setting.kind], source, losses[setting.version])
        except RanksFailed as error:
            trial = Trial(setting, " ".join(kill) if kill is not None else "disk full", lost=str(error))
        trial.seconds = round(time.monotonic() - began, 1)
        what = f"LOST: {trial.lost}" if trial.lost else f"resumed from {trial.resumed}, steps lost {trial.steps_lost}"
        print(
            f"[{number:3}/{len(plan)}] {setting!s:28} {trial.disturbance:12} {trial.phase:32} {what} "
            f"({trial.seconds} s)",
            flush=True,
        )
        shutil.rmtree(folder)
        if args.log is not None:
            with args.log.open("a") as log:
                log.write(json.dumps(asdict(trial)) + "\n")
        yield trial


def read_log(path: Path | None) -> list[Trial]:
    if path is None or not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [Trial(**{**row, "setting": Setting(**row["setting"])}) for row in rows]


def summary(args: argparse.Namespace, trials: list[Trial], flips: list[dict[str, Any]]) -> dict[str, Any]:
    kills = [trial for trial in trials if trial.disturbance != "disk full"]
    phases = Counter(trial.phase for trial in kills)
    return {
        "command": f"python -m scripts.bench survival --trials {args.trials} --seed {args.seed}",
        "model": "Llama, 4 layers, hidden 256, fp32, AdamW, 2 gloo ranks",
        "seconds": round(sum(trial.seconds for trial in trials)),
        "steps_between_saves": INTERVAL,
        "kills": len(kills),
        "kills_by_way": dict(sorted(Counter(trial.disturbance for trial in kills).items())),
        "kills_by_setting": dict(sorted(Counter(str(trial.setting) for trial in kills).items())),
        "kills_by_phase": {phase: phases[phase] for phase in PHASES},
        "full_disks": len(trials) - len(kills),
        "lost": [
            f"{trial.setting}, {trial.disturbance}, {trial.phase}: {trial.lost}" for trial in trials if trial.lost
        ],
        "most_steps_lost": {
            name: max((t.steps_lost for t in kills if t.setting.asynchronous == asynchronous), default=None)
            for name, asynchronous in (("synchronous", False), ("asynchronous", True))
        },
        "most_steps_lost_since_the_last_save_began": max((t.saves_lost_steps for t in kills), default=None),
        "flipped_bytes": flips,
    }


def main() -> int:
    args = parse_args()
    if args.no_disk_full or UNSHARED in os.environ:
        return measure(args)
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode != 0:
        raise SystemExit("cannot mount a tmpfs, which is needed to fill a disk. Run as root, or with --no-disk-full.")
    # The mounts of the namespace end with the process.
    command = ["unshare", "-rm", sys.executable, __file__, *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, UNSHARED: "1"}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
