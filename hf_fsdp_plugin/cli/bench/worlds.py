"""Runs the cases of a benchmark: one world of ranks per number of ranks, and a new one after a failure."""

from __future__ import annotations

import datetime
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.cli.bench.arguments import Request
from hf_fsdp_plugin.cli.rank_jobs import run_job
from hf_fsdp_plugin.hangs.calls import HANG_LIMIT_VARIABLE
from hf_fsdp_plugin.integrations.bench.cases import Case, CaseSetting, Task, WorldJob, events_of
from hf_fsdp_plugin.integrations.bench.results import Results
from hf_fsdp_plugin.launcher.device_search import FoundDevices
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import RunResult, first_failure, summarize_exit
from hf_fsdp_plugin.sources.interface import Sources
from hf_fsdp_plugin.sources.launchers import LaunchHandover
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.spec.load import assess

if TYPE_CHECKING:
    from torch import nn

_RANK: Final = "hf_fsdp_plugin.integrations.bench.rank"
_MAX_ERROR: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a benchmark measures, and where.

    Attributes:
        spec, sources: the settings that all cases share.
        model: on the meta device.
        model_name: an id, or the absolute path of a folder.
        gpu_ids: as in ``World``.
        found: the accelerators of this machine.
        threads: of a CPU rank, the same in all worlds.
    """

    request: Request
    spec: FsdpSpec
    sources: Sources
    model: nn.Module
    model_name: str
    device: str
    gpu_ids: str
    found: FoundDevices
    threads: int

    def cases(self) -> Iterable[Case]:
        return (case for setting in self.request.settings for case in self.request.cases(setting))

    def spec_of(self, setting: CaseSetting) -> FsdpSpec:
        """Return the spec of a setting. Raises ``SpecError`` if it has errors."""
        overrides = (*self.sources.overrides, *setting.planned.overrides)
        return assess(replace(self.sources, overrides=overrides)).checked_spec()

    def head(self) -> dict[str, Any]:
        """Return what is measured, as JSON: the part of the result before the cases."""
        config: Any = getattr(self.model, "config", None)
        return {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "model": {
                "name": self.model_name,
                "class": type(self.model).__name__,
                "model_type": getattr(config, "model_type", None),
                "num_params": sum(parameter.numel() for parameter in self.model.parameters()),
            },
            "device": {"type": self.device, "name": self.found.name or None},
            "threads": self.threads,
            "workload": asdict(self.request.workload),
            "settings": {name: str(value) for name, value, _ in self.spec.settings() if self.spec.asked(name)},
            "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        }

    def run(self, settings: Sequence[CaseSetting], results: Results) -> int:
        """Measure what is missing in the results, and return the number of the signal that stopped it, or 0."""
        for world_size in sorted({setting.world_size for setting in settings}):
            own = [setting for setting in settings if setting.world_size == world_size]
            while tasks := self._missing(own, results):
                if number := self._run_world(world_size, tasks, results):
                    return number
        return 0

    def _missing(self, settings: Sequence[CaseSetting], results: Results) -> list[Task]:
        """Return the tasks that are left, round by round, so that the settings alternate."""
        tasks = []
        for number in range(self.request.workload.rounds):
            for setting in settings:
                cases = [case for case in self.request.cases(setting) if number in results.missing_rounds(case.name)]
                if cases:
                    tasks.append(Task(cases=tuple(cases), round=number))
        return tasks

    def _run_world(self, world_size: int, tasks: Sequence[Task], results: Results) -> int:
        """Run tasks until their end, or until one has failed, whose cases are then marked."""
        world = World(device=self.device, num_machines=1, machine_rank=0, num_local=world_size, gpu_ids=self.gpu_ids)
        with tempfile.TemporaryDirectory(prefix="hf_fsdp_bench_", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            WorldJob(
                model=self.model_name, device=self.device, workload=self.request.workload, tasks=tuple(tasks)
            ).write(folder)
            follower = _Follower(folder, results, self.request.limit, tasks)
            handover = LaunchHandover(sources=self.sources, quiet=True)
            spec = replace(self.spec, launch=replace(self.spec.launch, num_processes=world.size))
            env = {"OMP_NUM_THREADS": str(self.threads), "TMPDIR": str(folder)}
            env[HANG_LIMIT_VARIABLE] = "0"  # records of collectives would be a part of what is measured
            words = ["-m", _RANK, str(folder)]
            result = run_job(words, spec, world, handover, env=env, should_stop=follower.reason_to_stop)
            follower.read(stopped=bool(result.signal_number))
            if not result.signal_number:
                follower.fail_after(result)
            return result.signal_number


class _Follower:
    """Takes the events of the ranks over into the results, and stops the ranks if there are none for too long.

    Attributes:
        failed: the cases that have failed.
    """

    def __init__(self, folder: Path, results: Results, limit: float, tasks: Sequence[Task]) -> None:
        self._events, self._results, self._limit, self._tasks = events_of(folder), results, limit, tasks
        self._changed = time.monotonic()
        self._measured: set[tuple[str, int]] = set()
        self.failed: list[str] = []

    def reason_to_stop(self) -> str | None:
        """Return why the ranks are stopped; ``None`` if they are not."""
        self.read()
        if time.monotonic() - self._changed <= self._limit:
            return None
        if not self.failed:
            self._fail([case.name for case in self._running], f"no progress for {self._limit:g} s (--limit)")
        return "no progress"

    def read(self, *, stopped: bool = False) -> None:
        """Take new events over, without failures after a signal: ranks lose their connection to those that ended."""
        for event in self._events.new():
            self._changed = time.monotonic()
            if event["event"] == "begin":
                text = f"hf-fsdp bench: round {event['round'] + 1}: {event['case']}"
                print(text, file=sys.stderr, flush=True)
            elif event["event"] == "measured":
                self._measured.add((event["case"], event["round"]))
                self._results.add(event)
            elif event["event"] == "failed" and not self.failed and not stopped:
                self._fail(event["cases"], f"rank {event['rank']}: {event['error']}")

    @property
    def _running(self) -> Sequence[Case]:
        """The cases of the first task that is not measured."""
        return next(
            (t.cases for t in self._tasks if any((case.name, t.round) not in self._measured for case in t.cases)), ()
        )

    def fail_after(self, result: RunResult) -> None:
        """Mark the running cases if a rank has exited without an event, for example killed by the system.

        Other ranks, which lose the connection to it, often write their event before its exit is seen.
        """
        # Communication libraries abort a process that has lost a connection.
        killed = [rank for rank in result.exits if rank.code < 0 and rank.code != -signal.SIGABRT and not rank.stopped]
        first = min(killed, key=lambda rank: rank.time) if killed else first_failure(result.exits)
        if first is None or (self.failed and not killed):
            return
        tail = f" {' '.join(first.tail[-3:])}" if first.tail else ""
        names = self.failed or [case.name for case in self._running]
        names = names or [case.name for task in self._tasks for case in task.cases]
        self._fail(names, f"rank {first.rank}: {summarize_exit(first)}.{tail}")

    def _fail(self, names: Sequence[str], reason: str) -> None:
        self.failed = list(names)
        for name in names:
            self._results.end(name, "failed", reason[:_MAX_ERROR])
        self._results.write()


def failure_problems(results: Mapping[str, Any]) -> list[Problem]:
    """Return an error for each case that has failed."""
    rows = [row for row in results["cases"] if row["status"] == "failed"]
    fix = "The other cases are measured. --resume runs only what is missing, and this case again."
    return [Problem(code="FSDP-E786", message=f"{row['case']}: {row['reason']}", fix=fix) for row in rows]
