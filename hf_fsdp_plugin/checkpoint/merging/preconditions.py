"""Whether a merge may begin: the folders that it is given, and the space that it takes."""

from __future__ import annotations

import os
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, why_incomplete
from hf_fsdp_plugin.checkpoint.formats.stored import problem, refuse
from hf_fsdp_plugin.checkpoint.merging.staging import replaced_path, staging_path
from hf_fsdp_plugin.problems import CheckpointError


def check_places(checkpoint: Path, out: Path, *, force: bool) -> None:
    """Refuse an output that would cost something, and a checkpoint that is not whole; all complaints at once."""
    problems = []
    here = Path(os.path.realpath(checkpoint))
    if not checkpoint.is_dir():
        fix = "Give the folder of a checkpoint, such as output_dir/checkpoint-100."
        problems.append(
            problem(checkpoint, "is no folder." if checkpoint.exists() else "there is no such folder.", fix)
        )
    if out.is_relative_to(here) or here.is_relative_to(out):
        within = "lies in the checkpoint" if out.is_relative_to(here) else "holds the checkpoint"
        reason = "is the checkpoint itself" if out == here else within
        problems.append(problem(out, f"{reason}.", "Give an output folder of its own, beside the checkpoint."))
    elif out.exists() and not out.is_dir():
        problems.append(problem(out, "is a file.", "Give a folder."))
    elif out.is_dir() and any(out.iterdir()) and not force:
        problems.append(problem(out, "is not empty.", "Give another folder, or replace this one with --force."))
    if replaced_path(out).exists():
        message = "is what a killed merge had moved aside, and its replacement is in place."
        problems.append(problem(replaced_path(out), message, "Look at both, and delete it."))
    incomplete = why_incomplete(checkpoint_of(checkpoint)) if checkpoint.is_dir() else None
    if incomplete is not None:
        problems.append(problem(checkpoint, f"no complete checkpoint: {incomplete}", "Merge another one."))
    if problems:
        raise CheckpointError(problems)


def check_space(out: Path, needed: int) -> None:
    """Refuse to begin what would fill the disk; ``needed`` is the output's size in bytes.

    What an earlier attempt left will be used or removed, so its bytes count as free.
    """
    above = next(folder for folder in out.parents if folder.is_dir())
    status = os.statvfs(above)
    staged = staging_path(out)
    left = sum(path.stat().st_size for path in staged.iterdir() if path.is_file()) if staged.is_dir() else 0
    free = status.f_bavail * status.f_frsize
    if needed > free + left:
        message = f"{(needed - left) / 1e9:.3f} GB are needed, and {free / 1e9:.3f} GB are free."
        refuse(above, message, "Free some space, or give an output folder on another disk.")
