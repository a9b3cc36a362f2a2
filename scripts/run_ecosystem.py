"""Runs public scripts unchanged through the plugin on two CPU ranks, and compares each with an unsharded run.

    bash scripts/ecosystem.sh                                all cases, both FSDP versions
    bash scripts/ecosystem.sh --only sft dpo --version 1     cases whose name contains a word
    bash scripts/ecosystem.sh --list                         the cases

Results are merged into docs/results/ecosystem.json. Exit code 0: every case works, or is refused as expected.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

from scripts.ecosystem.assets import make_assets
from scripts.ecosystem.cases import CASES
from scripts.ecosystem.grouped import BEHAVIORS, Behavior
from scripts.ecosystem.model import VERSIONS, Case
from scripts.ecosystem.results import SKIPPED, Row, is_expected, merge_rows, run_behaviors, run_case, select, write_rows
from scripts.ecosystem.runs import Suite

ROOT = Path(__file__).resolve().parents[1]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="WORD", help="cases whose name contains a word; =NAME for one case")
    add("--version", type=int, choices=VERSIONS, help="one FSDP version (default: both)")
    add("--missing", action="store_true", help="only what the result file does not show as expected")
    add("--new", action="store_true", help="only what the result file does not contain")
    add("--list", action="store_true", help="print the names of the cases")
    add("--work", type=Path, default=ROOT / ".ecosystem", help="folder for models, datasets, outputs and logs")
    add("--out", type=Path, default=ROOT / "docs" / "results" / "ecosystem.json", help="the result file")
    add("--limit", type=float, default=300.0, help="seconds after which a script is killed")
    add("--time", type=float, default=float("inf"), help="seconds after which no more cases are started")
    add("--transformers-examples", type=Path, metavar="DIR", help="examples/pytorch of the transformers repository")
    add("--accelerate-examples", type=Path, metavar="DIR", help="examples of the accelerate repository")
    add("--with", dest="wrapper", default="", metavar="COMMAND", help="a command that starts every script, e.g. nice")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    cases, behaviors = select(CASES, args.only), select(BEHAVIORS, args.only)
    if args.list:
        print("\n".join(case.name for case in [*cases, *behaviors]))
        return 0
    suite = Suite(
        work=args.work.resolve(),
        transformers=args.transformers_examples and args.transformers_examples.resolve(),
        accelerate=args.accelerate_examples and args.accelerate_examples.resolve(),
        limit=args.limit,
        wrapper=tuple(shlex.split(args.wrapper)),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the script that is running, too
    make_assets(suite.assets)
    known = {(row["case"], row["version"]): row for row in merge_rows(args.out, [])}
    versions = VERSIONS if args.version is None else (args.version,)
    start = time.monotonic()
    unexpected = 0
    for case, fsdp_version in ((case, number) for case in cases for number in versions):
        if time.monotonic() - start > args.time:
            break
        if fsdp_version not in case.versions:
            continue
        if _is_wanted(case, known.get((case.name, fsdp_version)), args):
            unexpected += _keep(case, run_case(case, suite, fsdp_version), args.out)
    wanted = [b for b in behaviors if any(_is_wanted(b, known.get((b.name, number)), args) for number in versions)]
    if wanted and time.monotonic() - start <= args.time:
        by_name = {behavior.name: behavior for behavior in wanted}
        for row in run_behaviors(wanted, suite, versions):
            unexpected += _keep(by_name[row["case"]], row, args.out)
    print(f"{unexpected} not as expected; logs are in {suite.work}/runs")
    return 1 if unexpected else 0


def _is_wanted(case: Case | Behavior, old: Row | None, args: argparse.Namespace) -> bool:
    if old is None or old["status"] == SKIPPED:
        return True
    return not args.new and not (args.missing and is_expected(case, old))


def _keep(case: Case | Behavior, row: Row, path: Path) -> bool:
    """Print a row and write it to the result file. Returns whether it is not what is expected."""
    good = is_expected(case, row)
    print(f"{'  ' if good else '! '}{describe(row)}", flush=True)
    write_rows(path, [row])
    return not good


def describe(row: Row) -> str:
    """Return one line: case, outcome, time and differences."""
    measured = [f"{row['seconds']} s"] if "seconds" in row else []
    measured += [
        f"{name} {row[name]:.1e}" for name in ("loss_difference", "weight_difference") if row.get(name) is not None
    ]
    detail = f": {row['detail']}" if row["detail"] else ""
    return f"FSDP{row['version']} {row['case']}: {row['status']}{detail} ({', '.join(measured)})"


if __name__ == "__main__":
    raise SystemExit(main())
