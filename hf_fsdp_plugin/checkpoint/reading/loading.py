"""Loads what a checkpoint has stored into the shards of this rank, with any world size, mesh and FSDP version.

:func:`load_stored` is the whole story: its lines are the steps of a resume, in their order. The stored tensors
(:mod:`hf_fsdp_plugin.checkpoint.formats.table`) and the shards (:mod:`hf_fsdp_plugin.checkpoint.shards`) are both
described by boxes of whole tensors, so that each rank reads the intersections of its boxes with the stored ones. The
ranks communicate only to check that no rank failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_plugin.backends.loading.pinned_windows import PinnedWindows, wait_for_reads
from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.folders import check_visible
from hf_fsdp_plugin.checkpoint.formats.boxes import is_row_major, slices, span
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer, StoredTensor
from hf_fsdp_plugin.checkpoint.io import MAX_SPAN, InputFiles, object_in
from hf_fsdp_plugin.checkpoint.shards import Piece
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.progress import progress_bar

Stored = TypeVar("Stored", StoredModel, StoredOptimizer)


def load_stored(
    checkpoint: Path,
    into: str,
    read: Callable[[], Stored],
    match: Callable[[Stored], Callable[[InputFiles], None]],
    *,
    verify: bool,
) -> None:
    """Load a model or an optimizer from a checkpoint of any world. Collective.

    Args:
        into: what is loaded, for messages: ``model``.
        read: returns where the tensors are stored, from headers and metadata.
        match: compares the stored tensors with this rank's shards, and returns the function that reads the elements.
        verify: compare the bytes that are read with the hashes of the manifest.

    Raises:
        CheckpointError, SpecError: some rank has a problem. Nothing has been changed before the last step.
    """
    if broadcast_object(checkpoint.exists()):  # on rank 0
        with on_all_ranks(f"reading {checkpoint}"):
            check_visible(checkpoint, "reads")  # another machine may see the folder later
    with on_all_ranks(f"reading {checkpoint}"):
        stored = read()  # names, boxes, files and offsets; of a large checkpoint, from its index
        files = files_of_checkpoint(checkpoint, stored, verify=verify)  # compare each block of bytes that they read
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())  # each rank compares a share
    with on_all_ranks(f"comparing {checkpoint} with the {into}"):
        read_elements = match(stored)  # by name; raises all differences at once
    with on_all_ranks(f"reading {checkpoint}"), files:
        read_elements(files)  # transfers() intersects the boxes, and fill() reads them in the order of their bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of elements in a file, and the tensor into which they are read.

    Attributes:
        offset: byte offset of the first element in the file.
        strides: strides in the file, in elements.
        dtype: dtype in the file. The elements are cast to the dtype of ``into``.
        into: a tensor with the shape of the box, on any device.
    """

    file: str
    offset: int
    strides: tuple[int, ...]
    dtype: torch.dtype
    into: torch.Tensor


def transfers(stored: StoredTensor, pieces: Iterable[Piece]) -> Iterator[Transfer]:
    """Yield the transfers that fill ``pieces`` from ``stored``, which may be sharded differently."""
    dtype = getattr(torch, stored.dtype)
    for piece in pieces:
        for source, common, offset in stored.parts_of(piece.box):
            yield Transfer(source.file, offset, source.strides, dtype, piece.tensor[slices(common, piece.box)])


@torch.no_grad()
def fill(files: InputFiles, work: Iterable[Transfer]) -> None:
    """Execute all transfers in the order of their bytes in the files.

    Data is read directly into contiguous CPU memory, through a buffer of at most ``MAX_SPAN`` bytes otherwise. Copies
    to an accelerator are asynchronous; later operations of the current stream see the data.

    Raises:
        CheckpointError: a file ends too early, or has other bytes than those that were saved.
    """
    ordered = sorted(work, key=lambda transfer: (transfer.file, transfer.offset))
    total = sum(transfer.into.nbytes for transfer in ordered)
    wait_for_reads(transfer.into for transfer in ordered)
    windows = PinnedWindows()
    with progress_bar("loading", total) as update:
        for transfer in ordered:
            _execute(files, windows, transfer)
            update(transfer.into.nbytes)


def _execute(files: InputFiles, windows: PinnedWindows, work: Transfer) -> None:
    into, strides, size = work.into, work.strides, work.dtype.itemsize
    contiguous = into.is_contiguous() and is_row_major(strides, into.shape)
    if contiguous and into.dtype == work.dtype and into.device.type == "cpu":
        files.read(work.file, work.offset, _memory(into))
        return
    num_bytes = span(strides, into.shape) * size
    if num_bytes <= MAX_SPAN:
        pinned = into.device.type != "cpu"
        buffer = windows.take(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        files.read(work.file, work.offset, _memory(buffer))
        into.copy_(buffer.view(work.dtype).as_strided(into.shape, strides), non_blocking=pinned)
        return
    dim = max((dim for dim, length in enumerate(into.shape) if length > 1), key=lambda dim: strides[dim])
    step = max(1, min(MAX_SPAN // (strides[dim] * size), into.shape[dim] // 2))
    for start in range(0, into.shape[dim], step):
        part = into.narrow(dim, start, min(step, into.shape[dim] - start))
        _execute(files, windows, replace(work, offset=work.offset + start * strides[dim] * size, into=part))


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def mismatch(code: str, checkpoint: Path, message: str, fix: str = "") -> Problem:
    """Return a problem of a checkpoint that does not match a model or an optimizer."""
    if not fix:
        kind = _model_type(checkpoint)
        fix = f"Load it into the model that was saved{f', a {kind}' if kind else ''}, or load another checkpoint."
    return Problem(code=code, message=message, fix=fix, origin=Origin(source=str(checkpoint)))


def _model_type(checkpoint: Path) -> str:
    """Return the config's model type, such as ``LlamaForCausalLM (llama)``; empty without a config."""
    for folder in (checkpoint, checkpoint.parent):
        if config := object_in(folder / "config.json"):
            classes = config.get("architectures")
            names = [*(classes[:1] if isinstance(classes, list) else ()), config.get("model_type")]
            shown = [str(name) for name in names if name]
            return f"{shown[0]} ({shown[1]})" if len(shown) == 2 else "".join(shown)
    return ""
