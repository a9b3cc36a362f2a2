"""What the measurements share: options, models, data, ranks, and the description of the machine."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
RANKS = ROOT / "scripts" / "bench" / "ranks"
"""Scripts that launched ranks run."""


def make_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the option ``--out``, by default ``docs/results/NAME.json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    return parser


def make_llama(*, seed: int = 0, **settings: Any) -> Any:
    """Return a Llama with these settings of its config in fp32. The initial weights are the same in every process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings, use_cache=False))


def make_dataset(*, vocab_size: int, length: int) -> Any:
    """Return a dataset of random tokens. A sequence depends on its index only."""
    import torch

    class Tokens(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    return Tokens()


def child_environment(environ: Mapping[str, str] = os.environ, *folders: Path) -> dict[str, str]:
    """Return the environment of a program that imports this checkout, and modules of further folders."""
    paths = [*map(str, folders), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_two_ranks(
    script: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ, *, num_ranks: int = 2
) -> int:
    """Run a script on two ranks, or another number, one thread each, and return the exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    return subprocess.run([*torchrun, script, *arguments], env=child_environment(environ), check=False).returncode


def main_of_two_ranks(script: str, measure: Callable[[], None]) -> int:
    """Measure on this rank, or start two ranks of the script with the arguments of this process."""
    if "RANK" in os.environ:
        measure()
        return 0
    return run_two_ranks(script, sys.argv[1:])


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Return the CPU time of this process, or of its children that have ended."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_machine() -> dict[str, Any]:
    """Return date, commit, processor, number of cores, and versions, as a JSON object."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
    }


def commit() -> str:
    """Return the short hash of the present commit, with ``+`` if files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_block(document: Path, name: str, text: str) -> None:
    """Replace what is between the marks ``results:begin NAME`` and ``results:end NAME`` of a document."""
    begin, end = f"<!-- results:begin {name} -->\n", f"<!-- results:end {name} -->"
    before, _, rest = document.read_text(encoding="utf-8").partition(begin)
    document.write_text(f"{before}{begin}{text}{end}{rest.partition(end)[2]}", encoding="utf-8")
