"""Copies tensors to the output of a merge with bounded memory, converts their dtype, and compares the result."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.verify import Progress
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.boxes import SAFETENSORS_NAMES, dtype_size
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.safetensors import SafetensorsFile
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredTensor, read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles, OutputFile, hash_bytes, round_up
from hf_fsdp_plugin.checkpoint.merging.output import MergePlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural


def convert_dtype(data: memoryview, source: str, target: str, out: memoryview) -> int:
    """Convert writable ``data`` to the dtype ``target`` in ``out``, rounding to nearest even. NaN stays NaN.

    Returns:
        The number of finite values that became infinite.
    """
    import torch  # for seconds, so only if a dtype is converted

    values = torch.frombuffer(data, dtype=getattr(torch, source))
    converted = torch.frombuffer(out, dtype=getattr(torch, target))
    converted.copy_(values)
    return int((converted.isinf() & values.isfinite()).sum())


BUFFER = 16 << 20
"""Size of each of the two buffers in bytes."""


def write_file(path: Path, size: int, fill: Callable[[memoryview, int], None]) -> None:
    """Write and sync a file, one buffer while the next one is filled.

    Args:
        fill: (memory, offset) -> fills the memory with the bytes of the file from this offset on.
    """
    file = OutputFile(path, truncate=True)
    buffers = [memoryview(mmap.mmap(-1, BUFFER)) for _ in range(2)]  # aligned to pages
    pending: Future[None] | None = None
    with closing(file), ThreadPoolExecutor(1, thread_name_prefix="hf-fsdp-write") as worker:
        for start in range(0, size, BUFFER):
            count = min(BUFFER, size - start)
            fill(buffers[0][:count], start)
            if pending is not None:
                pending.result()
            pending = worker.submit(file.write, buffers[0][: round_up(count)], start)
            buffers.reverse()
        if pending is not None:
            pending.result()
        file.resize(size)  # the last write was padded to a whole page
        file.sync()


CAST_BLOCK = 1 << 20
"""Number of elements that are converted at once."""


def copy_file(
    source: InputFiles, plan: MergePlan, file: SafetensorsFile, path: Path, progress: Progress
) -> dict[str, int]:
    """Write ``file`` to ``path``. Return tensor name -> number of values that became infinite in the new dtype."""
    infinite: Counter[str] = Counter()
    names, begins = list(file.offsets), list(file.offsets.values())

    def fill(memory: memoryview, start: int) -> None:
        """Fill the memory with the bytes of the file from ``start`` on: those of the header, then whole elements."""
        end = start + len(memory)
        header = file.header[start:end]
        memory[: len(header)] = header
        # Only the tensors with bytes in the memory: a file has thousands of tensors, and is written in many steps.
        first, last = max(bisect_right(begins, start) - 1, 0), bisect_left(begins, end)
        for name, begin in zip(names[first:last], begins[first:last], strict=True):
            tensor, dtype = plan.tensors[name], plan.dtypes[name]
            size = dtype_size(dtype)
            step = len(memory) if tensor.dtype == dtype else CAST_BLOCK * size
            stop = min(end, begin + math.prod(tensor.shape) * size)
            for low in range(max(begin, start), stop, step):
                high = min(low + step, stop)
                out = memory[low - start : high - start]
                elements = (low - begin) // size, (high - begin) // size
                infinite[name] += _read_as(dtype, source, tensor, *elements, out)
        progress("merge", len(memory), plan.num_bytes)

    write_file(path, file.size, fill)
    return +infinite


def _read_as(dtype: str, source: InputFiles, tensor: StoredTensor, start: int, stop: int, out: memoryview) -> int:
    """Read elements of a tensor as another dtype. Return the number of values that became infinite."""
    if tensor.dtype == dtype:
        read_run(source, tensor, start, stop, out)
        return 0
    stored = memoryview(bytearray((stop - start) * dtype_size(tensor.dtype)))
    read_run(source, tensor, start, stop, stored)
    return convert_dtype(stored, tensor.dtype, dtype, out)


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


def byte_problems(source: InputFiles, plan: MergePlan, folder: Path, progress: Progress) -> list[Problem]:
    """Compare all written bytes with the checkpoint."""

    def report(num_bytes: int) -> None:
        progress("verify", num_bytes, plan.num_bytes)

    written = read_stored_model(folder)
    problems = []
    with InputFiles(folder) as files:
        for file in plan.files:
            different = [
                name
                for name in file.offsets
                if not same_elements(source, plan.tensors[name], files, written.tensors[name], report)
            ]
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
    progress: Callable[[int], None] = lambda _: None,
) -> bool:
    """Whether two tensors of one shape have the same bytes if ``tensor`` is converted to the dtype of ``other``.

    ``progress`` is called with the number of bytes of ``other`` that were compared.
    """
    numel, size = math.prod(tensor.shape), dtype_size(other.dtype)
    step = BLOCK // max(dtype_size(tensor.dtype), size)
    expected, found = memoryview(bytearray(step * size)), memoryview(bytearray(step * size))
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        num_bytes = (stop - start) * size
        _read_as(other.dtype, files, tensor, start, stop, expected[:num_bytes])
        read_run(other_files, other, start, stop, found[:num_bytes])
        if hash_bytes(expected[:num_bytes]) != hash_bytes(found[:num_bytes]):
            return False
        progress(num_bytes)
    return True
