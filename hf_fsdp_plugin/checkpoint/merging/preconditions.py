"""Checks a merge's folders and free disk space before the merge begins."""

from __future__ import annotations

import os
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, why_incomplete
from hf_fsdp_plugin.checkpoint.commit import replaced_path
from hf_fsdp_plugin.checkpoint.formats.errors import problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.merging.staging import staging_path
from hf_fsdp_plugin.text import format_bytes


def check_places(checkpoint: Path, out: Path, *, force: bool) -> None:
    """Raise ``CheckpointError`` if the checkpoint is incomplete, or if the output would overwrite anything."""
    problems = []
    here = Path(os.path.realpath(checkpoint))
    if not checkpoint.is_dir():
        message = "is not a folder." if checkpoint.exists() else "does not exist."
        fix = "Give the folder of a checkpoint, such as output_dir/checkpoint-100."
        problems.append(problem("FSDP-E450", checkpoint, message, fix))
    if out.is_relative_to(here) or here.is_relative_to(out):
        relation = "is inside the checkpoint" if out.is_relative_to(here) else "contains the checkpoint"
        relation = "is the checkpoint itself" if out == here else relation
        problems.append(problem("FSDP-E480", out, f"{relation}.", "Give an output folder next to the checkpoint."))
    elif out.exists() and not out.is_dir():
        problems.append(problem("FSDP-E481", out, "is a file.", "Give a folder."))
    elif out.is_dir() and any(out.iterdir()) and not force:
        fix = "Give another folder, or replace this one with --force."
        problems.append(problem("FSDP-E481", out, "is not empty.", fix))
    if replaced_path(out).exists():
        message = "is the previous output folder, which an interrupted merge has renamed."
        problems.append(problem("FSDP-E482", replaced_path(out), message, "Compare both folders, and delete this one."))
    incomplete = why_incomplete(checkpoint_of(checkpoint)) if checkpoint.is_dir() else None
    if incomplete is not None:
        message = f"is not a complete checkpoint: {incomplete}"
        problems.append(problem("FSDP-E483", checkpoint, message, "Merge another checkpoint."))
    raise_if_any(problems)


def check_space(out: Path, needed: int) -> None:
    """Raise ``CheckpointError`` if the output does not fit on the disk. ``needed`` is its size in bytes.

    Bytes in the staging folder of an earlier attempt count as free: they are reused or removed.
    """
    above = next(folder for folder in out.parents if folder.is_dir())
    status = os.statvfs(above)
    staged = staging_path(out)
    left = sum(path.stat().st_size for path in staged.iterdir() if path.is_file()) if staged.is_dir() else 0
    free = status.f_bavail * status.f_frsize
    if needed > free + left:
        message = f"has {format_bytes(free)} of free space; the merge needs {format_bytes(needed - left)}."
        refuse("FSDP-E484", above, message, "Free some space, or give an output folder on another disk.")
