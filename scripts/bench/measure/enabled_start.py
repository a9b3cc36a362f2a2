"""What ``hf-fsdp enable`` adds to the start of Python: complete processes of an environment with and without its file.

The processes of a pair run one after the other, in alternating order: ``python -c pass``, the same as a rank of a
launcher and as a child of one, and a rank that imports Accelerate without FSDP. The result has medians of the pairs'
differences: of the wall clock, and of the processes' CPU time, which depends less on what else runs on the machine.

    python -m scripts.bench enabled_start    (three minutes; writes docs/results/enabled_start.json)
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from hf_fsdp_plugin.cli.enable import FILE_NAME, TEXT
from hf_fsdp_plugin.integrations.before_imports import RANK_VARIABLE
from scripts.bench.common import ROOT, cpu_seconds, make_parser
from scripts.bench.tables.update_results import write_result

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
CASES: dict[str, tuple[str, dict[str, str], int]] = {
    "python -c pass": ("pass", {}, 1),
    "a rank, python -c pass": ("pass", RANK, 1),
    "a child of a rank, python -c pass": ("pass", {**RANK, RANK_VARIABLE: "1"}, 1),
    "a rank without FSDP, import accelerate": ("import accelerate", RANK, 20),
}
"""Case -> code, variables, and every how many pairs it runs."""
Pair = tuple[tuple[float, float], tuple[float, float]]
"""Wall-clock and CPU seconds without the file, and with it."""


def main() -> int:
    parser = make_parser(__doc__, "enabled_start")
    parser.add_argument("--pairs", type=int, default=200)
    args = parser.parse_args()
    removed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HF_FSDP_LAUNCH")
    environ = {name: value for name, value in os.environ.items() if name not in removed}
    seconds: dict[str, list[Pair]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False, symlinks=True)
        purelib = Path(sysconfig.get_path("purelib", "venv", vars={"base": folder, "platbase": folder}))
        (purelib / "paths.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        file = purelib / FILE_NAME

        def run(code: str, variables: dict[str, str], *, enabled: bool) -> tuple[float, float]:
            file.unlink(missing_ok=True)
            if enabled:
                file.write_text(TEXT)
            start, used = time.perf_counter(), cpu_seconds(resource.RUSAGE_CHILDREN)
            subprocess.run([f"{folder}/bin/python", "-c", code], env={**environ, **variables}, check=True)
            return time.perf_counter() - start, cpu_seconds(resource.RUSAGE_CHILDREN) - used

        for number in range(args.pairs + 1):  # the first pair writes the bytecode files
            for name, (code, variables, every) in CASES.items():
                if number % every == 0:
                    order = (False, True) if number // every % 2 else (True, False)
                    pair = {enabled: run(code, variables, enabled=enabled) for enabled in order}
                    seconds[name].append((pair[False], pair[True]))
    result = {"pairs": args.pairs, "cases": {name: _summary(pairs[1:]) for name, pairs in seconds.items()}}
    write_result("enabled_start", args.out, result)
    return 0


def _summary(pairs: list[Pair]) -> dict[str, float]:
    """Return the medians in ms, and the quartiles of the differences of the CPU time."""
    wall, cpu = ([1e3 * (after[which] - before[which]) for before, after in pairs] for which in (0, 1))
    low, middle, high = statistics.quantiles(cpu, n=4)
    return {
        "disabled_ms": round(1e3 * statistics.median(before[0] for before, _ in pairs), 2),
        "added_ms": round(statistics.median(wall), 3),
        "added_cpu_ms": round(middle, 3),
        "added_cpu_ms_low": round(low, 3),
        "added_cpu_ms_high": round(high, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
