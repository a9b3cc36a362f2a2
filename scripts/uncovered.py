"""Lists the functions of the package that no test executes, from the JSON report of coverage.

    python -m scripts.uncovered coverage.json             print them
    python -m scripts.uncovered coverage.json --write     also write docs/results/uncovered.json

``bash scripts/coverage.sh`` runs it. In the file, each function has a reason why it stays; that of a new one is empty.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.common import RESULTS, describe_machine


def functions_without_lines(report: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return ``FILE::FUNCTION`` for each function of which no line was executed, and the number of all functions."""
    found, num_functions = [], 0
    for path, file in report["files"].items():
        for name, region in file["functions"].items():
            # Lines outside of functions have no name. A function of a docstring alone has no lines.
            if name and region["summary"]["num_statements"]:
                num_functions += 1
                if not region["summary"]["covered_lines"]:
                    found.append(f"{path}::{name}")
    return sorted(found), num_functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the file that `coverage json` writes")
    parser.add_argument("--write", action="store_true", help="write the result file")
    parser.add_argument("--out", type=Path, default=RESULTS / "uncovered.json", help="the result file")
    args = parser.parse_args()
    found, num_functions = functions_without_lines(json.loads(args.report.read_text(encoding="utf-8")))
    known = json.loads(args.out.read_text(encoding="utf-8"))["uncovered"] if args.out.exists() else {}
    rows = {name: known.get(name, "") for name in found}
    for name, reason in rows.items():
        print(f"{name}: {reason or 'no reason'}")
    print(
        f"{len(found)} of {num_functions} functions are not executed, {list(rows.values()).count('')} without a reason"
    )
    if args.write:
        tree = {**describe_machine(), "num_functions": num_functions, "num_uncovered": len(rows), "uncovered": rows}
        args.out.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
