"""Copies tensors to the output of a merge with bounded memory, converts their dtype, and compares the result."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.checkpoint.checking.verified_files import Progress
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.boxes import SAFETENSORS_NAMES, dtype_size, numpy_dtype, row_major, whole
from hf_fsdp_plugin.checkpoint.formats.safetensors import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored import StoredPiece, StoredTensor, read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles, OutputFile, hash_bytes, round_up
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

if TYPE_CHECKING:
    from numpy.typing import NDArray


def cast(data: memoryview, source: str, target: str, out: memoryview) -> int:
    """Convert ``data`` to the dtype ``target`` in ``out``, rounding to nearest even. NaN stays NaN.

    Returns:
        The number of finite values that became infinite.
    """
    import numpy

    values = numpy.frombuffer(data, numpy_dtype(source))
    if source == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    converted = numpy.frombuffer(out, numpy_dtype(target))
    with numpy.errstate(over="ignore", invalid="ignore"):
        if target == "bfloat16":
            converted[:] = _to_bfloat16(values.astype("<f4", copy=False))
            infinite = (converted & 0x7FFF) == 0x7F80
        else:
            converted[:] = values
            infinite = numpy.isinf(converted)
    return int(numpy.count_nonzero(numpy.isfinite(values[infinite])))


def _to_bfloat16(values: NDArray[Any]) -> NDArray[Any]:
    """Round each float32 to its upper half. A NaN that would round to infinity becomes a quiet NaN."""
    import numpy

    bits = values.view("<u4")
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = numpy.isnan(values)
    rounded[nan] = (bits[nan] >> 16).astype("<u2") | 0x0040
    return rounded


BUFFER = 16 << 20
"""Size of each of the two buffers in bytes."""


class FileWriter:
    """Writer of one file. Fill :meth:`free` and call :meth:`advance` repeatedly. Leaving the context syncs the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffers = [_aligned(), _aligned()]
        self._pending: Future[None] | None = None
        self._filled = 0
        self._position = 0

    def __enter__(self) -> FileWriter:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf-fsdp-write")
        self._file = OutputFile(self._path, truncate=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                size = self._position + self._filled
                self._flush()
                self._wait()
                self._file.resize(size)  # the last write was padded to a whole page
                self._file.sync()
        finally:
            self._worker.shutdown()
            self._file.close()

    def free(self) -> memoryview:
        """Return the memory for the next bytes; it is never empty."""
        return self._buffers[0][self._filled :]

    def advance(self, count: int) -> None:
        """Mark the first ``count`` bytes of the free memory as filled."""
        self._filled += count
        if self._filled == BUFFER:
            self._flush()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            free = self.free()
            count = min(len(free), len(view))
            free[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def _flush(self) -> None:
        self._wait()
        pages = self._buffers[0][: round_up(self._filled)]
        self._pending = self._worker.submit(self._file.write, pages, self._position)
        self._position += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()


def _aligned() -> memoryview:
    memory = mmap.mmap(-1, BUFFER)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


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


BLOCK = 4 << 20
"""Number of bytes that are compared at once."""
_MERGE_AGAIN = "Merge again. If the problem persists, check the disk."


def header_problems(folder: Path, plan: MergePlan) -> list[Problem]:
    """Read the headers with the safetensors library, and return the tensors that differ from the plan."""
    from safetensors import SafetensorError, safe_open

    problems = []
    for file in plan.files:
        path = folder / file.name
        try:
            with safe_open(path, "np") as opened:
                found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
                read = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
        except (SafetensorError, OSError) as error:
            message = f"was written, but safetensors cannot read it: {error}."
            problems.append(problem("FSDP-E486", path, message, _MERGE_AGAIN))
            continue
        planned = {name: (SAFETENSORS_NAMES[plan.dtypes[name]], plan.tensors[name].shape) for name in file.offsets}
        wrong = sorted(name for name in read.keys() | planned.keys() if read.get(name) != planned.get(name))
        if wrong:
            message = f"does not have the planned names, dtypes and shapes of {plural(len(wrong), 'tensor')}"
            problems.append(problem("FSDP-E486", path, f"{message}: {format_names(wrong, 3)}.", _MERGE_AGAIN))
    return problems


def byte_problems(source: InputFiles, plan: MergePlan, folder: Path, progress: Callable[[int], None]) -> list[Problem]:
    """Compare all written bytes with the checkpoint; ``progress`` is called with the number of new bytes."""
    problems = []
    with InputFiles(folder) as written:
        for file in plan.files:
            different = []
            for name, offset in file.offsets.items():
                tensor = plan.tensors[name]
                whole_piece = StoredPiece(whole(tensor.shape), file.name, offset, row_major(tensor.shape))
                copy = StoredTensor(name, plan.dtypes[name], tensor.shape, (whole_piece,))
                if not same_elements(source, tensor, written, copy, progress):
                    different.append(name)
            if different:
                message = f"contains {plural(len(different), 'tensor')} whose bytes differ from the checkpoint"
                text = f"{message}: {format_names(different, 3)}."
                problems.append(problem("FSDP-E486", folder / file.name, text, _MERGE_AGAIN))
    return problems


def same_elements(
    files: InputFiles,
    tensor: StoredTensor,
    other_files: InputFiles,
    other: StoredTensor,
    progress: Callable[[int], None] | None = None,
) -> bool:
    """Whether two tensors of the same shape have the same bytes after ``tensor`` is converted to the dtype of
    ``other``.

    ``progress`` is called with the number of bytes of ``other`` that were compared.
    """
    numel = whole(tensor.shape).numel
    size, other_size = dtype_size(tensor.dtype), dtype_size(other.dtype)
    step = BLOCK // max(size, other_size)
    stored, converted, read = (memoryview(bytearray(step * width)) for width in (size, other_size, other_size))
    for start in range(0, numel, step):
        count = min(step, numel - start)
        expected = stored[: count * size]
        read_run(files, tensor, start, start + count, expected)
        if tensor.dtype != other.dtype:
            expected, before = converted[: count * other_size], expected
            cast(before, tensor.dtype, other.dtype, expected)
        found = read[: count * other_size]
        read_run(other_files, other, start, start + count, found)
        if hash_bytes(expected) != hash_bytes(found):
            return False
        if progress is not None:
            progress(len(found))
    return True
