"""Count what becomes of checkpoints in a storage whose requests fail, while the process that saves them is killed.

A process saves to a store of S3 on the loopback as two ranks do (tests/programs/checkpoint/storage_writer.py), and is
killed at a random moment in four of five trials. In each trial, one kind of fault happens to a part of the requests.
After each trial, every checkpoint that was complete has to exist, and every checkpoint that exists is fetched and
compared with its hashes. The trials of a piece share a storage.

    python -m scripts.bench storage_faults                            (an hour; writes docs/results/storage_faults.json)
    python -m scripts.bench storage_faults --first 50 --trials 50     (a piece of it: adds to the file)
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest
from hf_fsdp_plugin.checkpoint.storage import Storage
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.verify.verification import hash_problems
from scripts.bench.common import make_parser
from scripts.bench.tables.update_results import write_result
from tests.support.object_store import BUCKET, Faults, object_store

KINDS = ("none", "throttled", "failed", "slow", "refused", "lost")
"""Faults of ``tests.support.object_store``."""
RESULTS = ("trials", "faults", "complete", "failed", "killed", "lost", "incomplete")
"""The counts of each kind: trials, requests with the fault, saves by their end, and wrong checkpoints afterwards."""


def run_trials(trials: Iterable[int]) -> dict[str, dict[str, int]]:
    """Return kind -> name in ``RESULTS`` -> count."""
    faults, known, url = Faults(), set[str](), f"s3://{BUCKET}/trials"
    found = {kind: Counter(dict.fromkeys(RESULTS, 0)) for kind in KINDS}
    with object_store(faults) as variables, tempfile.TemporaryDirectory() as folder:
        environ = {**variables, "TMPDIR": folder}
        with patch.dict(os.environ, environ):
            for trial in trials:
                kind = KINDS[trial % len(KINDS)]
                counts = found[kind]
                faults.randomly(kind, trial, random.Random(trial).choice([0.05, 0.3]) if kind != "none" else 0.0)
                lines = write_and_kill(url, trial)
                counts.update(trials=1, faults=faults.count, **Counter(word for word, _ in lines if word in RESULTS))
                counts["killed"] += sum(word == "begun" for word, _ in lines)
                counts["killed"] -= sum(word in ("complete", "failed") for word, _ in lines)
                faults.choose = lambda method, path: ""
                for word, name in lines:
                    known = known | {name} if word == "complete" else known - {name} if word == "removing" else known
                checkpoints = {*Storage(url).checkpoints()}
                counts.update(lost=len(known - checkpoints), incomplete=sum(map(is_incomplete, [url], checkpoints)))
                known = checkpoints
                print(trial, kind, dict(counts), flush=True)
    return {kind: dict(counts) for kind, counts in found.items()}


def write_and_kill(url: str, seed: int) -> list[tuple[str, str]]:
    """Run the writer, kill it at a random moment, and return what it has printed: word and name of a checkpoint."""
    command = [sys.executable, "-m", "tests.programs.checkpoint.storage_writer", url, str(seed)]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        first = writer.stdout.readline()
        if seed % 5:
            start = time.monotonic() - begin  # each of the six uploads of the writer takes as long
            time.sleep(7 * start * random.Random(-1 - seed).random())
            writer.kill()
        lines = (first + writer.stdout.read()).splitlines()
    return [(word, name) for word, name, *_ in map(str.split, lines)]


def is_incomplete(url: str, name: str) -> bool:
    """Return whether a checkpoint cannot be fetched, or has other bytes than were saved."""
    with tempfile.TemporaryDirectory() as into:
        try:
            folder = Storage(url).fetch(name, Path(into))
        except CheckpointError:
            return True
        manifest = read_manifest(folder)
        assert manifest is not None
        files = {folder / record.path: record.ranges for record in manifest.files}
        return any(True for _ in hash_problems(files, lambda *_: None))


def main() -> int:
    parser = make_parser(__doc__, "storage_faults")
    parser.add_argument("--first", type=int, default=0, help="the first trial; after 0, the counts are added")
    parser.add_argument("--trials", type=int, default=200)
    args = parser.parse_args()
    kinds = run_trials(range(args.first, args.first + args.trials))
    if args.first:
        before = json.loads(args.out.read_text())["kinds"]
        kinds = {kind: {name: counts[name] + before[kind][name] for name in RESULTS} for kind, counts in kinds.items()}
    write_result("storage_faults", args.out, {"kinds": kinds})
    return int(any(counts["lost"] or counts["incomplete"] for counts in kinds.values()))


if __name__ == "__main__":
    raise SystemExit(main())
