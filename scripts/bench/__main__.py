"""Runs benchmarks, and writes the tables of docs/results.md.

    python -m scripts.bench                      all, with the sizes of docs/results (hours)
    python -m scripts.bench --quick              small sizes, results in a temporary folder; docs/results stays as it is
    python -m scripts.bench --only load          one benchmark with its time limit (repeatable)
    python -m scripts.bench --list               names, time limits in minutes, and what each measures
    python -m scripts.bench load --rounds 3      one benchmark with its own arguments, without a time limit

A benchmark that fails or exceeds its time limit does not end the others. PEERS names the checkouts that
scripts/run_peers.py tests ("accelerate=DIR ..."); without them it only writes its table. The exit code is 1 if a
benchmark has failed, and 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from scripts.bench.common import ROOT, child_environment
from scripts.bench.registry import QUICK_MINUTES, Benchmark, chosen
from scripts.last_runs import record

_SECONDS_TO_END = 30.0
"""After SIGTERM, before SIGKILL."""


class Stopped(Exception):
    """The runner was asked to end."""


def main() -> int:
    os.environ.update(child_environment())
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        return run_measurement(words)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", metavar="NAME", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(words)
    try:
        rows = chosen(args.only)
    except KeyError as error:
        parser.error(f"there is no benchmark {error.args[0]}. --list prints the names.")
    if args.list:
        for row in rows:
            print(f"{row.name:<20} {limit_minutes(row, quick=args.quick):>4.0f}  {row.subject()}")
        return 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return run_all(rows, quick=args.quick)


def run_measurement(words: list[str]) -> int:
    """Run a program of ``measure/`` in this process, with its own arguments."""
    name = words[0]
    if not (ROOT / "scripts" / "bench" / "measure" / f"{name}.py").is_file():
        print(f"bench: there is no program scripts/bench/measure/{name}.py. --list prints the names.", file=sys.stderr)
        return 2
    sys.argv = words
    runpy.run_module(f"scripts.bench.measure.{name}", run_name="__main__", alter_sys=True)
    return 0


def limit_minutes(row: Benchmark, *, quick: bool) -> float:
    return QUICK_MINUTES if quick else row.minutes


def run_all(rows: list[Benchmark], *, quick: bool) -> int:
    """Run benchmarks one after the other, print a summary, and return the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="hf_fsdp_bench."))
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    summary, code = [], 0
    for row in rows:
        command = row.command(quick=quick, out=str(folder / f"{row.name}.json"))
        if command is None:
            summary.append(f"{row.name:<20} no quick sizes")
            continue
        if row.name == "peers":
            command += os.environ.get("PEERS", "").split()
        log = folder / f"{row.name}.log"
        print(f"[{time.strftime('%X')}] {row.name}: {' '.join(command)}", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            result, exit_code = run_limited(command, log, 60 * limit_minutes(row, quick=quick))
        except Stopped:
            result, exit_code = "stopped", 130
        if not quick and exit_code != 130:
            record(row.name, result)
        summary.append(f"{row.name:<20} {result:<12} exit code {exit_code:3} {time.monotonic() - began:6.0f} s")
        if exit_code:
            code = 1
            last = "".join(f"  | {line}\n" for line in log.read_text(errors="replace").splitlines()[-5:])
            print(f"  {result} (exit code {exit_code}), last lines of {log}:\n{last}", end="", file=sys.stderr)
        if exit_code == 130:
            code = 130
            break
    if not quick and code != 130:
        code = max(code, update_tables())
    print("\n".join(["", "summary:", *(f"  {line}" for line in summary), f"logs: {folder}"]))
    return code


def update_tables() -> int:
    command = [sys.executable, "-m", "scripts.bench.tables.update_results"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def run_limited(command: list[str], log: Path, seconds: float) -> tuple[str, int]:
    """Run a command with a time limit; return how it ended, and its exit code (124 after the limit).

    Raises:
        Stopped: after SIGINT or SIGTERM. The command has ended.
    """
    with log.open("wb") as out:
        # Ctrl-C of a terminal reaches only this process, which then ends the command with SIGTERM.
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(seconds)
            return ("failed" if code else "passed"), code
        except subprocess.TimeoutExpired:
            return "time limit", 124
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command that runs, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                continue


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    raise SystemExit(main())
