"""Reads stored bytes directly into the memory of tensors, box by box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_fsdp_plugin.backends.pinned_windows import PinnedWindows, wait_for_reads
from hf_fsdp_plugin.checkpoint.formats.boxes import intersect, row_major, slices, span
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.io import MAX_SPAN, InputFiles
from hf_fsdp_plugin.checkpoint.shard_layout import Piece
from hf_fsdp_plugin.progress import progress_bar


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
        for source in stored.within(piece.box):
            common = intersect(piece.box, source.box)
            if common is None:
                continue
            starts = (part.start for part in slices(common, source.box))
            first = sum(start * stride for start, stride in zip(starts, source.strides, strict=True))
            into = piece.tensor[slices(common, piece.box)]
            yield Transfer(source.file, source.offset + first * dtype.itemsize, source.strides, dtype, into)


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
            _copy(files, windows, transfer.file, transfer.offset, transfer.strides, transfer.dtype, transfer.into)
            update(transfer.into.nbytes)


def _copy(
    files: InputFiles,
    windows: PinnedWindows,
    file: str,
    offset: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    into: torch.Tensor,
) -> None:
    contiguous = into.is_contiguous() and _is_row_major(strides, into.shape)
    if contiguous and into.dtype == dtype and into.device.type == "cpu":
        files.read(file, offset, _memory(into))
        return
    num_bytes = span(strides, into.shape) * dtype.itemsize
    if num_bytes <= MAX_SPAN:
        pinned = into.device.type != "cpu"
        buffer = windows.take(num_bytes) if pinned else torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        files.read(file, offset, _memory(buffer))
        into.copy_(buffer.view(dtype).as_strided(into.shape, strides), non_blocking=pinned)
        return
    dim = max((dim for dim, size in enumerate(into.shape) if size > 1), key=lambda dim: strides[dim])
    step = max(1, min(MAX_SPAN // (strides[dim] * dtype.itemsize), into.shape[dim] // 2))
    for start in range(0, into.shape[dim], step):
        part = into.narrow(dim, start, min(step, into.shape[dim] - start))
        _copy(files, windows, file, offset + start * strides[dim] * dtype.itemsize, strides, dtype, part)


def _is_row_major(strides: Iterable[int], shape: torch.Size) -> bool:
    return all(
        size == 1 or stride == dense for stride, dense, size in zip(strides, row_major(shape), shape, strict=True)
    )


def _memory(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
