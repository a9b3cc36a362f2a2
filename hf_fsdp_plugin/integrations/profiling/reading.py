"""Reads the files that the ranks have written, as the profile of the run. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.integrations.profiling.options import ProfileOptions, rank_files
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile
from hf_fsdp_plugin.observe.profile.run_profile import RunProfile, merge_ranks
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural

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
