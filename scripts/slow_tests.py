"""Runs the tests that are marked slow, file by file, and records each file at once, so that a run can be continued.

    python -m scripts.slow_tests                      all files
    python -m scripts.slow_tests --minutes 60         begins no file after an hour; files that never ran come first
    python -m scripts.slow_tests tests/gloo/test_peft.py

docs/results/slow_tests.json has the last run of each file. ``python -m scripts.last_runs`` shows the oldest of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from scripts.bench.common import RESULTS, ROOT, commit

FILE: Final = RESULTS / "slow_tests.json"
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-m", "slow")
_PASSED: Final = 0


def slow_files(paths: Sequence[str]) -> dict[str, int]:
    """Return the files below ``paths`` that have slow tests, and the number of these tests.

    Raises:
        SystemExit: pytest cannot collect the tests.
    """
    command = [*_PYTEST, "--collect-only", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = Counter(line.split("::")[0] for line in done.stdout.splitlines() if "::" in line)
    if not found:
        raise SystemExit(f"no slow tests in {' '.join(paths)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return dict(found)


def in_order(files: Sequence[str], runs: dict[str, Any]) -> list[str]:
    """Return the files in the order in which they should run: never run, failed, then the oldest runs."""

    def urgency(file: str) -> tuple[int, str]:
        run = runs.get(file)
        return (0, "") if run is None else (1 if "failed" in run["result"] else 2, run["date"])

    return sorted(files, key=urgency)


def summary(files: Sequence[str], runs: dict[str, Any]) -> str:
    """Return the result of all files in a few words: ``passed``, or what failed and how many have never run."""
    failed = [file for file in files if "failed" in runs.get(file, {}).get("result", "")]
    never = sum(file not in runs for file in files)
    parts = [
        *([f"{', '.join(failed)} failed"] if failed else []),
        *([f"{never} files have never run"] if never else []),
    ]
    return "; ".join(parts) or "passed"


def run(file: str, tests: int, workers: int) -> dict[str, Any]:
    """Run the slow tests of a file, and return its row. The output of pytest goes to the terminal."""
    begin = time.monotonic()
    command = [*_PYTEST, *(["-n", str(min(workers, tests))] if workers > 1 else []), file]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    last = re.search(r"(\d.*) in [\d.]+s", done.stdout.rstrip().rpartition("\n")[2])
    result = last[1] if last else f"pytest failed with exit code {done.returncode}"
    if done.returncode != _PASSED and "failed" not in result:
        result = f"{result}, failed with exit code {done.returncode}"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "commit": commit(), "result": result, "seconds": round(time.monotonic() - begin)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or folders (default: tests)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further file after this time")
    parser.add_argument("--workers", type=int, default=3, help="tests that run at the same time (default: 3)")
    args = parser.parse_args()
    end = time.monotonic() + args.minutes * 60
    tree = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    runs: dict[str, Any] = tree.get("files", {})
    chosen = slow_files(args.paths)
    known = chosen if args.paths == ["tests"] else {**dict.fromkeys(tree.get("names", []), 0), **chosen}
    has_failed = False
    for file in in_order(list(chosen), runs):
        if time.monotonic() > end:
            break
        print(f"== {file}: {chosen[file]} slow tests", flush=True)
        row = run(file, chosen[file], args.workers)
        has_failed |= "failed" in row["result"]
        runs[file] = row
        names = sorted(known)
        current = {name: runs[name] for name in names if name in runs}
        tree = {"result": summary(names, runs), "names": names, "files": current}
        FILE.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
