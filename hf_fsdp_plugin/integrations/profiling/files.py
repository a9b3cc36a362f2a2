"""The files of a profile: those of the ranks, and ``profile.json`` of all ranks together. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.profiling.options import RANKS_FOLDER, TRACES_FOLDER, ProfileOptions
from hf_fsdp_plugin.observe.profile.output import profile_json
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, merge_ranks
from hf_fsdp_plugin.observe.profile.suggestions import Suggestion
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.version import SCHEMA_VERSION

RESULT: Final = "profile.json"
PARTIAL: Final = ".part"
"""Suffix of a file that is being written."""
_FEWER: str = "or profile fewer: wait, warmup and active (of `hf-fsdp profile`: --wait, --warmup, --active)."


@dataclass(frozen=True, slots=True)
class RankResults:
    """The files of a profile.

    Attributes:
        paths: of the ranks that have profiled a step.
        num_steps: optimizer steps of the rank that made most.
        world_size: 0 if no rank has written a file.
    """

    paths: Sequence[Path]
    num_steps: int
    world_size: int

    @property
    def is_complete(self) -> bool:
        return bool(self.paths) and len(self.paths) == self.world_size

    def merge(self, options: ProfileOptions) -> tuple[RunProfile, list[Problem]]:
        """Return the profile of all ranks, with warnings (FSDP-W771, FSDP-W777). Raises ``ValueError`` without one."""
        problems = []
        if len(self.paths) < self.world_size:
            message = f"the profile contains {plural(len(self.paths), 'rank')} of {self.world_size:,}."
            fix = "Write to a folder that all machines share: --output DIR, or output_dir of ProfilerCallback."
            problems.append(Problem(code="FSDP-W777", message=message, fix=fix))
        if self.num_steps < options.last_traced:
            made = plural(self.num_steps, "optimizer step")
            message = f"the script made {made}, fewer than the {options.last_traced} of the profile."
            problems.append(Problem(code="FSDP-W771", message=message, fix=f"Let the script make more steps, {_FEWER}"))
        # Read one by one: the files of a large world do not fit into memory together.
        run = merge_ranks(RankProfile.from_json(json.loads(path.read_text())["profile"]) for path in self.paths)
        return run, problems

    def nothing(self, options: ProfileOptions) -> Problem:
        """Return the problem of a run that made too few steps."""
        message = f"nothing to profile: the script made {plural(self.num_steps, 'optimizer step')}, and the profile "
        message += f"needs {options.wait + 1} or more."
        fix = f"Profile a script that trains, and let it make more steps, {_FEWER}"
        return Problem(code="FSDP-E770", message=message, fix=fix)


def read_ranks(folder: Path) -> RankResults:
    """Return the files in a folder that the ranks have written."""
    steps, world_size, paths = 0, 0, []
    for path in rank_files(folder):
        head = json.loads(path.read_text())
        steps, world_size = max(steps, head["num_steps"]), head["world_size"]
        paths += [path] if head["profile"] is not None else []
    return RankResults(paths, steps, world_size)


def write_profile(
    folder: Path, run: RunProfile, suggestions: Sequence[Suggestion], problems: Sequence[Problem]
) -> dict[str, Any]:
    """Write ``profile.json`` and return its content. Raises ``OSError``; then nothing is left behind."""
    traces = sorted(str(path) for path in (folder / TRACES_FOLDER).glob("*.json.gz"))
    files = {"folder": str(folder), "result": str(folder / RESULT), "traces": traces}
    tree = {"schema_version": SCHEMA_VERSION, **profile_json(run, suggestions, files, problems)}
    write_file(folder / RESULT, json.dumps(tree, indent=1))
    return tree


def remove(paths: Sequence[Path]) -> None:
    """Delete files and folders. Those that are missing are no error."""
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def rank_files(folder: Path) -> list[Path]:
    """Return the files of all ranks that have written theirs, in rank order."""
    return sorted((folder / RANKS_FOLDER).glob("rank_*.json"), key=lambda path: int(path.stem.partition("_")[2]))


def write_file(path: Path, content: Any) -> None:
    """Write text, or copy from a function that gets the binary file, so that the file is complete or absent.

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
