"""The elements of a stored tensor, read without the package's reader of tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hf_fsdp_plugin.checkpoint.formats.boxes import relative_slices, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES, StoredTensor


def assembled(root: Path, tensor: StoredTensor) -> np.ndarray:
    """Return the elements of a tensor, from all pieces in files below ``root``; bfloat16 and float8 as raw integers."""
    is_raw = tensor.dtype.startswith(("bfloat16", "float8"))
    dtype = np.dtype(f"u{SIZES[tensor.dtype]}" if is_raw else tensor.dtype)
    result = np.empty(tensor.shape, dtype)
    for piece, _, _ in tensor.parts_of(whole_box(tensor.shape)):
        data = np.memmap(root / piece.file, np.uint8, "r")
        strides = [stride * dtype.itemsize for stride in piece.strides]
        part = np.ndarray(piece.box.sizes, dtype, data, offset=piece.offset, strides=strides)
        result[relative_slices(piece.box, whole_box(tensor.shape))] = part
    return result
