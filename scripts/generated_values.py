"""Compare generated values, keys, words and files with what docs/settings.md states about them.

    python -m scripts.generated_values --cases 1000000 --seed 1 --processes 2
    python -m scripts.generated_values --seed 1 --replay 31415        # print one case and its result

A case is one call of ``spec.load.assess`` with generated sources. Its expected result comes from
``tests/unit/generated/oracle.py``, which reads the document and does not import the package. The exit code is 1 if a
result disagrees. The counts are written to docs/results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench.common import make_parser  # noqa: E402
from scripts.bench.tables.update_results import write_result  # noqa: E402
from tests.unit.generated.cases import BUILDERS, Builder, Case, pick  # noqa: E402
from tests.unit.generated.checking import disagreement  # noqa: E402
from tests.unit.generated.oracle import Oracle  # noqa: E402
from tests.unit.generated.settings_document import read_document  # noqa: E402

KINDS = (*BUILDERS, *(3 * ("whole file", "whole dict", "environment", "command line")))
"""Kinds with many values in a case are built more often."""
CHUNK = 500
SHOWN = 20
"""Disagreements that are printed."""


class Runner:
    """Builds and checks cases by their number."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.builder, self.seed, self.folder = Builder(Random(), Oracle(read_document())), seed, folder

    def case(self, number: int) -> Case:
        self.builder.random.seed(f"{self.seed}:{number}")
        return self.builder.case(pick(self.builder.random, KINDS))

    def run(self, numbers: range) -> tuple[Counter[str], Counter[str], list[str]]:
        """Return the cases and the generated values by kind, and the disagreements."""
        cases: Counter[str] = Counter()
        values: Counter[str] = Counter()
        wrong: list[str] = []
        for number in numbers:
            case = self.case(number)
            cases[case.kind] += 1
            values[case.kind] += max(1, len(case.expected))
            if (complaint := disagreement(case, self.folder)) is not None:
                wrong.append(f"--seed {self.seed} --replay {number}: {case.kind}: {complaint}")
        return cases, values, wrong


_runners: dict[int, Runner] = {}


def _run(job: tuple[int, range]) -> tuple[Counter[str], Counter[str], list[str]]:
    seed, numbers = job
    warnings.simplefilter("ignore")  # of generated regular expressions
    with tempfile.TemporaryDirectory(prefix="generated-") as folder:
        runner = _runners.setdefault(seed, Runner(seed, Path(folder)))
        runner.folder = Path(folder)
        return runner.run(numbers)


def main() -> int:
    parser = make_parser(__doc__, "generated_values")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time; default: %(default)s")
    parser.add_argument("--replay", type=int, help="print the case with this number, and its result")
    args = parser.parse_args()
    if args.replay is not None:
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(args.seed, Path(folder))
            case = runner.case(args.replay)
            print(case)
            print(disagreement(case, Path(folder)) or "as documented")
        return 0
    jobs = [(args.seed, range(i, min(i + CHUNK, args.cases))) for i in range(0, args.cases, CHUNK)]
    cases: Counter[str] = Counter()
    values: Counter[str] = Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with multiprocessing.Pool(args.processes) as pool:
        for done, (more_cases, more_values, more_wrong) in enumerate(pool.imap_unordered(_run, jobs), 1):
            cases, values = cases + more_cases, values + more_values
            for text in more_wrong[: max(0, SHOWN - len(wrong))]:
                print(text)
            wrong += more_wrong
            if done % 20 == 0:
                seconds = time.monotonic() - began
                print(f"{done * CHUNK} cases, {len(wrong)} disagreements, {seconds:.0f} s", flush=True)
            if time.monotonic() - began > 60 * args.minutes:
                break
    result = {
        "command": f"python -m scripts.generated_values --cases {cases.total()} --seed {args.seed}",
        "num_cases": cases.total(),
        "num_values": values.total(),
        "kinds": {kind: {"cases": cases[kind], "values": values[kind]} for kind in sorted(cases)},
        "num_disagreements": len(wrong),
        "disagreements": wrong[:SHOWN],
    }
    write_result("generated_values", args.out, result)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
