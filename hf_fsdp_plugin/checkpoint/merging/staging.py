"""The staging folder of a merge. An interrupted merge can resume from this folder; a finished merge renames it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, why_incomplete
from hf_fsdp_plugin.checkpoint.errors import problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.folders import put_in_place, replaced_path
from hf_fsdp_plugin.checkpoint.formats.safetensors import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel
from hf_fsdp_plugin.checkpoint.io import hash_bytes, sync, write_text
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan
from hf_fsdp_plugin.checkpoint.names import MERGING, hidden
from hf_fsdp_plugin.text import format_bytes

PLAN_NAME = "merge_plan.json"


def staging_path(out: Path) -> Path:
    return hidden(out, MERGING)


class MergeStaging:
    """The folder ``.OUT.merging`` next to ``OUT``, locked by one merge at a time.

    Attributes:
        infinite: name of a tensor in the finished files -> number of values that became infinite in the new dtype.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = staging_path(out)
        self.infinite: dict[str, int] = {}
        self._lock = -1
        self._fingerprint = ""

    def __enter__(self) -> MergeStaging:
        while not self._lock_folder():
            pass  # another merge renamed or removed the folder before it was locked here
        return self

    def _lock_folder(self) -> bool:
        """Lock the folder. Return whether the locked folder is still at its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = os.open(self.folder, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._lock), self.folder.stat()):
                return True
        except BlockingIOError:
            os.close(self._lock)
            fix = "Wait for it, or give another output folder."
            refuse("FSDP-E485", self.folder, "is in use by another merge.", fix)
        except FileNotFoundError:
            pass
        os.close(self._lock)
        return False

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def prepare(self, fingerprint: str) -> None:
        """Keep the finished files of an earlier merge with the same input and options, and remove everything else."""
        self._fingerprint = fingerprint
        try:
            before = json.loads((self.folder / PLAN_NAME).read_text())
            if before["fingerprint"] == fingerprint:
                self.infinite = dict(before["infinite"])
                return
        except (OSError, ValueError, TypeError, KeyError):
            pass  # there was no earlier merge, or it was interrupted before it wrote a plan
        for leftover in self.folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        self._write_plan()

    def has(self, file: SafetensorsFile) -> bool:
        """Whether an earlier merge finished the file. Unfinished files have other names."""
        path = self.folder / file.name
        return path.is_file() and path.stat().st_size == file.size

    def part(self, file: SafetensorsFile) -> Path:
        return self.folder / f"{file.name}.part"

    def finish_file(self, file: SafetensorsFile, infinite: dict[str, int]) -> None:
        self.infinite |= infinite
        self._write_plan()
        self.part(file).replace(self.folder / file.name)
        sync(self.folder)

    def _write_plan(self) -> None:
        plan = {"fingerprint": self._fingerprint, "infinite": self.infinite}
        write_text(self.folder / PLAN_NAME, json.dumps(plan) + "\n")

    def discard(self) -> None:
        shutil.rmtree(self.folder)

    def commit(self) -> None:
        """Rename the folder to ``OUT``, then delete the folder that was at ``OUT`` before."""
        (self.folder / PLAN_NAME).unlink()
        sync(self.folder)
        replaced = put_in_place(self.folder, self.out)
        sync(self.out.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


def fingerprint(index: StoredModel, plan: MergePlan, *, verify_input: bool) -> str:
    """Return a hash of the input files (names, sizes, modification times), of the planned output files, and of whether
    the input is verified: files of a merge that did not verify it are written again.
    """
    files = sorted({file for tensor in index.tensors.values() for file in tensor.files()})
    state: list[Any] = [str(index.root.resolve()), verify_input]
    for file in files:
        found = (index.root / file).stat()
        state.append([file, found.st_size, found.st_mtime_ns])
    state += [[file.name, file.size, hash_bytes(file.header)] for file in plan.files]
    return hash_bytes(json.dumps(state).encode())


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
