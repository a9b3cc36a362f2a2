"""Element types by name: torch's and numpy's sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_fsdp_plugin.checkpoint.formats.dtypes import SIZES, dtype_size, numpy_dtype


@pytest.mark.parametrize("name", sorted(SIZES))
def test_type_has_the_size_of_torch(name: str) -> None:
    assert dtype_size(name) == getattr(torch, name).itemsize == numpy_dtype(name).itemsize


def test_types_without_numpy_type_are_raw_integers() -> None:
    assert numpy_dtype("bfloat16") == np.dtype("<u2")
    assert numpy_dtype("float8_e4m3fn") == np.dtype("u1")
    assert numpy_dtype("float32") == np.dtype("<f4")


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown element type 'float31'"):
        numpy_dtype("float31")
