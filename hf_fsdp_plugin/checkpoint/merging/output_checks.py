"""Checks of the output of a merge against the plan and the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.boxes import row_major, whole
from hf_fsdp_plugin.checkpoint.formats.element_types import SAFETENSORS_NAMES, dtype_size
from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.checkpoint.formats.hashing import hash_bytes
from hf_fsdp_plugin.checkpoint.formats.stored import StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.tensor_reader import read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.merging.cast import cast
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

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
