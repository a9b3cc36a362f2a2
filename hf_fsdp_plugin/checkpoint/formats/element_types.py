"""Element types by torch's names, and how their bytes read without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_RAW = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}
"""Types that numpy lacks -> the integers of their size."""

SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "bfloat16": 2, **{name: 1 for name in _RAW if name.startswith("float8")},
}  # fmt: skip
"""Bytes an element."""


def dtype_size(dtype: str) -> int:
    """Bytes an element. Raises ``ValueError`` for a type that no checkpoint's format here knows."""
    if dtype not in SIZES:
        raise ValueError(f"unknown element type {dtype!r}; known are {', '.join(sorted(SIZES))}.")
    return SIZES[dtype]


def numpy_dtype(dtype: str) -> numpy.dtype:
    """The numpy type that holds the same bytes, little-endian; bfloat16 and float8 as raw unsigned integers."""
    import numpy

    dtype_size(dtype)
    return numpy.dtype(_RAW.get(dtype, dtype)).newbyteorder("<")
