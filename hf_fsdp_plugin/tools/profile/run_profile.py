"""The profile of a run: its options, the files of its ranks, and ``profile.json``, which merges them.

Imports torch only in a rank that the launcher asks for a profile.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind
from hf_fsdp_plugin.tools.profile.rank_profile import PHASES, RankProfile, Sums, TimedCollective, Times, UnitSeconds
from hf_fsdp_plugin.version import SCHEMA_VERSION

OPTIONS_VARIABLE: Final = "HF_FSDP_PROFILE"
"""Environment variable with ``ProfileOptions`` as JSON."""
OBSERVER: Final = "hf_fsdp_plugin.tools.profile.run:attach"
"""The function that begins the profile in a rank, for the variable of :mod:`hf_fsdp_plugin.observers`."""
NUM_TRACES: Final = 8
"""Ranks that keep their Chrome trace, from rank 0."""
RANKS_FOLDER: Final = "ranks"
TRACES_FOLDER: Final = "traces"
RESULT: Final = "profile.json"
PARTIAL: Final = ".part"
"""Suffix of a file that is being written."""
_FEWER: Final = "or profile fewer: --wait, --warmup, --active."
Sort = tuple[CollectiveKind, str | None, bool]
"""Kind and unit of a collective, and whether it is called in forward."""
CallKey = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""
RunProfile = Mapping[str, Any]
"""The profile of a run, as ``profile.json`` contains it (docs/json.schema.json). Seconds are those of one step and one
rank, averaged. ``units`` are in the order of their first all-gathers.
"""


@dataclass(kw_only=True)
class CallSums(Sums):
    """Collectives of one kind and phase, per step.

    Attributes:
        seconds, exposed: averages over the ranks.
        transfer: exposed seconds of the rank that waits least in each call. The rest is waiting for other ranks, which
            another collective would have to do instead.
    """

    calls: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    transfer: float = 0.0


class _Arrival(NamedTuple):
    """One rank in one collective. Its time is by the clock of the first rank's host."""

    time: float
    rank: int
    call: TimedCollective


def merge_ranks(ranks: Sequence[RankProfile]) -> RunProfile:
    """Return the profile of all ranks. Raises ``ValueError`` if there are none."""
    if not ranks:
        raise ValueError("no rank has a profile")
    first = ranks[0]
    ends = {key: call.end for key, call in _keyed(first)}
    arrivals: dict[CallKey, list[_Arrival]] = defaultdict(list)
    unit_seconds: dict[str, list[UnitSeconds]] = {}
    for rank in ranks:
        # Ranks finish a collective together, which shows by how much the clock of another host is ahead.
        shifts = [call.end - ends[key] for key, call in _keyed(rank) if key in ends]
        ahead = median(shifts) if shifts and rank.host != first.host else 0.0
        for key, call in _keyed(rank):
            arrivals[key].append(_Arrival(call.arrived - ahead, rank.rank, call))
            if call.unit is not None:
                unit_seconds.setdefault(call.unit, [])
        for name, of_unit in rank.units.items():
            unit_seconds.setdefault(name, []).append(of_unit)
    sums: dict[Sort, CallSums] = defaultdict(CallSums)
    collectives: dict[CollectiveKind, CallSums] = defaultdict(CallSums)
    for (_, _, sort, _), of_call in arrivals.items():
        exposed = [arrival.call.exposed for arrival in of_call]
        seconds, transfer = sum(arrival.call.seconds for arrival in of_call), min(exposed) * len(of_call)
        added = CallSums(calls=len(of_call), seconds=seconds, exposed=sum(exposed), transfer=transfer)
        sums[sort] += added.scaled(1 / len(ranks) / first.num_steps)
        collectives[sort[0]] += added.scaled(1 / len(ranks) / first.num_steps)
    times = {
        phase: sum((rank.times[phase] for rank in ranks if phase in rank.times), Times()).scaled(1 / len(ranks))
        for phase in PHASES
        if any(phase in rank.times for rank in ranks)
    }
    return {
        "world_size": first.world_size,
        "num_ranks": len(ranks),
        "num_steps": first.num_steps,
        "device": first.device,
        "phases": {phase: each.to_json() for phase, each in times.items()},
        "total": sum(times.values(), Times()).to_json(),
        "overhead": _overhead(ranks),
        "collectives": {kind: asdict(each) for kind, each in collectives.items()},
        "units": [
            {
                "name": name,
                "bytes": first.facts.get("units", {}).get(name, {}).get("bytes", 0),
                "gather_forward": asdict(sums["all_gather", name, True]),
                "gather_backward": asdict(sums["all_gather", name, False]),
                "reduce": asdict(sums["reduce_scatter", name, False] + sums["all_reduce", name, False]),
                "forward_seconds": mean([each.forward for each in of_unit] or [0.0]),
                "recomputed_seconds": mean([each.recomputed for each in of_unit] or [0.0]),
            }
            for name, of_unit in unit_seconds.items()
        ],
        "ranks": list(_waits(ranks, arrivals.values())),
    }


def _overhead(ranks: Sequence[RankProfile]) -> dict[str, float | None]:
    """Return the median steps with and without the profiler, by the wall clock, and their difference.

    The difference is negative if steps differ for other reasons. A value is ``None`` without such steps.
    """
    profiled = [median(rank.profiled) for rank in ranks if rank.profiled]
    unprofiled = [median(rank.unprofiled) for rank in ranks if rank.unprofiled]
    return {
        "profiled_seconds": mean(profiled) if profiled else None,
        "unprofiled_seconds": mean(unprofiled) if unprofiled else None,
        "seconds": mean(profiled) - mean(unprofiled) if profiled and unprofiled else None,
    }


def _waits(ranks: Sequence[RankProfile], arrivals: Iterable[Sequence[_Arrival]]) -> Iterator[dict[str, Any]]:
    """Yield the step of each rank, and how long all other ranks of a collective wait for this rank alone."""
    late: dict[int, float] = defaultdict(float)
    last = Counter[int]()
    for of_call in arrivals:
        if len(of_call) > 1:
            before, latest = sorted(of_call, key=lambda arrival: arrival.time)[-2:]
            late[latest.rank] += latest.time - before.time
            last[latest.rank] += 1
    for rank in ranks:
        yield {
            "rank": rank.rank,
            "step_seconds": rank.total.seconds,
            "compute_seconds": rank.total.compute,
            "late_seconds": late[rank.rank] / ranks[0].num_steps,
            "last_share": last[rank.rank] / max(1, last.total()),
        }


def _keyed(rank: RankProfile) -> Iterator[tuple[CallKey, TimedCollective]]:
    """Yield the collectives with keys that are equal on all ranks that take part in one."""
    units, counts = rank.facts.get("units", {}), Counter[tuple[str, int, Sort]]()
    for call in rank.calls:
        group = units.get(call.unit, {}).get("group", "")
        if call.kind == "all_reduce" and call.unit is not None:
            group = f"replicas of rank {rank.rank}"  # which other ranks take part is not recorded
        sort: Sort = (call.kind, call.unit, call.phase not in ("backward", "clipping", "optimizer"))
        counts[group, call.step, sort] += 1
        yield (group, call.step, sort, counts[group, call.step, sort]), call


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Which steps are profiled, and what follows.

    Attributes:
        folder: absolute path of the folder for the result.
        wait: optimizer steps before the profiler starts. The first one initializes FSDP.
        warmup: steps with the profiler that are not analyzed.
        active: steps that are analyzed.
        after: steps without the profiler after them, with which its overhead is measured.
        stops: whether the script ends after these steps.
    """

    folder: str
    wait: int = 1
    warmup: int = 2
    active: int = 4
    after: int = 3
    stops: bool = True

    @property
    def last_traced(self) -> int:
        """Number of steps after which the profiler stops."""
        return self.wait + self.warmup + self.active

    @property
    def last(self) -> int:
        return self.last_traced + self.after

    def rank_file(self, rank: int) -> Path:
        return Path(self.folder) / RANKS_FOLDER / f"rank_{rank}.json"

    def trace_file(self, rank: int) -> Path:
        return Path(self.folder) / TRACES_FOLDER / f"rank_{rank}.json.gz"


def read_ranks(folder: Path) -> list[RankProfile]:
    """Return the profiles that the ranks have written to a folder, in rank order."""
    files = (folder / RANKS_FOLDER).glob("rank_*.json")
    profiles = [RankProfile.from_json(json.loads(path.read_text())) for path in files]
    return sorted(profiles, key=lambda profile: profile.rank)


def missing_parts(ranks: Sequence[RankProfile], options: ProfileOptions) -> list[Problem]:
    """Return what the ranks have not profiled: all steps (FSDP-E770), some steps (FSDP-W771) or ranks (FSDP-W777)."""
    num_made = max((rank.num_made for rank in ranks), default=0)
    made = f"the script made {plural(num_made, 'optimizer step')}"
    profiled = [rank for rank in ranks if rank.num_steps]
    if not profiled:
        message = f"nothing to profile: {made}, and the profile needs {options.wait + 1} or more."
        fix = f"Profile a script that trains, and let it make more steps, {_FEWER}"
        return [Problem(code="FSDP-E770", message=message, fix=fix)]
    problems = []
    if len(profiled) < (world_size := ranks[0].world_size):
        message = f"the profile contains {plural(len(profiled), 'rank')} of {world_size:,}."
        fix = "Write to a folder that all machines share: --output DIR."
        problems.append(Problem(code="FSDP-W777", message=message, fix=fix))
    if num_made < options.last_traced:
        message = f"{made}, fewer than the {options.last_traced} of the profile."
        problems.append(Problem(code="FSDP-W771", message=message, fix=f"Let the script make more steps, {_FEWER}"))
    return problems


def write_profile(folder: Path, ranks: Sequence[RankProfile], problems: Sequence[Problem]) -> RunProfile:
    """Write ``profile.json`` of the ranks that have profiled a step, and return its content.

    Raises:
        OSError: it cannot be written. Nothing is left behind.
    """
    run = merge_ranks([rank for rank in ranks if rank.num_steps])
    traces = sorted(str(path) for path in (folder / TRACES_FOLDER).glob("*.json.gz"))
    tree = {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        **run,
        "files": {"folder": str(folder), "result": str(folder / RESULT), "traces": traces},
        "problems": [problem.to_json() for problem in problems],
    }
    write_file(folder / RESULT, json.dumps(tree, indent=1).encode())
    return tree


def files_of_profile(folder: Path) -> list[Path]:
    """Return all files and folders of a profile, whether or not they exist."""
    return [folder / name for name in (RANKS_FOLDER, TRACES_FOLDER, RESULT)]


def remove_paths(paths: Sequence[Path]) -> None:
    """Delete files and folders. Those that are missing are no error."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all, and the folder that contains it.

    Raises:
        OSError: it cannot be written. Nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
