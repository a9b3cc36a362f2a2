"""The files of a profile: those of the ranks, and ``profile.json`` of all ranks together. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from hf_fsdp_plugin.integrations.profiling import RANKS_FOLDER, TRACES_FOLDER, ProfileOptions
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, Times
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, merge_ranks
from hf_fsdp_plugin.observe.profile.suggestions import Suggestion, suggest
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.version import SCHEMA_VERSION

RESULT: Final = "profile.json"
PARTIAL: Final = ".part"
"""Suffix of a file that is being written."""
_FEWER: Final = "or profile fewer: wait, warmup and active (of `hf-fsdp profile`: --wait, --warmup, --active)."


@dataclass(frozen=True)
class ProfileFiles:
    """The files that the ranks have written.

    Attributes:
        paths: the files of the ranks that have profiled a step.
        num_steps: the largest number of optimizer steps that a rank has made.
        world_size: the number of ranks of the run; 0 if no rank has written a file.
    """

    paths: Sequence[Path]
    num_steps: int
    world_size: int

    @property
    def is_complete(self) -> bool:
        return bool(self.paths) and len(self.paths) == self.world_size

    def merge(self) -> RunProfile:
        """Return the profile of all ranks. Raises ``ValueError`` without one."""
        # Read one by one: the files of a large world do not fit into memory together.
        return merge_ranks(RankProfile.from_json(json.loads(path.read_text())["profile"]) for path in self.paths)

    def problems(self, options: ProfileOptions) -> list[Problem]:
        """Return what is missing: all steps (FSDP-E770), some steps (FSDP-W771) or ranks (FSDP-W777)."""
        made = f"the script made {plural(self.num_steps, 'optimizer step')}"
        if not self.paths:
            message = f"nothing to profile: {made}, and the profile needs {options.wait + 1} or more."
            fix = f"Profile a script that trains, and let it make more steps, {_FEWER}"
            return [Problem(code="FSDP-E770", message=message, fix=fix)]
        problems = []
        if not self.is_complete:
            message = f"the profile contains {plural(len(self.paths), 'rank')} of {self.world_size:,}."
            fix = "Write to a folder that all machines share: --output DIR, or output_dir of ProfilerCallback."
            problems.append(Problem(code="FSDP-W777", message=message, fix=fix))
        if self.num_steps < options.last_traced:
            message = f"{made}, fewer than the {options.last_traced} of the profile."
            problems.append(Problem(code="FSDP-W771", message=message, fix=f"Let the script make more steps, {_FEWER}"))
        return problems


def read_ranks(folder: Path) -> ProfileFiles:
    """Return the files in a folder that the ranks have written."""
    steps, world_size, paths = 0, 0, []
    for path in rank_files(folder):
        head = json.loads(path.read_text())
        steps, world_size = max(steps, head["num_steps"]), head["world_size"]
        paths += [path] if head["profile"] is not None else []
    return ProfileFiles(paths, steps, world_size)


def write_profile(
    folder: Path, run: RunProfile, problems: Sequence[Problem]
) -> tuple[list[Suggestion], dict[str, Any]]:
    """Write ``profile.json``, and return the suggestions and its content.

    Raises:
        OSError: it cannot be written. Nothing is left behind.
    """
    suggestions = suggest(run)
    overhead = {"profiled_seconds": run.profiled_seconds, "unprofiled_seconds": run.unprofiled_seconds}
    tree: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "world_size": run.world_size,
        "num_ranks": run.num_ranks,
        "num_steps": run.num_steps,
        "device": run.device,
        "phases": {phase: _times_json(times) for phase, times in run.times.items()},
        "total": _times_json(run.total),
        "overhead": {**overhead, "seconds": run.overhead_seconds},
        "collectives": {kind: asdict(sums) for kind, sums in run.collectives.items()},
        "units": [asdict(unit) for unit in run.units],
        "ranks": [asdict(rank) for rank in run.ranks],
        "suggestions": [asdict(each) for each in suggestions],
        "files": {
            "folder": str(folder),
            "result": str(folder / RESULT),
            "traces": sorted(str(path) for path in (folder / TRACES_FOLDER).glob("*.json.gz")),
        },
        "problems": [problem.to_json() for problem in problems],
    }
    write_file(folder / RESULT, json.dumps(tree, indent=1))
    return suggestions, tree


def _times_json(times: Times) -> dict[str, float]:
    seconds = {f"{name}_seconds": getattr(times, name) for name in ("compute", "communication", "exposed", "idle")}
    return {"seconds": times.seconds, **seconds, "communication_share": times.communication_share}


def files_of_profile(folder: Path) -> list[Path]:
    """Return all files and folders of a profile, whether or not they exist."""
    return [folder / name for name in (RANKS_FOLDER, TRACES_FOLDER, RESULT)]


def remove_paths(paths: Sequence[Path]) -> None:
    """Delete files and folders. Those that are missing are no error."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def rank_files(folder: Path) -> list[Path]:
    """Return the files of all ranks that have written theirs, in rank order."""
    return sorted((folder / RANKS_FOLDER).glob("rank_*.json"), key=lambda path: int(path.stem.partition("_")[2]))


def write_file(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Write text, or what a function writes to the binary file, so that the file is complete or absent.

    Raises:
        OSError: it cannot be written. Nothing is left behind.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
