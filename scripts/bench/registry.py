"""The benchmarks, one row each: the program that writes ``docs/results/NAME.json``, its time limit and small sizes."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.bench.common import ROOT

QUICK_MINUTES = 10.0
"""Time limit of a benchmark with small sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One row.

    Attributes:
        quick: the arguments for small sizes; ``None`` if the program has none.
        minutes: time limit with the sizes of docs/results.
        program: words after the Python interpreter; empty for ``scripts/bench/measure/NAME.py``.
        shell: words of a command that is no Python program. It replaces ``program``.
        arguments: the arguments for the sizes of docs/results.
        code: what it measures, as paths in the package; empty for the whole package.
    """

    name: str
    quick: str | None = None
    minutes: float = 45.0
    program: str = ""
    shell: str = ""
    arguments: str = ""
    code: str = ""

    def command(self, *, quick: bool, out: str) -> list[str] | None:
        """Return the words that run the benchmark; ``None`` if it has no small sizes and ``quick`` asks for them."""
        if quick and self.quick is None:
            return None
        program = [sys.executable, *(self.program or f"-m scripts.bench {self.name}").split()]
        if quick:
            return [*program, *(self.quick or "").split(), "--out", out]
        return [*(self.shell.split() or program), *self.arguments.split()]

    def subject(self) -> str:
        """Return the first line of the program's docstring, which says what it measures."""
        text = (ROOT / self.path()).read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]

    def path(self) -> str:
        """Return the path of the program."""
        module = (self.program or f"-m scripts.bench {self.name}").removeprefix("-m ")
        return f"{module.replace('scripts.bench ', 'scripts.bench.measure.').replace('.', '/')}.py"


_SMALL_MODEL = "--layers 2 --hidden 64 --length 32"
BENCHMARKS = (
    Benchmark(name="axes", quick="--only alltoall"),
    Benchmark(
        name="checkpoint_save", minutes=60, quick="--rounds 1 --full-rounds 1 --layers 2 --hidden 128 --vocabulary 1000"
    ),
    Benchmark(name="command_start", code="cli tools", quick="--rounds 1"),
    Benchmark(name="enabled_start", quick="--pairs 60"),
    Benchmark(name="gloo_connections", code="backends/ranks", quick="--worlds 16"),
    Benchmark(name="hang_overhead", code="hangs", quick=f"--pairs 2 {_SMALL_MODEL}"),
    Benchmark(
        name="hangs",
        code="hangs launcher integrations/watch_thread.py",
        minutes=120,
        quick="--kinds sleep skip --versions 2 --ways loop",
    ),
    Benchmark(
        name="hangs_healthy",
        code="hangs launcher integrations/watch_thread.py",
        minutes=90,
        program="-m scripts.bench hangs",
        arguments="--healthy 30",
        quick="--healthy 0.2 --versions 2",
    ),
    Benchmark(name="host_waits"),
    Benchmark(name="large_world", code="checkpoint", minutes=60, quick="--worlds 2 --fsdp1-worlds --layers 2"),
    Benchmark(name="layer_classes", code="plan", quick="--only bert"),
    Benchmark(name="load", code="backends/loading integrations/transformers", quick="--rounds 1 --worlds 2"),
    Benchmark(name="many_ranks", quick="--worlds 4"),
    Benchmark(
        name="memory_error",
        code="tools/plan/estimate",
        minutes=90,
        quick="--points family=llama,version=1 family=clip,batch=8,seq=64",
    ),
    Benchmark(name="memory_on_device", code="tools/plan/estimate"),
    Benchmark(name="merge", code="checkpoint", quick="--pairs 1"),
    Benchmark(name="migrate_proofs", code="tools/migrate tools/preflight", minutes=90, quick="--only TRL"),
    Benchmark(name="planner_time", code="tools/plan/estimate plan", quick=""),
    Benchmark(name="preflight_time", code="tools/preflight", quick="--only BERT"),
    Benchmark(name="public_configs", code="sources spec", quick="--every 20"),
    Benchmark(name="published_runs", code="tools/plan/estimate", quick=""),
    Benchmark(name="renamed_names", quick="--only FSDPParam.sharded_param"),
    Benchmark(name="restarts", code="runs launcher", quick="--kills 1 --versions 2"),
    Benchmark(name="resume", code="checkpoint backends/loading", quick="--rounds 1"),
    Benchmark(name="resume_parity", quick=""),
    Benchmark(name="start", quick="--rounds 1"),
    Benchmark(name="step_overhead", quick=f"--pairs 2 {_SMALL_MODEL}"),
    Benchmark(name="step_time", code="tools/plan/estimate", quick="--ranks 2 --rounds 1 --only bert"),
    Benchmark(name="suggestions", code="tools/profile", quick="--cases data --pairs 1"),
    Benchmark(name="survival", code="checkpoint", minutes=120, quick="--trials 4 --no-disk-full"),
    Benchmark(name="throughput", minutes=90, quick="--quick"),
    Benchmark(name="two_hosts", quick="--only bytes --versions 2"),
    Benchmark(name="unexpressed", quick="--quick"),
    Benchmark(
        name="generated_values",
        code="spec sources",
        program="-m scripts.generated_values",
        arguments="--cases 1000000 --seed 1",
        quick="--cases 2000",
    ),
    Benchmark(name="ecosystem", minutes=240, program="-m scripts.run_ecosystem", shell="bash scripts/ecosystem.sh"),
    Benchmark(name="matrix", minutes=240, program="-m scripts.run_matrix", shell="bash scripts/matrix.sh"),
    Benchmark(name="peers", minutes=480, program="-m scripts.run_peers"),
)
GPU_CHECK = Benchmark(
    name="gpu_check", program="-m scripts.bench gpu_check", shell="bash scripts/gpu_check.sh", arguments="--again"
)


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the named benchmarks, by default all that this machine can run.

    Raises:
        KeyError: there is no benchmark of a name.
    """
    known = {row.name: row for row in (*BENCHMARKS, GPU_CHECK)}
    if names:
        return [known[name] for name in names]
    return [row for row in known.values() if row is not GPU_CHECK or shutil.which("nvidia-smi")]
