"""The output of a merge: its plan and its staging folder.

A finished merge renames the staging folder. Any other merge removes it; after a killed process, the next merge does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.checking.completeness import checkpoint_of, why_incomplete
from hf_fsdp_plugin.checkpoint.errors import problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import sync
from hf_fsdp_plugin.checkpoint.folders import put_in_place, restore_replaced
from hf_fsdp_plugin.checkpoint.formats.safetensors import SafetensorsFile, plan_files
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredTensor, shared_tensors

FLOATS = ("float64", "float32", "bfloat16", "float16")
"""The dtypes that are converted. Integers, booleans and quantized weights keep their dtype."""
OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer", "decoder", "output_projection")
"""Names of output layers. If weights are tied, Hugging Face files contain only the name of the embedding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergePlan:
    """The contents of a merge's output.

    Attributes:
        tensors: name -> where its elements are stored; tied tensors occur once.
        dtypes: name -> the dtype that is written.
        aliases: omitted name -> the name under which its tensor is written.
        files: the layout of the output files.
        adapter: whether the tensors are only the weights of an adapter, without the base model.
    """

    tensors: Mapping[str, StoredTensor]
    dtypes: Mapping[str, str]
    aliases: Mapping[str, str]
    files: tuple[SafetensorsFile, ...]
    adapter: bool

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


def plan_merge(
    index: StoredModel,
    ties: Iterable[tuple[str, ...]],
    *,
    dtype: str | None,
    max_shard_size: int,
    fp32: Collection[str] = (),
) -> MergePlan:
    """Plan the merge of all tensors of a checkpoint.

    Args:
        ties: groups of names that share one tensor, in addition to those with the same pieces.
        dtype: torch's name of the dtype for all floating-point tensors; ``None`` keeps their dtypes.
        max_shard_size: maximum number of bytes of tensors per file. Adapters are one file, because PEFT reads only one.
        fp32: names of the tensors that are written in fp32 if there is a ``dtype``.

    Raises:
        CheckpointError: there are no tensors, or safetensors does not support their dtypes.
    """
    if not index.tensors:
        refuse("FSDP-E451", index.root, "contains no tensors.", "Give the folder of a checkpoint with a model.")
    aliases = _aliases(index, [*ties, *shared_tensors(index)])
    tensors = {name: tensor for name, tensor in index.tensors.items() if name not in aliases}
    dtypes = {name: dtype if dtype and tensor.dtype in FLOATS else tensor.dtype for name, tensor in tensors.items()}
    dtypes |= {name: "float32" for name in fp32 if dtype and dtypes.get(name) == dtype}
    adapter = file_names.is_adapter(tensors)
    size, stem = (sys.maxsize, file_names.ADAPTER) if adapter else (max_shard_size, file_names.HF_MODEL)
    files = plan_files([(name, dtypes[name], tensor.shape) for name, tensor in tensors.items()], size, stem)
    return MergePlan(tensors=tensors, dtypes=dtypes, aliases=aliases, files=tuple(files), adapter=adapter)


def _aliases(index: StoredModel, ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Return omitted name -> kept name. The first name of each group that is not an output layer is kept."""
    aliases: dict[str, str] = {}
    order = {name: place for place, name in enumerate(index.tensors)}
    for group in ties:
        present = sorted({aliases.get(name, name) for name in group if name in order}, key=order.__getitem__)
        present.sort(key=lambda name: name.rpartition(".")[0].rpartition(".")[2] in OUTPUT_LAYERS)
        for name in present[1:]:
            aliases[name] = present[0]
            aliases.update({alias: present[0] for alias, kept in aliases.items() if kept == name})
    return aliases


def staging_path(out: Path) -> Path:
    return file_names.hidden_path(out, file_names.MERGING)


class MergeStaging:
    """The folder ``.OUT.merging`` next to ``OUT``, locked by one merge at a time. Removed if it is not committed."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, staging_path(out)
        self._is_committed = False

    def __enter__(self) -> MergeStaging:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            fix = "Wait for it, or give another output folder."
            refuse("FSDP-E485", self.folder, "is in use by another merge.", fix)
        for leftover in self.folder.iterdir():  # of a merge that was killed
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_committed:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def commit(self) -> None:
        """Rename the folder to ``OUT``, then delete the folder that was at ``OUT`` before."""
        sync(self.folder)
        replaced = put_in_place(self.folder, self.out)
        self._is_committed = True
        if replaced is not None:
            shutil.rmtree(replaced)


def prepare_output(out: Path, sources: Iterable[Path], *, force: bool, is_complete: bool = False) -> Path:
    """Return the folder to write: the target of a symbolic link is replaced, not the link.

    Args:
        sources: what is read.
        force, is_complete: as for :func:`check_places`, whose errors are raised.
    """
    out = Path(os.path.realpath(out))
    restore_replaced(out)
    for source in sources:
        check_places(source, out, force=force, is_complete=is_complete)
    return out


def check_places(checkpoint: Path, out: Path, *, force: bool, is_complete: bool = False) -> None:
    """Raise ``CheckpointError`` if the checkpoint is incomplete, or if the output would overwrite anything.

    Args:
        is_complete: the caller checks whether the checkpoint is complete.
    """
    problems = []
    here = Path(os.path.realpath(checkpoint))
    if not checkpoint.is_dir():
        message = "is not a folder." if checkpoint.exists() else "does not exist."
        fix = "Give the folder of a checkpoint, such as output_dir/checkpoint-100."
        problems.append(problem("FSDP-E450", checkpoint, message, fix))
    if out.is_relative_to(here) or here.is_relative_to(out):
        message = "is, contains or is inside the checkpoint."
        problems.append(problem("FSDP-E480", out, message, "Give an output folder next to the checkpoint."))
    elif out.exists() and not out.is_dir():
        problems.append(problem("FSDP-E481", out, "is a file.", "Give a folder."))
    elif out.is_dir() and any(out.iterdir()) and not force:
        fix = "Give another folder, or replace this one with --force."
        problems.append(problem("FSDP-E481", out, "is not empty.", fix))
    is_known = is_complete or not checkpoint.is_dir()
    incomplete = None if is_known else why_incomplete(checkpoint_of(checkpoint))
    if incomplete is not None:
        message = f"is not a complete checkpoint: {incomplete}"
        problems.append(problem("FSDP-E483", checkpoint, message, "Merge another checkpoint."))
    raise_if_any(problems)
