"""The profile of a run: its options, the run in a rank, and its files: those of the ranks, and ``profile.json``.

Imports torch only in a rank that the launcher asks for a profile.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.checkpoint.io import write_atomically
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.tools.profile.rank_profile import RankProfile
from hf_fsdp_plugin.tools.profile.run_profile import RunProfile, merge_ranks
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
_FEWER: Final = "or profile fewer: wait, warmup and active (of `hf-fsdp profile`: --wait, --warmup, --active)."


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
        raises: whether a failure of the profile ends the script. Otherwise the training continues without it.
    """

    folder: str
    wait: int = 1
    warmup: int = 2
    active: int = 4
    after: int = 3
    stops: bool = True
    raises: bool = True

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
        fix = "Write to a folder that all machines share: --output DIR, or output_dir of ProfilerCallback."
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
