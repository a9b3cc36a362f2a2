"""The folder in which a merge comes to be: killed, it goes on where it stopped; finished, it becomes the output."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.manifest import hash_bytes
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, refuse
from hf_fsdp_plugin.checkpoint.io import sync
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan
from hf_fsdp_plugin.checkpoint.names import MERGING, REPLACED, hidden

PLAN_NAME = "merge_plan.json"


def staging_path(out: Path) -> Path:
    return hidden(out, MERGING)


def replaced_path(out: Path) -> Path:
    return hidden(out, REPLACED)


class Staging:
    """``.OUT.merging`` beside ``OUT``, held by one merge at a time.

    Attributes:
        infinite: tensors in the finished files -> values that the dtype made infinite.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = staging_path(out)
        self.infinite: dict[str, int] = {}
        self._lock = -1
        self._fingerprint = ""

    def __enter__(self) -> Staging:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            refuse(self.folder, "another merge is writing there.", "Wait for it, or give another output folder.")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def open(self, fingerprint: str) -> None:
        """Keep what a merge of the same input with the same options has finished; remove anything else."""
        self._fingerprint = fingerprint
        try:
            before = json.loads((self.folder / PLAN_NAME).read_text())
            if before["fingerprint"] == fingerprint:
                self.infinite = dict(before["infinite"])
                return
        except (OSError, ValueError, TypeError, KeyError):
            pass  # no earlier merge, or one that was killed before it had a plan
        for leftover in self.folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        self._write_plan()

    def has(self, file: SafetensorsFile) -> bool:
        """Whether the file was finished: until then it has another name."""
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
        temporary = self.folder / f"{PLAN_NAME}.part"
        temporary.write_text(json.dumps({"fingerprint": self._fingerprint, "infinite": self.infinite}) + "\n")
        sync(temporary)
        temporary.replace(self.folder / PLAN_NAME)

    def discard(self) -> None:
        shutil.rmtree(self.folder)

    def publish(self) -> None:
        """Become ``OUT``. An ``OUT`` of before is moved aside first, and removed when the new one is in place."""
        aside = replaced_path(self.out)
        if self.out.exists():
            self.out.rename(aside)
        (self.folder / PLAN_NAME).unlink()
        sync(self.folder)
        self.folder.rename(self.out)
        sync(self.out.parent)
        if aside.exists():
            shutil.rmtree(aside)


def restore_replaced(out: Path) -> None:
    """Put back an output that a killed merge had moved aside, and not yet replaced."""
    aside = replaced_path(out)
    if aside.is_dir() and not out.exists():
        aside.rename(out)


def fingerprint(index: StoredModel, plan: MergePlan) -> str:
    """Changes with the input's files (names, sizes, times of change), and with what the output is to hold."""
    files = sorted({piece.file for tensor in index.tensors.values() for piece in tensor.pieces})
    state: list[Any] = [str(index.root.resolve())]
    for file in files:
        found = (index.root / file).stat()
        state.append([file, found.st_size, found.st_mtime_ns])
    state += [[file.name, file.size, hash_bytes(file.header)] for file in plan.files]
    return hash_bytes(json.dumps(state).encode())
