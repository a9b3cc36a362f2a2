"""Runs the cases of a benchmark: one world of ranks per number of ranks, and a new one after a failure."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.hangs.calls import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.integrations.bench import BenchWorkload, Case, Task, WorldJob, events_of
from hf_fsdp_plugin.integrations.bench.results import Results
from hf_fsdp_plugin.launcher.world import FoundDevices, World
from hf_fsdp_plugin.runs.exits import RunResult, summarize_exit
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.launchers import LaunchHandover
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec

if TYPE_CHECKING:
    from torch import nn

_RANK: Final = "hf_fsdp_plugin.integrations.bench.rank"
_MAX_ERROR: Final = 1000
CaseGroup = tuple[Case, ...]
"""A case of this package, and the same case of the systems with which it is compared."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark measures, and where.

    Attributes:
        spec, sources: the settings that all cases share.
        model: on the meta device.
        model_name: an id, or the absolute path of a folder.
        gpu_ids: as in ``World``.
        found: the accelerators of this machine.
        threads: number of threads of a CPU rank, the same in all worlds.
    """

    groups: Sequence[CaseGroup]
    workload: BenchWorkload
    spec: FsdpSpec
    sources: Sources
    model: nn.Module
    model_name: str
    device: str
    gpu_ids: str
    found: FoundDevices
    threads: int

    def head(self) -> dict[str, Any]:
        """Return the description of the benchmark as JSON: the part of the result before the cases."""
        num_params = sum(parameter.numel() for parameter in self.model.parameters())
        return {
            "model": {"name": self.model_name, "class": type(self.model).__name__, "num_params": num_params},
            "device": {"type": self.device, "name": self.found.name or None},
            "threads": self.threads,
            "workload": asdict(self.workload),
            "settings": {name: str(value) for name, value, _ in self.spec.settings() if self.spec.asked(name)},
        }

    def run(self, results: Results) -> int:
        """Measure what is not over in the results, and return the number of the signal that stopped it, or 0.

        The settings of a world alternate from round to round. After a failure, new ranks run what is left.
        """
        for world_size in sorted({group[0].world_size for group in self.groups}):
            groups = [group for group in self.groups if group[0].world_size == world_size]
            tasks = [Task(cases=group, round=number) for number in range(self.workload.rounds) for group in groups]
            while left := [task for task in tasks if not results.is_over(task)]:
                ended = self._run_world(world_size, left, results)
                if ended.signal_number:
                    return ended.signal_number
                running = next((task for task in left if not results.is_over(task)), None)
                if running is not None:
                    results.end(running.cases, "failed", _reason(ended))
        return 0

    def _run_world(self, world_size: int, tasks: Sequence[Task], results: Results) -> RunResult:
        """Run tasks until their end, or until a rank has failed, and take over what is measured."""
        world = World(device=self.device, num_machines=1, machine_rank=0, num_local=world_size, gpu_ids=self.gpu_ids)
        with tempfile.TemporaryDirectory(prefix="hf_fsdp_bench_", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            job = WorldJob(model=self.model_name, device=self.device, workload=self.workload, tasks=tuple(tasks))
            job.write(folder)
            events = events_of(folder)

            def follow() -> None:
                for event in events.new():
                    if event["event"] == "measured":
                        results.add(event)
                    else:
                        text = f"hf-fsdp bench: round {event['round'] + 1}: {event['case']}"
                        print(text, file=sys.stderr, flush=True)

            spec = replace(self.spec, launch=replace(self.spec.launch, num_processes=world_size))
            env = {"OMP_NUM_THREADS": str(self.threads), "TMPDIR": str(folder)}
            env[HANG_LIMIT_VARIABLE] = "0"  # records of collectives would be a part of what is measured
            handover = LaunchHandover(sources=self.sources, quiet=True)
            from hf_fsdp_plugin.launcher.attempts import run_job

            ended = run_job(["-m", _RANK, str(folder)], spec, world, handover, env=env, should_stop=follow)
            follow()
            return ended


def _reason(ended: RunResult) -> str:
    """Return why the ranks have ended before a task was measured."""
    first = ended.first
    if first is None:
        return "the ranks ended without a result"
    is_refusal = first.failure is not None and first.failure["kind"] == "spec"
    text = first.failure["message"] if is_refusal and first.failure is not None else summarize_exit(first)
    return f"rank {first.rank}: {' '.join(text.split())}"[:_MAX_ERROR]


def available_bytes() -> int:
    """Return the memory of this machine that new processes can use; 0 if the system does not show it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
