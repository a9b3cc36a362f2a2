"""Count where the host would wait for an accelerator: the plugin and stock Accelerate, on a simulated device.

Two ranks train a tiny Llama on the simulated accelerator of the tests, which lists blocking copies, copies of pageable
memory, reads of single values, barriers and synchronizations. Counted per step, and for loading with `prepare`, saving
and resuming, whose counts must not grow with the model.

    python -m scripts.bench host_waits                    (five minutes on 2 cores; docs/results/host_waits.json)
    python -m scripts.bench host_waits --places           print the place of each wait that stock does not have
    python -m scripts.bench host_waits --only fp16 save   cases whose name contains a word
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.bench.common import RANKS, child_environment, make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result
from tests.accelerator.accelerator_build import BACKEND, available

WHO = ("stock", "plugin")
VERSIONS = (1, 2)
SUFFIX = ", 6 layers"
"""Cases with a larger model, which have the limits of the smaller one."""
TARGETS = {"load": 10, "save, asynchronous": 2, "resume": 10}
"""Largest numbers of waits of rank 0 with the plugin. A step has at most as many as with stock Accelerate."""


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "host_waits")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name contains a word")
    parser.add_argument("--places", action="store_true", help="print the places of the waits")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if reason := available():
        print(f"The simulated accelerator cannot be built: {reason}.", file=sys.stderr)
        return 1
    counted = {(who, version): _run(who, version, args.only) for version in VERSIONS for who in WHO}
    rows = [_row(counted, version, case) for version in VERSIONS for case in counted["plugin", version]]
    for row in rows:
        print(f"fsdp{row['version']}  {row['case']:32} stock {row['stock']}  plugin {row['plugin']}")
        for place, count in row.pop("places").items() if args.places else ():
            print(f"    {count} × {place}")
        row.pop("places", None)
    too_many = [f"fsdp{row['version']} {row['case']}" for row in rows if not row["holds"]]
    if too_many:
        print(f"more waits than allowed: {', '.join(too_many)}", file=sys.stderr)
    if not args.only:
        write_result("host_waits", args.out, {"rows": rows})
    return bool(too_many)


def _run(who: str, version: int, only: list[str]) -> dict[str, Any]:
    """Return the waits of rank 0 by case: a list of places per step, or one list."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "waits.json"
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("FSDP_", "ACCELERATE_"))}
        environ = {
            **child_environment(inherited, BACKEND),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        script = str(RANKS / "host_waits.py")
        code = run_two_ranks(script, [who, str(version), folder, *only], environ)
        if code != 0:
            raise SystemExit(f"{who}, FSDP{version}: exit code {code}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _row(counted: dict[tuple[str, int], dict[str, Any]], version: int, case: str) -> dict[str, Any]:
    stock, plugin = counted["stock", version].get(case), counted["plugin", version][case]
    if plugin["per_step"]:
        holds = stock is None or all(
            len(own) <= len(theirs) for own, theirs in zip(plugin["waits"], stock["waits"], strict=True)
        )
    else:
        limit = TARGETS.get(case.removesuffix(SUFFIX), len(stock["waits"][0]) if stock else 0)
        holds = len(plugin["waits"][0]) <= limit
    places = Counter(place for waits in plugin["waits"] for place in waits)
    if stock is not None and plugin["per_step"]:
        places -= Counter(place for waits in stock["waits"] for place in waits)
    return {
        "version": version,
        "case": case,
        "stock": _numbers(stock),
        "plugin": _numbers(plugin),
        "allowed": TARGETS.get(case.removesuffix(SUFFIX)),
        "holds": holds,
        "places": places,
    }


def _numbers(found: dict[str, Any] | None) -> list[int] | None:
    return None if found is None else [len(waits) for waits in found["waits"]]


if __name__ == "__main__":
    raise SystemExit(main())
