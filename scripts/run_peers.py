"""Runs the tests of other libraries from their checkouts, without and with the plugin, and compares the outcomes.

    python -m scripts.run_peers accelerate=DIR transformers=DIR       all files of these suites
    python -m scripts.run_peers accelerate=DIR --only fsdp launch     files whose path contains a word
    python -m scripts.run_peers accelerate=DIR --missing              only files without a result, or with a difference
                                                                      that scripts/peers/suites.yaml does not explain
    python -m scripts.run_peers --table                               only write the table of docs/compatibility.md

DIR is a checkout of the version that is installed. Nothing of it is changed or installed. The suites need
``pip install parameterized evaluate diffusers``, and no network: small models with random weights take the place of
those that they download (scripts/peers/hub.py). In a run with the plugin every process (pytest, launchers, ranks)
begins with ``hf_fsdp_plugin.install()``.

Results are merged into docs/results/peers.json after each file. Exit code 1: a difference is not explained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.common import describe_machine, write_block
from scripts.peers.outcomes import compare, count, explain, read_outcomes, table, unexplained

ROOT = Path(__file__).resolve().parents[1]

FILE = ROOT / "scripts" / "peers" / "suites.yaml"
INSIDE = ROOT / "scripts" / "peers" / "inside"
RESULT = ROOT / "docs" / "results" / "peers.json"
DOCUMENT = ROOT / "docs" / "compatibility.md"
MODES = ("without", "with")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of one library.

    Attributes:
        files: paths in the checkout.
        relaxed: file -> what ``peers_reporter`` replaces, so that its tests run on CPU ranks.
        environment: variables of its processes.
        keywords: file -> words (``-k`` of pytest) that choose its tests, if all of them would take hours.
        explained: pattern of a difference (see ``outcomes.explain``) -> its reason.
    """

    files: Sequence[str]
    relaxed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)


def read_suites(file: Path = FILE) -> tuple[dict[str, Suite], dict[str, str]]:
    """Return the suites, and the model class of each hub name."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {name: Suite(**content) for name, content in tree["suites"].items()}, tree["models"]


def select(
    files: Sequence[str], known: Mapping[str, Any], suite: Suite, only: Sequence[str], missing: bool
) -> list[str]:
    """Return the files to run."""

    def is_done(path: str) -> bool:
        return path in known and all(explain(row, suite.explained) for row in known[path]["differences"])

    chosen = [path for path in files if not only or any(word in path for word in only)]
    return [path for path in chosen if not (missing and is_done(path))]


def checkout_version(checkout: Path, package: str) -> str:
    """Return the version that a checkout names."""
    for path in (checkout / "src" / package / "__init__.py", checkout / "setup.py", checkout / "VERSION"):
        text = path.read_text("utf-8") if path.exists() else ""
        if found := re.search(r'(?:version(?:__)? ?= ?"|\A)(\d[^"\s]*)', text, re.IGNORECASE):
            return found[1]
    return "unknown"


def run_file(
    path: str, suite: Suite, checkout: Path, mode: str, hub: Path, limits: tuple[float, float]
) -> dict[str, Any]:
    """Run one file of tests, and return its outcomes, seconds and whether it ended in time.

    Args:
        limits: seconds for a test and for the file.
    """
    folder = Path(tempfile.mkdtemp(prefix="peers_"))
    outcomes, log = folder / "outcomes.jsonl", folder / "log.txt"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    # This repository is last: it has folders of common names, such as tests.
    paths = [INSIDE, *filter(None, [os.environ.get("PYTHONPATH")]), ROOT]
    environment = {
        **inherited,
        **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub)},
        **suite.environment,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PEERS_OUTCOMES": str(outcomes),
        "PEERS_RELAXED": " ".join(suite.relaxed.get(path, ())),
        "PEERS_WITH_PLUGIN": "1" if mode == "with" else "",
        "TMPDIR": str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_reporter", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-o", "addopts=", f"--timeout={limits[0]:.0f}", path]
    command += ["-k", suite.keywords[path]] if path in suite.keywords else []
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limits[1])
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            _end_group(process)
    relative = {
        test: (outcome, message.replace(f"{checkout}/", "").replace(f"{folder}/", ""))
        for test, (outcome, message) in read_outcomes(outcomes).items()
    }
    found = {
        "outcomes": relative, "ended": ended, "code": process.returncode,
        "seconds": round(time.monotonic() - began), "log": log.read_text("utf-8", errors="replace")[-3000:],
    }  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a file of tests has left: its ranks are in the same session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compare_file(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a file: the numbers of outcomes without and with the plugin, and the differences."""
    row: dict[str, Any] = {mode: count(runs[mode]["outcomes"]) for mode in MODES}
    row["seconds"] = [runs[mode]["seconds"] for mode in MODES]
    row["differences"] = compare(*(runs[mode]["outcomes"] for mode in MODES))
    for mode in MODES:
        # Exit code 5 of pytest: no test was found, or all are deselected.
        if not runs[mode]["ended"] or not (runs[mode]["outcomes"] or runs[mode]["code"] == 5):
            row["differences"].append(
                {"test": "(file)", "without": "", "with": "", "message": f"{mode}: did not end, or wrote no outcome"}
            )
    return row


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkouts", nargs="*", metavar="SUITE=DIR", help="a suite of scripts/peers/suites.yaml and its checkout")
    add("--only", nargs="+", default=[], metavar="WORD", help="files whose path contains a word")
    add("--missing", action="store_true", help="only files without a result, or with an unexplained difference")
    add("--table", action="store_true", help="only write the table of docs/compatibility.md")
    add("--hub", type=Path, default=ROOT / ".peers", help="folder of the models that replace those of the hub")
    add("--test-limit", type=float, default=300.0, help="seconds after which a test is ended")
    add("--limit", type=float, default=1200.0, help="seconds after which a file is ended")
    add("--out", type=Path, default=RESULT, help="the result file")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    suites, models = read_suites()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the file that is running, too
    results: dict[str, Any] = json.loads(args.out.read_text("utf-8"))["suites"] if args.out.exists() else {}
    explained = {name: suite.explained for name, suite in suites.items()}
    for name, _, folder in (text.partition("=") for text in args.checkouts):
        if name not in suites or not Path(folder).is_dir():
            parser.error(f"{name}={folder}: expected one of {', '.join(suites)} and the folder of its checkout")
        run_suite(name, suites[name], Path(folder).resolve(), models, results, args)
    if args.checkouts:
        print("not explained:", *(unexplained(results, explained) or ["nothing"]), sep="\n  ")
    write_block(DOCUMENT, "peers", table(results, explained))
    return 1 if unexplained(results, explained) else 0


def run_suite(
    name: str,
    suite: Suite,
    checkout: Path,
    models: Mapping[str, str],
    results: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Run the chosen files of a suite, and write the results after each."""
    from scripts.peers.hub import make_hub

    make_hub(args.hub.resolve(), models)
    known = results.setdefault(name, {"files": {}})
    known["installed"] = version(name)
    for path in select(suite.files, known["files"], suite, args.only, args.missing):
        if not (checkout / path).exists():
            print(f"{name} {path}: not in this checkout")
            continue
        limits = (args.test_limit, args.limit)
        runs = {mode: run_file(path, suite, checkout, mode, args.hub.resolve(), limits) for mode in MODES}
        row = known["files"][path] = {"checkout": checkout_version(checkout, name), **compare_file(runs)}
        known["files"] = {file: known["files"][file] for file in suite.files if file in known["files"]}
        print(
            f"{time.strftime('%H:%M:%S')} {name} {path}: {row['without']} {row['with']} {row['seconds']} s", flush=True
        )
        for found in row["differences"]:
            reason = explain(found, suite.explained)
            shown = "explained" if reason else f"! {found['message'][:300]}"
            print(f"  {found['test']}: {found['without']} -> {found['with']}: {shown}", flush=True)
            if found["test"] == "(file)":
                print("\n".join(runs[mode]["log"] for mode in MODES), flush=True)
        args.out.write_text(json.dumps({**describe_machine(), "suites": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
