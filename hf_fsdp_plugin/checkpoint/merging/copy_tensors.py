"""Copies tensors from a checkpoint to an output file, with bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_fsdp_plugin.checkpoint.checking.byte_ranges import Progress
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored import StoredTensor
from hf_fsdp_plugin.checkpoint.formats.tensor_reader import read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.merging.cast import cast
from hf_fsdp_plugin.checkpoint.merging.file_writer import FileWriter
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan

CAST_BLOCK = 1 << 20
"""Number of elements that are converted at once."""


def copy_file(
    source: InputFiles, plan: MergePlan, file: SafetensorsFile, writer: FileWriter, progress: Progress
) -> dict[str, int]:
    """Write ``file``. Return tensor name -> number of values that became infinite in the new dtype."""

    def report(count: int) -> None:
        progress("merge", count, plan.num_bytes)

    infinite = {}
    writer.write(file.header)
    report(len(file.header))
    for name in file.offsets:
        tensor, dtype = plan.tensors[name], plan.dtypes[name]
        if overflowed := _copy(source, tensor, dtype, writer, report):
            infinite[name] = overflowed
    return infinite


def _copy(
    source: InputFiles, tensor: StoredTensor, dtype: str, writer: FileWriter, report: Callable[[int], None]
) -> int:
    """Copy a tensor, converted to ``dtype``. Return the number of values that became infinite."""
    start, numel, overflowed = 0, math.prod(tensor.shape), 0
    stored_size, size = dtype_size(tensor.dtype), dtype_size(dtype)
    stored = memoryview(bytearray(min(CAST_BLOCK, numel) * stored_size)) if tensor.dtype != dtype else None
    while start < numel:
        free = writer.free()
        count = min(len(free) // size, numel - start)
        if stored is None:
            read_run(source, tensor, start, start + count, free[: count * size])
        else:
            count = min(count, CAST_BLOCK)
            part = stored[: count * stored_size]
            read_run(source, tensor, start, start + count, part)
            overflowed += cast(part, tensor.dtype, dtype, free[: count * size])
        writer.advance(count * size)
        report(count * size)
        start += count
    return overflowed
