"""One file of a merge's output, from its header to its last tensor, through bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.formats.tensor_reader import read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.merging.cast import cast
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan
from hf_fsdp_plugin.checkpoint.merging.write import FileWriter

CAST_BLOCK = 1 << 20
"""Elements that are converted at once."""

Progress = Callable[[str, int, int], None]
"""Told what is being done (``merge``, ``verify``), the bytes done since the last call, and those in all."""


def copy_file(
    source: InputFiles, plan: MergePlan, file: SafetensorsFile, writer: FileWriter, progress: Progress
) -> dict[str, int]:
    """Write ``file``. Returns the number of values that its dtype made infinite, by the tensor's name."""

    def told(count: int) -> None:
        progress("merge", count, plan.num_bytes)

    infinite = {}
    writer.write(file.header)
    told(len(file.header))
    for name in file.offsets:
        tensor, dtype = plan.tensors[name], plan.dtypes[name]
        if tensor.dtype == dtype:
            _copy(source, tensor, writer, told)
        elif lost := _convert(source, tensor, dtype, writer, told):
            infinite[name] = lost
    return infinite


def _copy(source: InputFiles, tensor: StoredTensor, writer: FileWriter, told: Callable[[int], None]) -> None:
    start, numel, size = 0, math.prod(tensor.shape), dtype_size(tensor.dtype)
    while start < numel:
        room = writer.room()
        count = min(len(room) // size, numel - start)
        read_run(source, tensor, start, start + count, room[: count * size])
        writer.advance(count * size)
        told(count * size)
        start += count


def _convert(
    source: InputFiles, tensor: StoredTensor, dtype: str, writer: FileWriter, told: Callable[[int], None]
) -> int:
    """The same through another dtype. Returns the number of values that became infinite."""
    start, numel, lost = 0, math.prod(tensor.shape), 0
    stored_size, size = dtype_size(tensor.dtype), dtype_size(dtype)
    stored = memoryview(bytearray(min(CAST_BLOCK, numel) * stored_size))
    while start < numel:
        room = writer.room()
        count = min(len(room) // size, numel - start, CAST_BLOCK)
        read_run(source, tensor, start, start + count, stored[: count * stored_size])
        lost += cast(stored[: count * stored_size], tensor.dtype, dtype, room[: count * size])
        writer.advance(count * size)
        told(count * size)
        start += count
    return lost
