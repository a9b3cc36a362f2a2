"""What a merge has written, read back: headers with safetensors' own reader, and every byte if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hf_fsdp_plugin.checkpoint.checking.byte_ranges import Stretch, check, damage
from hf_fsdp_plugin.checkpoint.formats.boxes import row_major, whole
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, hash_bytes, hash_file
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import DTYPES
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredPiece, StoredTensor, problem
from hf_fsdp_plugin.checkpoint.formats.tensor_reader import read_run
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.merging.cast import cast
from hf_fsdp_plugin.checkpoint.merging.plan import MergePlan, is_adapter
from hf_fsdp_plugin.problems import Problem

BLOCK = 4 << 20
"""Bytes that are compared at once."""
_AGAIN = "Merge again; if it happens again, the disk is not to be trusted."
_OTHER_CHECKPOINT = "Take another checkpoint, or fetch this one again from where it came."


def manifest_problems(index: StoredModel, manifest: Manifest, place: Path) -> list[Problem]:
    """Where the files say another thing than the manifest, which was told by the live model.

    An adapter's checkpoint leaves out the model that the adapter sits on; the manifest does not.
    """
    problems = []
    adapter = is_adapter(index.tensors)
    same = {name: group for group in manifest.ties for name in group}
    for name, (dtype, shape) in manifest.parameters.items():
        found = next((index.tensors[tied] for tied in same.get(name, (name,)) if tied in index.tensors), None)
        if found is None and adapter:
            continue
        if found is None:
            problems.append(problem(place, f"'{name}' of the manifest is in no file.", _OTHER_CHECKPOINT))
        elif (found.dtype, found.shape) != (dtype, tuple(shape)):
            message = f"'{name}' is {_shown(found.dtype, found.shape)}, and {_shown(dtype, shape)} in the manifest."
            problems.append(problem(place, message, _OTHER_CHECKPOINT))
    return problems


def damaged_input(index: StoredModel, manifest: Manifest, folder: Path) -> list[Problem]:
    """The ranges of the model's files whose bytes are not those that were saved."""
    used = {(index.root / piece.file).resolve() for tensor in index.tensors.values() for piece in tensor.pieces}
    records = {folder / record.path: record for record in manifest.files if (folder / record.path).resolve() in used}
    stretches = [
        Stretch(path, part.start, part.stop, part.hash, (part.name,) if part.name else ())
        for path, record in records.items()
        for part in record.ranges
    ]
    damaged, problems = check(stretches, hash_file, None)
    return problems + [damage(hit, len(records[path].ranges)) for path, hit in damaged.items()]


def header_problems(folder: Path, plan: MergePlan) -> list[Problem]:
    """Where the files' headers differ from the plan: names, dtypes, shapes, sizes."""
    from safetensors import SafetensorError, safe_open

    problems = []
    for file in plan.files:
        path = folder / file.name
        try:
            with safe_open(path, "np") as opened:
                found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
                read = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
        except (SafetensorError, OSError) as error:
            problems.append(problem(path, f"was written, but cannot be read: {error}.", _AGAIN))
            continue
        planned = {name: (DTYPES[plan.dtypes[name]][0], plan.tensors[name].shape) for name in file.offsets}
        wrong = sorted(name for name in read.keys() | planned.keys() if read.get(name) != planned.get(name))
        problems += [problem(path, f"'{name}' was not written as planned.", _AGAIN) for name in wrong]
    return problems


def byte_problems(index: StoredModel, plan: MergePlan, folder: Path, progress: Callable[[int], None]) -> list[Problem]:
    """The tensors whose written bytes differ from those read once more from the checkpoint; ``progress`` gets bytes."""
    problems = []
    with InputFiles(index.root) as source, InputFiles(folder) as written:
        for file in plan.files:
            for name, offset in file.offsets.items():
                tensor = plan.tensors[name]
                whole_piece = StoredPiece(whole(tensor.shape), file.name, offset, row_major(tensor.shape))
                copy = StoredTensor(name, plan.dtypes[name], tensor.shape, (whole_piece,))
                if not same_elements(source, tensor, written, copy, progress):
                    message = f"'{name}' has other bytes than the checkpoint's."
                    problems.append(problem(folder / file.name, message, _AGAIN))
    return problems


def same_elements(
    files: InputFiles,
    tensor: StoredTensor,
    other_files: InputFiles,
    other: StoredTensor,
    progress: Callable[[int], None] | None = None,
) -> bool:
    """Whether two tensors of one shape hold the same bytes, ``tensor`` converted to the dtype of ``other``.

    ``progress`` is told the bytes of ``other`` that were compared.
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


def _shown(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype} {list(shape)}"
