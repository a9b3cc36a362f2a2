"""The benchmarks, one row of ``benchmarks.yaml`` each: program, time limit, and small sizes."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

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


def _read() -> dict[str, Benchmark]:
    rows = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8"))
    return {name: Benchmark(name=name, **row) for name, row in rows.items()}


_ROWS = _read()
GPU_CHECK = _ROWS.pop("gpu_check")
BENCHMARKS = tuple(_ROWS.values())


def chosen(names: Sequence[str]) -> list[Benchmark]:
    """Return the named benchmarks, by default all that this machine can run.

    Raises:
        KeyError: there is no benchmark of a name.
    """
    known = {row.name: row for row in (*BENCHMARKS, GPU_CHECK)}
    if names:
        return [known[name] for name in names]
    return [row for row in known.values() if row is not GPU_CHECK or shutil.which("nvidia-smi")]
